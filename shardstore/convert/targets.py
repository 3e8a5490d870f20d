"""What is converted to: written chunk by chunk into a work folder, so that it can go on later.

Every chunk that is written gives a receipt, a small JSON value; a target that is given its receipts
again continues where it was.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardstore.convert.safetensors_files import Entry, header_bytes
from shardstore.convert.sources import STATE_METADATA, Extras, common_values
from shardstore.dcp.files import METADATA_NAME, DcpFiles
from shardstore.dcp.layout import grid_of
from shardstore.errors import CheckpointExistsError
from shardstore.mapping import ShardedObject
from shardstore.plain_values import NotPlainError
from shardstore.storage import commit, dtypes
from shardstore.storage.chunks import ChunkWrite, RegionRead, as_bytes
from shardstore.storage.commit import FolderAttempt
from shardstore.storage.documents import SEPARATOR, ArrayMeta
from shardstore.storage.files import FileMover
from shardstore.storage.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, plan_grid
from shardstore.storage.location import Location
from shardstore.storage.manifest import ChunkRecord, RankManifest
from shardstore.storage.names import node_name
from shardstore.storage.options import SaveOptions
from shardstore.storage.publish import About, publish
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.common_json import BACKEND, MEMBER, VERSION, StateRecord, as_json

__all__ = ["DcpTarget", "SafetensorsTarget", "ShardstoreTarget", "Target", "Written"]

logger = logging.getLogger(__name__)

Receipt = Any
Read = Callable[[Sequence[RegionRead]], None]


@dataclass(frozen=True)
class Written:
    """A chunk to be written.

    Attributes:
        array: its tensor, on the target's grid.
        index: its place in the grid.
        data: its elements, contiguous.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    data: NDArray[Any]


class Target(Protocol):
    """A checkpoint under construction."""

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """The tensor on the grid that it is written by, in chunks of about so many bytes."""

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Make what is needed before the first chunk; what is there already stays."""

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write chunks; one receipt each, in order."""

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Take note of a chunk that was written before."""

    def reader(self) -> Read:
        """How to read back what was written, once all of it is."""

    def publish(self) -> None:
        """Put the finished checkpoint in its place."""


def _rows(meta: ArrayMeta, most_bytes: int) -> ArrayMeta:
    """The tensor in chunks that are each one contiguous range of it."""
    size = dtypes.itemsize(meta.dtype)
    grid = plan_grid(meta.shape, meta.shape, size, most_bytes, leading_only=True)
    return ArrayMeta(meta.key, meta.node, grid, meta.dtype, codecs=())


def _put(work: Path, target: Path) -> None:
    """Rename into place what may not replace anything."""
    if target.is_dir() and not any(target.iterdir()):
        target.rmdir()
    if target.exists():
        raise CheckpointExistsError(f"{target} already exists; convert to elsewhere")
    os.rename(work, target)


class ShardstoreTarget:
    """A checkpoint of this package: root document, manifest and all."""

    def __init__(self, work: Path, target: Path, *, overwrite: bool, source: str) -> None:
        self._work = Location.of(work)
        self._target = Location.of(target)
        self._options = SaveOptions(overwrite=overwrite)
        self._manifest = RankManifest(0)
        self._mover = FileMover(self._work)
        self._source = source
        self._extras = Extras()
        self._started = perf_counter()

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Chunks that straddle no shard of the source."""
        size = dtypes.itemsize(meta.dtype)
        most = min(DEFAULT_TARGET_CHUNK_BYTES, most_bytes)
        grid, edges, straddled = grid_of(meta.shape, boxes, size, most)
        return ArrayMeta(
            meta.key,
            node_name(meta.key),
            grid,
            meta.dtype,
            separator=SEPARATOR,
            shard_shape=None if straddled else edges,
        )

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Array documents, and what is no tensor."""
        self._extras = extras
        for meta in arrays:
            text = self._manifest.add_array(meta, created=True)
            self._work.write(f"{meta.node}/{meta.document_name}", text.encode())
        for key, value in extras.objects.items():
            sharded = ShardedObject.empty_from_unique_key(key)
            sharded.data = value()
            TorchCommonSaveStrategy().save_sharded_objects({key: sharded}, self._work.path)
        if extras.common is not None:
            self._work.write("common.pt", extras.common)

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write chunks; their records are the receipts."""
        found: dict[tuple[str, tuple[int, ...]], ChunkRecord] = {}

        def done(item: ChunkWrite, record: ChunkRecord) -> None:
            found[item.array.key, tuple(item.index)] = record

        self._mover.write([ChunkWrite(c.array, c.index, c.data) for c in chunks], done)
        receipts = []
        for chunk in chunks:
            record = found[chunk.array.key, chunk.index]
            self._manifest.add_chunk(chunk.array, chunk.index, record)
            running = [int(n) for n in record.running]
            receipts.append([record.stored_bytes, record.crc, record.digest.hex(), running])
        return receipts

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """A row of the manifest."""
        stored, crc, digest, running = receipt
        record = ChunkRecord(stored, crc, bytes.fromhex(digest), running)
        self._manifest.add_chunk(array, index, record)

    def reader(self) -> Read:
        """Chunks are read with their checksums verified."""
        return lambda reads: self._mover.read(reads, lambda: None)

    def publish(self) -> None:
        """Root document and commit."""
        extras = self._extras
        record: dict[str, Any] = {"converted_from": self._source}
        backend = ("torch", 1)
        if extras.common is None:
            backend = (BACKEND, VERSION)
            files = sorted(key.rpartition("/")[0] for key in extras.objects)
            about = StateRecord(extras.record.paths, extras.record.values, files)
            record[MEMBER] = about.to_json()
        self._work.write(commit.OWNER_NAME, b"{}")
        about_root = About(
            common_backend=backend,
            attributes=extras.attributes,
            record=record,
            seconds=perf_counter() - self._started,
        )
        attempt = FolderAttempt(self._target, self._work, "convert", self._options.overwrite)
        publish(attempt, self._options, [self._manifest.to_bytes()], about_root)


