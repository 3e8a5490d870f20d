"""PyTorch DCP's own format as the target of a conversion: ``.distcp`` files and ``.metadata``.

On a disk all items are in one file of a work folder beside the target. In an object store a file is
what is written at a time, at the target itself: without ``.metadata``, which is written last, it is
no checkpoint.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

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

from shardstore.convert.sources import Extras
from shardstore.convert.targets import (
    UNREADABLE,
    Read,
    Receipt,
    Written,
    put_in_place,
    rows_of,
    values_of,
)
from shardstore.dcp.files import METADATA_NAME, DcpFiles
from shardstore.errors import CheckpointExistsError, UnsafeObjectError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["DcpObjects", "DcpTarget"]

OBJECT_BYTES = 32 * 1024 * 1024
"""A file in an object store is written once so much was gathered."""
_FILE = re.compile(r"__0_\d+\.distcp")

Place = tuple[int, int, int]
"""Number of a file, first byte and length of an item."""


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"


class DcpTarget:
    """A local checkpoint of PyTorch DCP.

    Args:
        work: folder beside the target.
        target: where the checkpoint shall be.
    """

    plain: ClassVar[bool] = False

    def __init__(self, work: Location, target: Location) -> None:
        self._at, self._target = work, target
        self._arrays: Sequence[ArrayMeta] = ()
        self._extras = Extras()
        self._stored: dict[tuple[str, tuple[int, ...]], Place] = {}
        self._metadata = b""

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Ranges of rows: each is an item of its own."""
        return rows_of(meta, most_bytes)

    def start(self) -> Any:
        """An empty work folder."""
        self._at.delete()
        self._at.write(_file_name(0), b"")

    def resume(self, state: Any) -> bool:
        """If the work folder is there."""
        return self._at.is_dir()

    def has(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Yes: an item is written before its receipt, and the comparison finds out if not."""
        return True

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Nothing is written before the chunks."""
        self._arrays, self._extras = arrays, extras

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Append items; their places are the receipts."""
        places = self._put(dtypes.as_tensor(chunk.data) for chunk in chunks)
        for chunk, place in zip(chunks, places, strict=True):
            self.restore(chunk.array, chunk.index, place)
        return places

    def _put(self, values: Iterable[object]) -> list[Place]:
        """Write items behind the last one; what an earlier run left there is written over."""
        end = max((start + length for _, start, length in self._stored.values()), default=0)
        path = f"{self._at.url}/{_file_name(0)}"
        places = []
        with store_errors("writing", path), open(path, "r+b") as file:
            file.seek(end)
            for value in values:
                stream = _saved(value)
                places.append((0, file.tell(), stream.getbuffer().nbytes))
                file.write(stream.getbuffer())
            file.truncate()
        return places

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Where an item is."""
        number, start, length = receipt
        self._stored[array.key, array.grid.box(index).offset] = (number, start, length)

    def reader(self) -> Read:
        """Write what is no tensor, make the metadata, and read by them."""
        self._metadata = self._described()
        return DcpFiles.parse(self._at, self._metadata).read

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
        files = DcpFiles.parse(self._at, self._metadata)

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
        self._at.write(METADATA_NAME, self._metadata)
        put_in_place(self._at, self._target)

    def stop(self) -> None:
        """Nothing is held."""


class DcpObjects(DcpTarget):
    """A checkpoint of PyTorch DCP in an object store.

    Args:
        target: where the checkpoint shall be.
    """

    def __init__(self, target: Location) -> None:
        super().__init__(target, target)
        self._next = 0

    def start(self) -> Any:
        """Without the files of an earlier run."""
        ours = [name for name in self._at.listing() if _FILE.fullmatch(name)]
        self._at.remote.delete(ours)

    def resume(self, state: Any) -> bool:
        """Always: what is not there is found out by the comparison."""
        return True

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Where an item is; files that come later have other names."""
        super().restore(array, index, receipt)
        self._next = max(self._next, receipt[0] + 1)

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
        self._at.write(_file_name(self._next), gathered.getvalue())
        self._next += 1
        return io.BytesIO()

    def publish(self) -> None:
        """Write the metadata, which makes the files a checkpoint.

        Raises:
            CheckpointExistsError: there is one.
        """
        if not self._at.remote.create(METADATA_NAME, self._metadata):
            raise CheckpointExistsError(
                f"{self._target.url} already exists; convert to elsewhere", url=self._target.url
            )


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
