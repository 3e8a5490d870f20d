"""Safetensors as source and target of a conversion: one file, or several with an index.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes. The library of that name reads and writes whole
files; a conversion needs slices, and files that grow.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from shardstore.convert.interfaces import (
    Extras,
    Read,
    Receipt,
    Target,
    Written,
    exists_error,
    one_chunk,
    put_in_place,
    record_of,
)
from shardstore.errors import (
    DamagedCheckpointError,
    DTypeMismatchError,
    NotACheckpointError,
    StorageError,
)
from shardstore.storage.commit.identity import instead
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.ranges import FileRanges
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.record import MEMBER, StateRecord

__all__ = [
    "INDEX_SUFFIX",
    "SafetensorsFiles",
    "SafetensorsObjects",
    "SafetensorsSource",
    "is_file_name",
]

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_SUFFIX}"
STATE_METADATA = "shardstore.state_dict"
"""Name in the metadata of the files under which values that are no tensors are kept."""
MAX_PARTS = 9000
"""Of an upload; S3 takes 10,000 (Amazon S3 user guide, "Multipart upload limits")."""
MIN_PART_BYTES = 8 * 1024 * 1024
MAX_PART_BYTES = 64 * 1024 * 1024
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_BATCH_BYTES = 4 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"

_NAMES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file.

    Attributes:
        file: name of the file.
        dtype: Zarr name of the data type.
        shape: its shape.
        start: byte of the file that it begins at.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


def _damaged(path: str, what: str) -> DamagedCheckpointError:
    """An error that says what is wrong with a file."""
    return DamagedCheckpointError(
        f"{path} is no whole safetensors file ({what}); get it anew", url=path
    )


def _read_header(ranges: FileRanges, name: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file, and its metadata.

    Raises:
        DamagedCheckpointError: the file is truncated, or no safetensors file.
        DTypeMismatchError: a data type that can not be stored.
    """
    path, size = ranges.path(name), ranges.size(name)
    length = int.from_bytes(ranges.read(name, 0, 8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"a header of {length} bytes in a file of {size}")
    text = ranges.read(name, 8, 8 + length)
    try:
        header = json.loads(text)
        metadata = {str(k): str(v) for k, v in header.pop(METADATA, {}).items()}
        found = {key: _entry(path, name, key, about, 8 + length) for key, about in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, DTypeMismatchError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for key, entry in found.items():
        if entry.start + entry.nbytes > size:
            raise _damaged(path, f"{key!r} ends beyond the file's end")
    return found, metadata


def _entry(path: str, name: str, key: str, about: Mapping[str, Any], base: int) -> Entry:
    code = about["dtype"]
    if code not in _NAMES:
        raise DTypeMismatchError(
            f"key {key!r} of {path} has data type {code!r}, which can not be stored as a Zarr "
            f"array; known: {', '.join(_NAMES)}",
            key=key,
            url=path,
        )
    shape = tuple(int(n) for n in about["shape"])
    start, stop = (int(n) for n in about["data_offsets"])
    entry = Entry(name, _NAMES[code], shape, base + start)
    if start < 0 or any(n < 0 for n in shape) or stop - start != entry.nbytes:
        raise ValueError(f"{key!r} of shape {shape} in {stop - start} bytes")
    return entry


class SafetensorsSource:
    """Safetensors files of one folder.

    Args:
        ranges: reads the files.
        names: of the files.
        weight_map: key -> file, as an index has it; ``None``: all tensors of the files.

    Raises:
        DamagedCheckpointError: a file is damaged, or not what the index says.
        FileNotFoundError: a file is not there.
    """

    def __init__(
        self, ranges: FileRanges, names: Sequence[str], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self._ranges, self._names = ranges, names
        self._entries: dict[str, Entry] = {}
        self._metadata: dict[str, str] = {}
        for name in names:
            found, metadata = _read_header(ranges, name)
            self._metadata.update(metadata)
            for key, entry in found.items():
                if weight_map is None or weight_map.get(key) == name:
                    self._entries[key] = entry
        self.arrays = {
            key: one_chunk(key, entry.dtype, entry.shape) for key, entry in self._entries.items()
        }

    @classmethod
    def open(cls, place: Location) -> SafetensorsSource:
        """Open a file, an index and its files, or a folder with either.

        Raises:
            NotACheckpointError: there is no such file.
            DamagedCheckpointError: a file is damaged, or not what the index says.
        """
        folder, name = _named(place)
        ranges = FileRanges(folder)
        path = ranges.path(name)
        try:
            if not name.endswith(INDEX_SUFFIX):
                return cls(ranges, [name])
            document = folder.read(name)
        except FileNotFoundError:
            raise NotACheckpointError(f"{path} does not exist", url=path) from None
        try:
            weight_map: dict[str, str] = dict(json.loads(document)["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error
        names = list(dict.fromkeys(weight_map.values()))
        beside = set(folder.listing())
        for file in names:
            if "/" in str(file) or file not in beside:
                raise _damaged(path, f"it names {file!r}, which is not beside it")
        found = cls(ranges, names, weight_map)
        if missing := sorted(set(weight_map) - set(found.arrays)):
            raise _damaged(path, f"{missing[:4]} are in no file")
        return found

    def boxes(self, key: str) -> list[Box]:
        """Return one box: the tensor is whole."""
        shape = self._entries[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions.

        Raises:
            DamagedCheckpointError: a file is gone, or truncated.
        """

        def work(batch: Sequence[RegionRead]) -> None:
            for read in batch:
                self._read_one(read)

        run_batched(
            reads,
            work,
            threads=default_threads(),
            weight=lambda read: read.out.nbytes,
            batch_weight=_BATCH_BYTES,
        )

    def _read_one(self, read: RegionRead) -> None:
        key = read.array.key
        entry = self._entries[key]
        try:
            self._ranges.read_box(entry.file, entry.start, entry.shape, read.box, read.out)
        except (FileNotFoundError, ValueError) as error:
            path = self._ranges.path(entry.file)
            raise DamagedCheckpointError(
                f"key {key!r}: {path} changed while it was read ({error})", key=key, url=path
            ) from error

    def extras(self) -> Extras:
        """Return the metadata, and values that a conversion put there."""
        metadata = dict(self._metadata)
        kept = metadata.pop(STATE_METADATA, None)
        record = StateRecord()
        if kept is not None:
            path = self._ranges.path(self._names[0])
            try:
                about = {"shardstore": {MEMBER: json.loads(kept)}}
            except ValueError as error:
                raise _damaged(path, f"its state dict is no JSON: {error}") from error
            record = StateRecord.from_root(about, path) or record
        metadata.pop("format", None)
        return Extras(None, record, {}, {"safetensors": metadata} if metadata else {})

    def identity(self) -> list[Any]:
        """Return sizes and times of the files."""
        return [self._ranges.stamp(name) for name in sorted(self._names)]


def _named(place: Location) -> tuple[Location, str]:
    """The folder and the name of the file that is meant."""
    if is_file_name(place.name):
        folder = Location(place.url.rpartition("/")[0], place.options)
        if not place.is_local or not place.is_dir():
            return folder, place.name
    names = place.listing()
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if len(indices) == 1:
        return place, indices[0]
    if len(files) == 1:
        return place, files[0]
    if place.is_local and not place.is_dir():
        found = instead(place) or "its name ends in neither .safetensors nor .json"
        raise NotACheckpointError(
            f"{place.url} is a file, but none of safetensors: {found}", url=place.url
        )
    raise NotACheckpointError(
        f"{place.url} holds {len(indices)} safetensors indices and {len(files)} files; name the "
        "one that is meant",
        url=place.url,
    )


def is_file_name(name: str) -> bool:
    """Whether a name is that of a safetensors file, or of an index of some."""
    return name.endswith((".safetensors", INDEX_SUFFIX))


@dataclass(frozen=True)
class _File:
    """A file to be written.

    Attributes:
        head: the bytes that it begins with.
        size: in bytes, head included.
    """

    head: bytes
    size: int


class _SafetensorsTarget(Target):
    """One file ``NAME.safetensors``, or a folder with several files and an index.

    Args:
        work: folder or prefix beside the target.
        goal: path or URL of a file, or of a folder.
        file_bytes: size of each of several files, about.
    """

    plain: ClassVar[bool] = True

    def __init__(self, work: Location, goal: Location, *, file_bytes: int) -> None:
        super().__init__(work, goal)
        self._at = work
        self._file_bytes = file_bytes
        self._single = goal.name if goal.name.endswith(".safetensors") else None
        self._files: dict[str, _File] = {}
        self._entries: dict[str, Entry] = {}

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Lay the tensors out over the files, in the order given.

        Raises:
            DTypeMismatchError: a data type that the format lacks.
        """
        groups = [list(arrays)] if self._single else _grouped(arrays, self._file_bytes)
        metadata = {"format": "pt", STATE_METADATA: json.dumps(record_of(extras).to_json())}
        for i, group in enumerate(groups):
            name = self._single or f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            head, entries = _header(name, group, metadata if i == 0 else {"format": "pt"})
            self._entries.update(entries)
            size = len(head) + sum(entry.nbytes for entry in entries.values())
            self._files[name] = _File(head, size)

    def _position(self, chunk: Written) -> tuple[str, int]:
        """Return the file of a chunk, and the byte of it that the chunk begins at."""
        entry = self._entries[chunk.array.key]
        position = 0
        offsets = chunk.array.grid.box(chunk.index).offset
        for offset, length in zip(offsets, entry.shape, strict=True):
            position = position * length + offset
        return entry.file, entry.start + position * chunk.data.itemsize

    def _index(self) -> bytes:
        """Return the document that names the file of each tensor."""
        total = sum(entry.nbytes for entry in self._entries.values())
        weight_map = {key: entry.file for key, entry in self._entries.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(index, indent=2).encode()

    def _opened_anew(self) -> SafetensorsSource:
        return SafetensorsSource(FileRanges(self._at), list(self._files))

    def reader(self) -> Read:
        """Read by the headers of the files."""
        return self._opened_anew().read

    def written(self) -> Extras:
        """Return the values in the header of the first file, which is read again."""
        return self._opened_anew().extras()


class SafetensorsFiles(_SafetensorsTarget):
    """Local files, which have their full size from the beginning."""

    def start(self) -> Any:
        """Make an empty work folder."""
        self._work.delete()
        with store_errors("creating", self._work.url):
            os.makedirs(self._work.url)

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Write headers and the index, and extend the files to their full size."""
        super().begin(arrays, extras)
        for name, file in self._files.items():
            with self._opened(name) as handle:
                os.pwrite(handle.fileno(), file.head, 0)
                os.ftruncate(handle.fileno(), file.size)
        if not self._single:
            self._work.write(INDEX_NAME, self._index())

    def _opened(self, name: str) -> Any:
        path = f"{self._work.url}/{name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with store_errors("writing", path):
            return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write ranges to their places; nothing has to be remembered."""
        for chunk in chunks:
            name, position = self._position(chunk)
            with store_errors("writing", f"{self._work.url}/{name}"), self._opened(name) as handle:
                data = as_bytes(chunk.data).data
                while data:
                    count = os.pwrite(handle.fileno(), data, position)
                    data, position = data[count:], position + count
        return [None] * len(chunks)

    def publish(self) -> None:
        """Rename the folder, or the file in it."""
        if self._single is None:
            put_in_place(self._work, self._goal)
            return
        put_in_place(self._work.child(self._single), self._goal)
        self._work.delete()


class SafetensorsObjects(_SafetensorsTarget):
    """Files streamed to an object store, each one upload from its beginning to its end.

    An upload that was interrupted starts again. Several files are written to the target itself,
    and the index is written last. A single file is uploaded under another name, and copied by the
    store once it is verified.

    Args:
        work: prefix beside the target.
        goal: URL of a file, or of a folder.
        file_bytes: size of each of several files, about.
        budget_bytes: memory for an upload, about.
    """

    def __init__(
        self, work: Location, goal: Location, *, file_bytes: int, budget_bytes: int
    ) -> None:
        super().__init__(work, goal, file_bytes=file_bytes)
        self._budget = budget_bytes
        self._at = work if self._single else goal
        self._done: set[str] = set()
        self._name = ""
        self._stream: Any = None

    def start(self) -> Any:
        """Remove the files of an earlier run."""
        names = self._at.listing()
        ours = [name for name in names if name == self._single or _PART.fullmatch(name)]
        self._at.remote.delete(ours)

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Find out which files are complete."""
        super().begin(arrays, extras)
        sizes = {name: size for name, size, _ in self._at.remote.details()}
        self._done = {name for name, file in self._files.items() if sizes.get(name) == file.size}

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Return whether all of the chunk's file is there."""
        return self._entries[array.key].file in self._done

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Continue an upload; chunks come in the order of the file."""
        for chunk in chunks:
            name, position = self._position(chunk)
            self._open(name)
            if self._stream.tell() != position:
                url = f"{self._at.url}/{name}"
                raise StorageError(
                    f"byte {position} of {url} follows byte {self._stream.tell()}; "
                    "convert again with resume=False",
                    url=url,
                )
            with self._at.remote.errors("writing", name):
                # Piece by piece: the stream sends what it has gathered in between.
                data = as_bytes(chunk.data).data
                for start in range(0, len(data), MIN_PART_BYTES):
                    self._stream.write(data[start : start + MIN_PART_BYTES])
                if self._stream.tell() == self._files[name].size:
                    self._stream.close()
                    self._stream = None
                    self._done.add(name)
        return [None] * len(chunks)

    def _open(self, name: str) -> None:
        if self._stream is not None and self._name == name:
            return
        file = self._files[name]
        part = max(MIN_PART_BYTES, min(MAX_PART_BYTES, self._budget // 4), file.size // MAX_PARTS)
        self._name, self._stream = name, self._at.remote.stream(name, part)
        with self._at.remote.errors("writing", name):
            self._stream.write(file.head)

    def reader(self) -> Read:
        """Upload files that hold no elements, and read all back by ranges."""
        for name in self._files.keys() - self._done:
            self._at.write(name, self._files[name].head)
        return super().reader()

    def publish(self) -> None:
        """Write the index, or copy the file to its name.

        Raises:
            CheckpointExistsError: there is one.
        """
        if self._single is None:
            made = self._at.remote.create(INDEX_NAME, self._index())
        else:
            made = not self._goal.exists()
            if made:
                self._goal.remote.copy_from(self._at.remote, self._single, "", any_size=True)
                self._work.delete()
        if not made:
            raise exists_error(self._goal)

    def stop(self) -> None:
        """Abort an upload, so that the store does not keep its parts."""
        if self._stream is not None:
            with suppress(Exception):
                self._stream.discard()
            self._stream = None


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


def _header(
    name: str, arrays: Sequence[ArrayMeta], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return the first bytes of a file, and where its tensors lie.

    Raises:
        DTypeMismatchError: a data type that the format lacks.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    starts = {}
    for meta in arrays:
        if meta.dtype not in _CODES:
            raise DTypeMismatchError(
                f"key {meta.key!r} has data type {meta.dtype}, which safetensors lacks; convert it "
                "first",
                key=meta.key,
            )
        starts[meta.key] = position
        position += Entry(name, meta.dtype, meta.shape, 0).nbytes
        header[meta.key] = {
            "dtype": _CODES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [starts[meta.key], position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {
        meta.key: Entry(name, meta.dtype, meta.shape, len(head) + starts[meta.key])
        for meta in arrays
    }
