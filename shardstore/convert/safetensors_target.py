"""Safetensors as the target of a conversion: one file, or a folder with several and an index.

On a disk the files have their full size from the beginning, and ranges are written to their places.
An object can not be written to in the middle: there each file is one upload that is streamed from
its beginning to its end, and an upload that did not come to its end starts again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from shardstore.convert.safetensors_files import (
    INDEX_SUFFIX,
    Entry,
    damaged,
    header_bytes,
    read_header,
)
from shardstore.convert.sources import STATE_METADATA, Extras, read_entry
from shardstore.convert.targets import Read, Receipt, Written, put_in_place, record_of, rows_of
from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.ranges import FileRanges
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.record import StateRecord

__all__ = ["SafetensorsObjects", "SafetensorsTarget"]

INDEX_NAME = f"model{INDEX_SUFFIX}"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MAX_PARTS = 9000
"""Of an upload; S3 takes 10,000 (Amazon S3 user guide, "Multipart upload limits")."""
MIN_PART_BYTES = 8 * 1024 * 1024
MAX_PART_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class _File:
    """A file to be written.

    Attributes:
        name: of the file.
        head: what it begins with.
        size: in bytes, head included.
    """

    name: str
    head: bytes
    size: int


@dataclass(frozen=True)
class _Layout:
    """Which tensor lies where.

    Attributes:
        files: in the order of the tensors in them.
        entries: key -> place in a file.
    """

    files: Sequence[_File]
    entries: dict[str, Entry]

    @classmethod
    def of(
        cls, arrays: Sequence[ArrayMeta], extras: Extras, name: str | None, file_bytes: int
    ) -> _Layout:
        """Tensors in the order given.

        Args:
            arrays: all tensors.
            extras: go into the metadata of the first file.
            name: of the only file; ``None``: several, of about ``file_bytes`` each.
            file_bytes: see ``name``.

        Raises:
            DTypeMismatchError: a data type that the format lacks.
        """
        groups = [list(arrays)] if name else _grouped(arrays, file_bytes)
        state = json.dumps(record_of(extras).to_json())
        metadata = {"format": "pt", STATE_METADATA: state}
        files, entries = [], {}
        for i, of_file in enumerate(groups):
            called = name or f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            parts = [(meta.key, meta.dtype, meta.shape) for meta in of_file]
            head, starts = header_bytes(parts, metadata if i == 0 else {"format": "pt"})
            size = len(head)
            for meta in of_file:
                entry = Entry(called, meta.dtype, meta.shape, starts[meta.key])
                entries[meta.key] = entry
                size = max(size, entry.start + entry.nbytes)
            files.append(_File(called, head, size))
        return cls(files, entries)

    def place(self, chunk: Written) -> tuple[str, int]:
        """File of a chunk, and byte of it that the chunk begins at."""
        entry = self.entries[chunk.array.key]
        position = 0
        offsets = chunk.array.grid.box(chunk.index).offset
        for offset, length in zip(offsets, entry.shape, strict=True):
            position = position * length + offset
        return entry.file, entry.start + position * chunk.data.itemsize

    def index(self) -> bytes:
        """The document that names the file of each tensor."""
        total = sum(entry.nbytes for entry in self.entries.values())
        weight_map = {key: entry.file for key, entry in self.entries.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(index, indent=2).encode()

    def written(self, folder: Location) -> Extras:
        """What is no tensor, from the header of the first file in a folder."""
        name = self.files[0].name
        ranges = FileRanges(folder)
        _, metadata = read_header(ranges, name)
        try:
            about = {"shardstore": {"state_dict": json.loads(metadata[STATE_METADATA])}}
        except (KeyError, ValueError):
            raise damaged(ranges.path(name), "its metadata is another than was written") from None
        return Extras(record=StateRecord.from_root(about, ranges.path(name)) or StateRecord())

    def reader(self, folder: Location) -> Read:
        """How the tensors are read back from a folder."""
        ranges = FileRanges(folder)

        def read(reads: Sequence[RegionRead]) -> None:
            for one in reads:
                read_entry(ranges, self.entries[one.array.key], one)

        return read


def _grouped(arrays: Sequence[ArrayMeta], file_bytes: int) -> list[list[ArrayMeta]]:
    groups: list[list[ArrayMeta]] = [[]]
    size = 0
    for meta in arrays:
        nbytes = Entry("", meta.dtype, meta.shape, 0).nbytes
        if groups[-1] and size + nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(meta)
        size += nbytes
    return groups


class SafetensorsTarget:
    """Files in a work folder beside a local target.

    Args:
        work: the folder.
        target: a file's path, or a folder's.
        file_bytes: size of each of several files, about.
    """

    plain: ClassVar[bool] = True

    def __init__(self, work: Location, target: Location, *, file_bytes: int) -> None:
        self._work, self._target = work, target
        self._file_bytes = file_bytes
        self._single = target.name if target.name.endswith(".safetensors") else None
        self._layout = _Layout((), {})

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Ranges of rows."""
        return rows_of(meta, most_bytes)

    def start(self) -> Any:
        """An empty work folder."""
        self._work.delete()
        with store_errors("creating", self._work.url):
            os.makedirs(self._work.url)

    def resume(self, state: Any) -> bool:
        """If the work folder is there."""
        return self._work.is_dir()

    def has(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Yes: a range is at its place, or the comparison finds out."""
        return True

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Headers, and files of their full size."""
        self._layout = _Layout.of(arrays, extras, self._single, self._file_bytes)
        for file in self._layout.files:
            with self._opened(file.name) as handle:
                os.pwrite(handle.fileno(), file.head, 0)
                os.ftruncate(handle.fileno(), file.size)
        if not self._single:
            self._work.write(INDEX_NAME, self._layout.index())

    def _opened(self, name: str) -> Any:
        path = f"{self._work.url}/{name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with store_errors("writing", path):
            return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write ranges to their places; there is nothing to remember."""
        for chunk in chunks:
            name, position = self._layout.place(chunk)
            with store_errors("writing", f"{self._work.url}/{name}"), self._opened(name) as handle:
                _write_all(handle.fileno(), as_bytes(chunk.data).data, position)
        return [None] * len(chunks)

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Nothing: a range is at its place or it is not."""

    def reader(self) -> Read:
        """Mapped from the files."""
        return self._layout.reader(self._work)

    def written(self) -> Extras:
        """From the header of the first file."""
        return self._layout.written(self._work)

    def publish(self) -> None:
        """Rename the folder, or the file in it."""
        if self._single is None:
            put_in_place(self._work, self._target)
            return
        put_in_place(self._work.child(self._single), self._target)
        self._work.delete()

    def stop(self) -> None:
        """Nothing is held."""


class SafetensorsObjects:
    """Files streamed to an object store.

    Several are written where they shall be, and the index, written last, is what makes them one. A
    single file is uploaded under another name, and copied by the store once it is verified.

    Args:
        work: prefix beside the target.
        target: a file's URL, or a folder's.
        file_bytes: size of each of several files, about.
        budget_bytes: memory for an upload, about.
    """

    plain: ClassVar[bool] = True

    def __init__(
        self, work: Location, target: Location, *, file_bytes: int, budget_bytes: int
    ) -> None:
        self._work, self._target = work, target
        self._file_bytes, self._budget = file_bytes, budget_bytes
        self._single = target.name if target.name.endswith(".safetensors") else None
        self._at = target if self._single is None else work
        self._layout = _Layout((), {})
        self._done: set[str] = set()
        self._name = ""
        self._stream: Any = None

    def array(self, meta: ArrayMeta, boxes: Sequence[Box], most_bytes: int) -> ArrayMeta:
        """Ranges of rows."""
        return rows_of(meta, most_bytes)

    def start(self) -> Any:
        """Without the files of an earlier run."""
        ours = [
            name for name in self._at.listing() if name == self._single or _PART.fullmatch(name)
        ]
        self._at.remote.delete(ours)

    def resume(self, state: Any) -> bool:
        """Always: what is there is looked at."""
        return True

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Find out which files are there."""
        self._layout = _Layout.of(arrays, extras, self._single, self._file_bytes)
        sizes = {name: size for name, size, _ in self._at.remote.details()}
        self._done = {file.name for file in self._layout.files if sizes.get(file.name) == file.size}

    def has(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """If all of its file is there."""
        return self._layout.entries[array.key].file in self._done

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Go on with an upload; chunks come in the order of the file."""
        for chunk in chunks:
            name, position = self._layout.place(chunk)
            self._open(name)
            if self._stream.tell() != position:
                raise StorageError(
                    f"byte {position} of {self._at.url}/{name} follows byte {self._stream.tell()}; "
                    "convert again with resume=False",
                    url=f"{self._at.url}/{name}",
                )
            with self._at.remote.errors("writing", name):
                # Piece by piece: the stream sends what it has gathered in between.
                data = as_bytes(chunk.data).data
                for start in range(0, len(data), MIN_PART_BYTES):
                    self._stream.write(data[start : start + MIN_PART_BYTES])
            self._close_if_whole()
        return [None] * len(chunks)

    def _open(self, name: str) -> None:
        if self._stream is not None and self._name == name:
            return
        file = next(file for file in self._layout.files if file.name == name)
        part = max(MIN_PART_BYTES, min(MAX_PART_BYTES, self._budget // 4), file.size // MAX_PARTS)
        self._name, self._stream = name, self._at.remote.stream(name, part)
        with self._at.remote.errors("writing", name):
            self._stream.write(file.head)

    def _close_if_whole(self) -> None:
        file = next(file for file in self._layout.files if file.name == self._name)
        if self._stream.tell() == file.size:
            with self._at.remote.errors("writing", self._name):
                self._stream.close()
            self._stream = None
            self._done.add(self._name)

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> None:
        """Nothing: the file is there."""

    def reader(self) -> Read:
        """Upload files that hold no elements, and read all back by ranges."""
        for file in self._layout.files:
            if file.name not in self._done:
                self._at.write(file.name, file.head)
        return self._layout.reader(self._at)

    def written(self) -> Extras:
        """From the header of the first file."""
        return self._layout.written(self._at)

    def publish(self) -> None:
        """Write the index, or copy the file to its name.

        Raises:
            CheckpointExistsError: there is one.
        """
        if self._single is None:
            made = self._at.remote.create(INDEX_NAME, self._layout.index())
        else:
            made = not self._target.exists()
            if made:
                self._target.remote.copy_from(self._at.remote, self._single, "", any_size=True)
                self._work.delete()
        if not made:
            raise CheckpointExistsError(
                f"{self._target.url} already exists; convert to elsewhere", url=self._target.url
            )

    def stop(self) -> None:
        """Give an upload up, so that the store does not keep its parts."""
        if self._stream is not None:
            with suppress(Exception):
                self._stream.discard()
            self._stream = None


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
