"""PyTorch DCP's format (also Megatron-Core's torch_dist) as source and target of a conversion."""

from __future__ import annotations

import gc
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from shardstore.convert.formats import FileTarget, NonTensors, Read, Receipts, values_of
from shardstore.core import DCP_BACKEND, CheckpointingConfig
from shardstore.dcp.files import DcpFiles, append, tensor_metadata
from shardstore.errors import KeyNameError
from shardstore.megatron import modernise, modernised_key
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_OBJECT, COMMON_STATE_NAME, CONFIG_NAME
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.stores.location import Location
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_text, is_long
from shardstore.values.torch_dump import dump_bytes


class DcpSource(DcpFiles):
    """Checkpoints of PyTorch DCP, and of Megatron-Core's torch_dist backend."""

    roots = (METADATA_NAME,)
    left_out: Sequence[str] = ()

    def boxes(self, key: str) -> list[Box]:
        """Return one box for each stored part."""
        return [part.box for part in self.parts[key]]

    def rest(self) -> NonTensors:
        """Return the common part and sharded objects; values as JSON if they have a JSON form."""
        objects = {key: partial(self.read_unwrapped, key) for key in self.objects}
        if (stored := self.location.read_if_there(COMMON_STATE_NAME)) is not None:
            return NonTensors(stored, objects=objects)
        if common := objects.pop(f"{COMMON_OBJECT}/shard_0_1", None):  # Megatron-Core 0.19
            return NonTensors(dump_bytes(common()), objects=objects)
        values: dict[str, Any] = {}
        for key in self.objects:
            with suppress(NotPlainError):
                document, text = as_text(self.read_object(key))
                if not is_long(text):
                    values[key] = document
        others = [key for key in self.objects if key not in values]
        found = {f"{key}/shard_0_1": partial(self.read_object, key) for key in others}
        return NonTensors(None, StateRecord(self.paths, values), found)


class DcpTarget(FileTarget):
    """A checkpoint of PyTorch DCP. The last file, ``.metadata``, makes the files a checkpoint.

    Args:
        work: folder beside a local target; not used for an object store.
        output: folder or URL of the finished checkpoint.
    """

    _last = METADATA_NAME
    _paths: Mapping[str, tuple[str | int, ...]] = {}
    """Key -> path of the common values, plain tensors among them."""

    def __init__(self, work: Location, output: Location) -> None:
        ours = rf"__0_\d+\.distcp|{re.escape(METADATA_NAME)}|{re.escape(COMMON_STATE_NAME)}"
        super().__init__(work, output, self._last, ours)

    def begin(self, known: Receipts) -> Receipts:
        """Write nothing. Choose file names that an earlier run has not used."""
        self._next = 1 + max((number for number, _, _ in known.values()), default=-1)
        return known

    def write(self, chunks: Sequence[ChunkWrite]) -> list[Any]:
        """Write chunks to a new file. A receipt is the file's number, offset and length."""
        return self._put([dtypes.as_tensor(chunk.data()) for chunk in chunks])

    def _put(self, values: Sequence[object]) -> list[Any]:
        file, name = io.BytesIO(), _file_name(self._next)
        infos = [append(file, name, value) for value in values]
        gc.collect(1)  # torch 2.9 keeps in a cycle what torch.save has written
        places = [(self._next, info.offset, info.length) for info in infos]
        if places:
            self._at.write(name, file.getvalue())
            self._next += 1
        return places

    def finish(self, receipts: Receipts) -> Read:
        """Write the values that are not tensors, and make the metadata."""
        values = list(self._values(self.rest))
        about: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        stored: dict[MetadataIndex, Any] = {}
        for meta in self.arrays:
            key, boxes = meta.key, []
            for index in map(meta.grid.index_at, range(meta.grid.size)):
                boxes.append(meta.grid.box(index))
                stored[MetadataIndex(key, boxes[-1].offset)] = receipts[key, index]
            about[key] = tensor_metadata(dtypes.torch_dtype(meta.dtype), meta.shape, boxes)
            paths[key] = self._paths.get(key) or self.rest.record.paths.get(key, (key,))
        # A value may be a BytesIO itself, whose content append() would take for a saved value.
        places = self._put([io.BytesIO(dump_bytes(value)) for _, _, value in values])
        for (key, path, _), place in zip(values, places, strict=True):
            if key in about:
                text = f"two values of the state dict have the key {key!r} in the format of DCP"
                raise KeyNameError(f"{text}; convert to another format", key=key)
            about[key], paths[key] = BytesStorageMetadata(), path
            stored[MetadataIndex(key)] = place
        infos = {item: _StorageInfo(_file_name(n), *place) for item, (n, *place) in stored.items()}
        self._metadata = pickle.dumps(Metadata(about, paths, infos, version=CURRENT_DCP_VERSION))
        self._files = DcpFiles.parse(self._at, self._metadata)
        return self._files.read

    def _values(self, rest: NonTensors) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
        """Yield key, path and value of each value that is not an array, as DCP saves the state."""
        flat, self._paths = flatten_state_dict(rest.common_values())
        arrays = {meta.key for meta in self.arrays}
        for key, value in flat.items():
            if not (key in arrays and isinstance(value, torch.Tensor)):
                yield key, self._paths[key], value
        yield from values_of(rest, {})

    def documents(self, rest: NonTensors) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield key, expected bytes and stored bytes of each value that is not a tensor."""
        for key, _, value in self._values(rest):
            yield key, dump_bytes(value), self._files.object_bytes(key)

    def publish(self) -> None:
        """Write the metadata, which makes the files a checkpoint.

        Raises:
            CheckpointExistsError: the target has appeared meanwhile.
        """
        self.complete(METADATA_NAME, self._metadata)


class MegatronTarget(DcpTarget):
    """A checkpoint of Megatron-Core's torch_dist backend, with ``common.pt``, for every release.

    Optimizer states of releases before 0.14 get the names of ``fully_reshardable``.
    """

    _last = CONFIG_NAME

    def key_of(self, key: str) -> str:
        """Return the key that current releases use for the tensor."""
        return modernised_key(key)

    def _values(self, rest: NonTensors) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
        """Yield key, path and value of each object, in a list of one as Megatron-Core stores it."""
        for key, value_of in rest.objects.items():
            yield key, (key,), [value_of()]

    def finish(self, receipts: Receipts) -> Read:
        """Write the objects and the common part, and make the metadata."""
        self._at.write(COMMON_STATE_NAME, self._common(self.rest))
        return super().finish(receipts)

    def _common(self, rest: NonTensors) -> bytes:
        state = rest.common_values() or rest.record.nested(self._output.url, {})
        return dump_bytes(modernise(state))

    def documents(self, rest: NonTensors) -> Iterator[tuple[str, bytes, bytes]]:
        """Yield name, expected bytes and stored bytes of each object and of the common part."""
        yield from super().documents(rest)
        yield COMMON_STATE_NAME, self._common(rest), self._at.read(COMMON_STATE_NAME)

    def publish(self) -> None:
        """Write ``.metadata``, then ``metadata.json``. Raises the errors of
        :meth:`DcpTarget.publish`."""
        self._at.write(METADATA_NAME, self._metadata)
        self.complete(CONFIG_NAME, json.dumps(asdict(CheckpointingConfig(DCP_BACKEND))).encode())


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"