class SafetensorsTarget:
    """One safetensors file, or a folder with several and an index."""

    def __init__(self, work: Path, target: Path, *, file_bytes: int) -> None:
        self._work, self._target = work, target
        self._file_bytes = file_bytes
        self._single = target.name.endswith(".safetensors")
        self._entries: dict[str, Entry] = {}

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Ranges of rows."""
        return _rows(meta, most_bytes)

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Headers, and files of their full size."""
        files = self._files(arrays)
        state = json.dumps(_record_of(extras).to_json())
        metadata = {"format": "pt", STATE_METADATA: state}
        for i, of_file in enumerate(files):
            path = self._work / self._name(i, len(files))
            parts = [(meta.key, meta.dtype, meta.shape) for meta in of_file]
            begin, starts = header_bytes(parts, metadata if i == 0 else {"format": "pt"})
            for meta in of_file:
                self._entries[meta.key] = Entry(path, meta.dtype, meta.shape, starts[meta.key])
            ends = [entry.start + entry.nbytes for entry in map(self._entry, of_file)]
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(handle, begin, 0)
                os.ftruncate(handle, max([len(begin), *ends]))
            finally:
                os.close(handle)
        if not self._single:
            total = sum(entry.nbytes for entry in self._entries.values())
            weight_map = {key: entry.path.name for key, entry in self._entries.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2)
            (self._work / "model.safetensors.index.json").write_text(text)

    def _entry(self, meta: ArrayMeta) -> Entry:
        return self._entries[meta.key]

    def _files(self, arrays: Sequence[ArrayMeta]) -> list[list[ArrayMeta]]:
        files: list[list[ArrayMeta]] = [[]]
        size = 0
        for meta in arrays:
            bytes_of = meta.grid.size and _nbytes(meta)
            if files[-1] and size + bytes_of > self._file_bytes and not self._single:
                files.append([])
                size = 0
            files[-1].append(meta)
            size += bytes_of
        return files

    def _name(self, number: int, count: int) -> str:
        if self._single:
            return self._target.name
        return f"model-{number + 1:05}-of-{count:05}.safetensors"

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write ranges to their places; there is nothing to remember."""
        for chunk in chunks:
            entry = self._entries[chunk.array.key]
            box = chunk.array.grid.box(chunk.index)
            position = 0
            for offset, length in zip(box.offset, entry.shape, strict=True):
                position = position * length + offset
            data = as_bytes(chunk.data)
            handle = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _write_all(handle, data.data, entry.start + position * chunk.data.itemsize)
            finally:
                os.close(handle)
        return [None] * len(chunks)

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Nothing: a range is at its place or it is not."""

    def reader(self) -> Read:
        """Mapped from the files."""

        def read(reads: Sequence[RegionRead]) -> None:
            for one in reads:
                where: tuple[Any, ...] = (..., *one.box.slices)
                one.out[...] = self._entries[one.array.key].mapped()[where]

        return read

    def publish(self) -> None:
        """Rename the folder, or the file in it."""
        if not self._single:
            _put(self._work, self._target)
            return
        _put(self._work / self._target.name, self._target)
        self._work.rmdir()


