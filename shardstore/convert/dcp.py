"""PyTorch DCP's format (also Megatron-Core's torch_dist) as source and target of a conversion."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardstore.convert.interfaces import (
    Extras,
    Reader,
    Receipt,
    Target,
    Written,
    exists_error,
    put_in_place,
    stamps,
)
from shardstore.convert.values import UNREADABLE, values_of
from shardstore.dcp.files import DcpFiles
from shardstore.errors import UnsafeObjectError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StateRecord, as_text, is_long

__all__ = ["DcpSource", "DcpTarget"]

FILE_BYTES = 32 * 1024 * 1024
"""A file of items ends after so much."""
_END = object()
_FILE = re.compile(r"__0_\d+\.distcp")

Place = tuple[int, int, int]
"""Number of a file, first byte and length of an item."""


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


class DcpSource:
    """Checkpoints of PyTorch DCP, and of Megatron-Core's torch_dist backend."""

    def __init__(self, place: Location) -> None:
        self._place = place
        self._files = DcpFiles.open(place)
        self.arrays = self._files.arrays

    def boxes(self, key: str) -> list[Box]:
        """One box a part."""
        return [part.box for part in self._files.parts[key]]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions."""
        self._files.read(reads)

    def extras(self) -> Extras:
        """Values as JSON where they have such a form."""
        if self._place.exists(COMMON_STATE_NAME):
            objects = {key: self._object(key, unwrap=True) for key in self._files.objects}
            return Extras(self._place.read(COMMON_STATE_NAME), objects=objects)
        values: dict[str, Any] = {}
        found: dict[str, Callable[[], Any]] = {}
        for key in self._files.objects:
            value = self._files.read_object(key)
            try:
                document, text = as_text(value)
            except NotPlainError:
                text = None
            if text is None or is_long(text):
                found[f"{key}/shard_0_1"] = self._object(key)
            else:
                values[key] = document
        return Extras(None, StateRecord(self._files.paths, values), found)

    def _object(self, key: str, *, unwrap: bool = False) -> Callable[[], Any]:
        def read() -> Any:
            value = self._files.read_object(key)
            # Megatron-Core keeps an object in a list of one.
            return value[0] if unwrap and isinstance(value, list) and len(value) == 1 else value

        return read

    def identity(self) -> list[Any]:
        """What its metadata is."""
        return stamps(self._place, (METADATA_NAME,))


class DcpTarget(Target):
    """A checkpoint of PyTorch DCP.

    On a disk it grows in a work folder. In an object store it is written at the target itself,
    which is no checkpoint until ``.metadata`` is written, at the end.

    Args:
        work: folder beside a local target; it is not used in an object store.
        goal: where the checkpoint shall be.
    """

    def __init__(self, work: Location, goal: Location) -> None:
        super().__init__(work, goal)
        self._at = work if goal.is_local else goal
        self._stored: dict[tuple[str, tuple[int, ...]], Place] = {}
        self._next = 0
        self._metadata = b""

    def start(self) -> Any:
        """Remove the files of an earlier run."""
        for name in filter(_FILE.fullmatch, self._at.listing()):
            self._at.delete(name)
        if self._goal.is_local:
            self._at.write(_file_name(0), b"")  # makes the folder

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write items to files of their own; their places are the receipts."""
        places = self._put(dtypes.as_tensor(chunk.data) for chunk in chunks)
        for chunk, place in zip(chunks, places, strict=True):
            self.restore(chunk.array, chunk.index, place)
        return places

    def _put(self, values: Iterable[object]) -> list[Place]:
        places: list[Place] = []
        left = iter(values)
        while (first := next(left, _END)) is not _END:
            name = _file_name(self._next)
            with self._file(name) as file:
                for value in chain((first,), left):
                    start = file.tell()
                    torch.save(value, file)
                    places.append((self._next, start, file.tell() - start))
                    if file.tell() >= FILE_BYTES:
                        break
            self._next += 1
        return places

    @contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        if self._at.is_local:
            path = f"{self._at.url}/{name}"
            with store_errors("writing", path), open(path, "wb") as file:
                yield file
        else:
            gathered = io.BytesIO()
            yield gathered
            self._at.write(name, gathered.getvalue())

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Note where an item is; files that come later have other names."""
        number, start, length = receipt
        self._next = max(self._next, number + 1)
        self._stored[array.key, array.grid.box(index).offset] = (number, start, length)
        return True

    def read_back(self) -> Reader:
        """Write what is no tensor, make the metadata, and read by them."""
        self._metadata = self._described()
        return _Written(DcpFiles.parse(self._at, self._metadata))

    def _described(self) -> bytes:
        about: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        paths: dict[str, Any] = {}
        for meta in self._arrays:
            key = meta.key
            boxes = [meta.grid.box(meta.grid.index(i)) for i in range(meta.grid.size)]
            about[key] = TensorStorageMetadata(
                TensorProperties(dtypes.torch_dtype(meta.dtype)),
                torch.Size(meta.shape),
                [ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes],
            )
            for box in boxes:
                places[MetadataIndex(key, box.offset)] = _info(self._stored[key, box.offset])
            paths[key] = self._extras.record.paths.get(key, (key,))
        values = list(values_of(self._extras))
        stored = self._put(value for _, _, value in values)
        for (key, path, _), place in zip(values, stored, strict=True):
            about[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _info(place)
            paths[key] = path
        return pickle.dumps(Metadata(about, paths, places, version="1.0.0"))

    def publish(self) -> None:
        """Write the metadata, which makes the files a checkpoint.

        Raises:
            CheckpointExistsError: there is one.
        """
        if self._goal.is_local:
            self._at.write(METADATA_NAME, self._metadata)
            put_in_place(self._at, self._goal)
        elif not self._at.remote.create(METADATA_NAME, self._metadata):
            raise exists_error(self._goal)


class _Written:
    """Reads what was written, by its metadata."""

    def __init__(self, files: DcpFiles) -> None:
        self._files = files
        self.read = files.read

    def extras(self) -> Extras:
        """Return the values under the names of objects of one shard each."""
        return Extras(objects={f"{key}/shard_0_1": self._value(key) for key in self._files.objects})

    def _value(self, key: str) -> Callable[[], Any]:
        def read() -> Any:
            try:
                return self._files.read_object(key)
            except UnsafeObjectError:  # a frozenset, which JSON has and torch does not allow
                return UNREADABLE

        return read


def _info(place: Place) -> _StorageInfo:
    number, start, length = place
    return _StorageInfo(_file_name(number), start, length)
