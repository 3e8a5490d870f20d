"""PyTorch DCP's own format (also Megatron-Core's torch_dist) as source and target of a conversion.

On a disk all items are in one file of a work folder. In an object store each write makes a file at
the target itself, which is no checkpoint until ``.metadata`` is written, at the end.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
    UNREADABLE,
    Extras,
    Read,
    Receipt,
    Target,
    Written,
    exists_error,
    put_in_place,
    stamps,
    values_of,
)
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

__all__ = ["DcpObjects", "DcpSource", "DcpTarget"]

OBJECT_BYTES = 32 * 1024 * 1024
"""A file in an object store is written once so much was gathered."""
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
    """A local checkpoint of PyTorch DCP.

    Args:
        work: folder beside the target.
        goal: where the checkpoint shall be.
    """

    def __init__(self, work: Location, goal: Location) -> None:
        super().__init__(work, goal)
        self._stored: dict[tuple[str, tuple[int, ...]], Place] = {}
        self._metadata = b""

    def start(self) -> Any:
        """An empty work folder."""
        self._work.delete()
        self._work.write(_file_name(0), b"")

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Append items; their places are the receipts."""
        places = self._put(dtypes.as_tensor(chunk.data) for chunk in chunks)
        for chunk, place in zip(chunks, places, strict=True):
            self.restore(chunk.array, chunk.index, place)
        return places

    def _put(self, values: Iterable[object]) -> list[Place]:
        """Write items behind the last one; what an earlier run left there is written over."""
        end = max((start + length for _, start, length in self._stored.values()), default=0)
        path = f"{self._work.url}/{_file_name(0)}"
        places = []
        with store_errors("writing", path), open(path, "r+b") as file:
            file.seek(end)
            for value in values:
                stream = _saved(value)
                places.append((0, file.tell(), stream.getbuffer().nbytes))
                file.write(stream.getbuffer())
            file.truncate()
        return places

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Note where an item is."""
        number, start, length = receipt
        self._stored[array.key, array.grid.box(index).offset] = (number, start, length)
        return True

    def reader(self) -> Read:
        """Write what is no tensor, make the metadata, and read by them."""
        self._metadata = self._described()
        return DcpFiles.parse(self._work, self._metadata).read

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

    def written(self) -> Extras:
        """By the metadata."""
        files = DcpFiles.parse(self._work, self._metadata)

        def value_of(key: str) -> Callable[[], Any]:
            def read() -> Any:
                try:
                    return files.read_object(key)
                except UnsafeObjectError:  # a frozenset, which JSON has and torch does not allow
                    return UNREADABLE

            return read

        # Under the names of objects of one shard each.
        return Extras(objects={f"{key}/shard_0_1": value_of(key) for key in files.objects})

    def publish(self) -> None:
        """Write the metadata, and rename the folder."""
        self._work.write(METADATA_NAME, self._metadata)
        put_in_place(self._work, self._goal)


class DcpObjects(DcpTarget):
    """A checkpoint of PyTorch DCP in an object store.

    Args:
        goal: where the checkpoint shall be.
    """

    def __init__(self, goal: Location) -> None:
        super().__init__(goal, goal)
        self._next = 0

    def start(self) -> Any:
        """Without the files of an earlier run."""
        ours = [name for name in self._work.listing() if _FILE.fullmatch(name)]
        self._work.remote.delete(ours)

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Note where an item is; files that come later have other names."""
        self._next = max(self._next, receipt[0] + 1)
        return super().restore(array, index, receipt)

    def _put(self, values: Iterable[object]) -> list[Place]:
        places: list[Place] = []
        gathered = io.BytesIO()
        for value in values:
            start = gathered.tell()
            stream = _saved(value, gathered)
            places.append((self._next, start, stream.tell() - start))
            if stream.tell() >= OBJECT_BYTES:
                gathered = self._send(gathered)
        if gathered.tell():
            self._send(gathered)
        return places

    def _send(self, gathered: io.BytesIO) -> io.BytesIO:
        self._work.write(_file_name(self._next), gathered.getvalue())
        self._next += 1
        return io.BytesIO()

    def publish(self) -> None:
        """Write the metadata, which makes the files a checkpoint.

        Raises:
            CheckpointExistsError: there is one.
        """
        if not self._work.remote.create(METADATA_NAME, self._metadata):
            raise exists_error(self._goal)


def _saved(value: object, into: io.BytesIO | None = None) -> io.BytesIO:
    """A value as ``torch.save`` writes it, behind what is in a stream."""
    stream = io.BytesIO()
    torch.save(value, stream)
    if into is None:
        return stream
    into.write(stream.getbuffer())
    return into


def _info(place: Place) -> _StorageInfo:
    number, start, length = place
    return _StorageInfo(_file_name(number), start, length)