class DcpTarget:
    """A checkpoint of PyTorch DCP's own format: one ``.distcp`` file and ``.metadata``."""

    FILE = "__0_0.distcp"

    def __init__(self, work: Path, target: Path) -> None:
        self._work, self._target = work, target
        self._arrays: Sequence[ArrayMeta] = ()
        self._extras = Extras()
        self._end = 0
        self._stored: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Ranges of rows: each is an item of its own."""
        return _rows(meta, most_bytes)

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Nothing is written before the chunks."""
        self._arrays, self._extras = arrays, extras

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Append items; their places are the receipts."""
        receipts = []
        with open(self._work / self.FILE, "r+b" if self._end else "w+b") as file:
            for chunk in chunks:
                place = self._append(file, dtypes.as_tensor(chunk.data))
                self.restore(chunk.array, chunk.index, place)
                receipts.append(place)
        return receipts

    def _append(self, file: Any, value: object) -> list[int]:
        start = self._end
        stream = io.BytesIO()
        torch.save(value, stream)
        file.seek(start)
        file.write(stream.getbuffer())
        self._end = file.tell()
        return [start, self._end - start]

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Where an item is; what comes after the last one is written over."""
        start, length = receipt
        self._stored[array.key, array.grid.box(index).offset] = (start, length)
        self._end = max(self._end, start + length)

    def reader(self) -> Read:
        """Write what is no tensor and the metadata, and read by them."""
        self._write_metadata()
        return DcpFiles.open(self._work).read

    def _write_metadata(self) -> None:
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
                info = _StorageInfo(self.FILE, *self._stored[key, box.offset])
                places[MetadataIndex(key, box.offset)] = info
            paths[key] = self._extras.record.paths.get(key, (key,))
        with open(self._work / self.FILE, "r+b" if self._end else "w+b") as file:
            for key, path, value in _values(self._extras):
                about[key] = BytesStorageMetadata()
                start, length = self._append(file, value)
                info = _StorageInfo(self.FILE, start, length)
                places[MetadataIndex(key)] = info
                paths[key] = path
            file.truncate(self._end)
        metadata = Metadata(about, paths, places, version="1.0.0")
        (self._work / METADATA_NAME).write_bytes(pickle.dumps(metadata))

    def publish(self) -> None:
        """Rename the folder."""
        _put(self._work, self._target)


def _values(extras: Extras) -> Iterable[tuple[str, tuple[str | int, ...], Any]]:
    """``(key, path, value)`` of what is no tensor."""
    if extras.common is not None:
        for path, value in common_values(extras.common, "common.pt").items():
            yield ".".join(map(str, path)), path, value
    for key in extras.record.values:
        path = extras.record.paths.get(key, (key,))
        yield key, path, extras.record.value(key, "the source")
    for unique_key, value_of in extras.objects.items():
        key = unique_key if extras.common is not None else unique_key.rpartition("/")[0]
        yield key, extras.record.paths.get(key, (key,)), value_of()


def _record_of(extras: Extras) -> StateRecord:
    """The values that have a JSON form, for formats that hold no others."""
    values: dict[str, Any] = {}
    paths: dict[str, Any] = dict(extras.record.paths)
    for key, path, value in _values(extras):
        try:
            values[key] = as_json(value)
            paths[key] = path
        except NotPlainError as reason:
            logger.warning("%s is left out: %s", key, reason)
    return StateRecord(paths, values)


def _nbytes(meta: ArrayMeta) -> int:
    size = dtypes.itemsize(meta.dtype)
    for n in meta.shape:
        size *= n
    return size


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
