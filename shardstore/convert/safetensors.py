"""Safetensors as source and target of a conversion: one file, or several with an index.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes. The library of that name reads and writes whole
files; a conversion needs slices, and files that grow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import msgspec

from shardstore.convert.interfaces import (
    Extras,
    Receipt,
    Target,
    Written,
    exists_error,
    put_in_place,
)
from shardstore.convert.values import record_of
from shardstore.errors import (
    DamagedCheckpointError,
    DTypeMismatchError,
    NotACheckpointError,
    StorageError,
)
from shardstore.inspection.opened import array_bytes
from shardstore.storage.commit.identity import instead
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.ranges import FileRanges
from shardstore.storage.stores.location import Location, store_errors
from shardstore.values.record import MEMBER, StateRecord

__all__ = [
    "INDEX_SUFFIX",
    "SafetensorsSource",
    "SafetensorsTarget",
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


Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


class _Index(msgspec.Struct):
    """The index of several files."""

    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str])
Place = tuple[str, int]
"""The file of a tensor, and the byte of it that the tensor begins at."""


def _damaged(path: str, what: object) -> DamagedCheckpointError:
    """An error that says what is wrong with a file."""
    return DamagedCheckpointError(
        f"{path} is no whole safetensors file ({what}); get it anew", url=path
    )


def _array(key: str, dtype: str, shape: tuple[int, ...]) -> ArrayMeta:
    grid = Grid(shape, tuple(max(1, n) for n in shape))
    return ArrayMeta(key, key, grid, dtype, codecs=())


def _read_header(
    ranges: FileRanges, name: str
) -> tuple[dict[str, tuple[ArrayMeta, Place]], dict[str, str]]:
    """Return the tensors of a file, and its metadata.

    Raises:
        DamagedCheckpointError: the file is truncated, or no safetensors file.
        DTypeMismatchError: a data type that cannot be stored.
    """
    path, size = ranges.path(name), ranges.size(name)
    length = int.from_bytes(ranges.read(name, 0, 8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise _damaged(path, f"a header of {length} bytes in a file of {size}")
    found = {}
    try:
        header = _HEADER.decode(ranges.read(name, 8, 8 + length))
        metadata = _METADATA.decode(header.pop(METADATA, b"{}"))
        entries = {key: _ENTRY.decode(entry) for key, entry in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error
    for key, entry in entries.items():
        if entry.dtype not in _NAMES:
            raise DTypeMismatchError(
                f"key {key!r} of {path} has data type {entry.dtype!r}, which cannot be stored as a "
                f"Zarr array; known: {', '.join(_NAMES)}",
                key=key,
                url=path,
            )
        array = _array(key, _NAMES[entry.dtype], entry.shape)
        start, stop = (8 + length + offset for offset in entry.data_offsets)
        if stop - start != array_bytes(array) or stop > size:
            raise _damaged(path, f"{key!r} of shape {entry.shape} in bytes {start} to {stop}")
        found[key] = array, (name, start)
    return found, metadata


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
        self.arrays: dict[str, ArrayMeta] = {}
        self._places: dict[str, Place] = {}
        self._metadata: dict[str, str] = {}
        for name in names:
            found, metadata = _read_header(ranges, name)
            self._metadata.update(metadata)
            for key, (array, place) in found.items():
                if weight_map is None or weight_map.get(key) == name:
                    self.arrays[key], self._places[key] = array, place

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
            weight_map = msgspec.json.decode(document, type=_Index).weight_map
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(path, error) from error
        names = list(dict.fromkeys(weight_map.values()))
        beside = set(folder.listing())
        for file in names:
            if "/" in file or file not in beside:
                raise _damaged(path, f"it names {file!r}, which is not beside it")
        found = cls(ranges, names, weight_map)
        if missing := sorted(set(weight_map) - set(found.arrays)):
            raise _damaged(path, f"{missing[:4]} are in no file")
        return found

    def boxes(self, key: str) -> list[Box]:
        """Return one box: the tensor is whole."""
        shape = self.arrays[key].shape
        return [Box((0,) * len(shape), shape)]

    def read(self, reads: Sequence[RegionRead]) -> None:
        """Read regions.

        Raises:
            DamagedCheckpointError: a file is gone, or truncated.
        """

        def work(batch: Sequence[RegionRead]) -> None:
            for read in batch:
                key = read.array.key
                name, start = self._places[key]
                try:
                    shape = self.arrays[key].shape
                    self._ranges.read_box(name, start, shape, read.box, read.out)
                except (FileNotFoundError, ValueError) as error:
                    path = self._ranges.path(name)
                    raise DamagedCheckpointError(
                        f"key {key!r}: {path} changed while it was read ({error})",
                        key=key,
                        url=path,
                    ) from error

        run_batched(
            reads,
            work,
            threads=default_threads(),
            weight=lambda read: read.out.nbytes,
            batch_weight=_BATCH_BYTES,
        )

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


class SafetensorsTarget(Target):
    """One file ``NAME.safetensors``, or a folder with several files and an index.

    On a disk they have their full size from the beginning. In an object store each file is one
    upload from its beginning to its end, and one that was interrupted starts again. There several
    files are written to the target itself, the index last; a single file is uploaded under another
    name, and copied by the store once it is verified.

    Args:
        work: folder or prefix beside the target.
        goal: path or URL of a file, or of a folder.
        file_bytes: size of each of several files, about.
        budget_bytes: memory for an upload, about.
    """

    plain: ClassVar[bool] = True

    def __init__(
        self, work: Location, goal: Location, *, file_bytes: int, budget_bytes: int
    ) -> None:
        super().__init__(work, goal)
        self._single = goal.name if goal.name.endswith(".safetensors") else None
        self._at = work if goal.is_local or self._single else goal
        self._file_bytes, self._budget = file_bytes, budget_bytes
        self._total = 0
        self._heads: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, Place] = {}
        self._done: set[str] = set()
        self._name = ""
        self._stream: Any = None

    def start(self) -> Any:
        """Remove the files of an earlier run."""
        if self._at.is_local:
            self._at.delete()
            with store_errors("creating", self._at.url):
                os.makedirs(self._at.url)
            return
        names = self._at.listing()
        ours = [name for name in names if name == self._single or _PART.fullmatch(name)]
        self._at.remote.delete(ours)

    def begin(self, arrays: Sequence[ArrayMeta], extras: Extras) -> None:
        """Lay the tensors out over the files, in the order given, and find out which are complete.

        Raises:
            DTypeMismatchError: a data type that the format lacks.
        """
        groups = [list(arrays)] if self._single else _grouped(arrays, self._file_bytes)
        metadata = {"format": "pt", STATE_METADATA: json.dumps(record_of(extras).to_json())}
        for i, group in enumerate(groups):
            name = self._single or f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
            head = _header(group, metadata if i == 0 else {"format": "pt"})
            self._heads[name] = head
            position = len(head)
            for meta in group:
                self._places[meta.key] = name, position
                position += array_bytes(meta)
            self._sizes[name] = position
        self._total = sum(map(array_bytes, arrays))
        if self._at.is_local:
            for name, head in self._heads.items():
                with self._opened(name) as file:
                    file.write(head)
                    file.truncate(self._sizes[name])
        else:
            sizes = {name: size for name, size, _ in self._at.remote.details()}
            self._done = {name for name in self._sizes if sizes.get(name) == self._sizes[name]}

    def _opened(self, name: str) -> Any:
        path = f"{self._at.url}/{name}"
        with store_errors("writing", path):
            return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")

    def restore(self, array: ArrayMeta, index: tuple[int, ...], receipt: Receipt) -> bool:
        """Return whether the chunk is there, which in an object store all of its file has to be."""
        return self._at.is_local or self._places[array.key][0] in self._done

    def write(self, chunks: Sequence[Written]) -> list[Receipt]:
        """Write ranges to their places; chunks come in the order of the files."""
        for chunk in chunks:
            name, position = self._position(chunk)
            data = as_bytes(chunk.data).data
            if self._at.is_local:
                path = f"{self._at.url}/{name}"
                with store_errors("writing", path), self._opened(name) as file:
                    file.seek(position)
                    file.write(data)
            else:
                self._upload(name, position, data)
        return [None] * len(chunks)

    def _position(self, chunk: Written) -> tuple[str, int]:
        """Return the file of a chunk, and the byte of it that the chunk begins at."""
        name, start = self._places[chunk.array.key]
        corner = Grid(chunk.array.shape, (1,) * chunk.data.ndim)
        position = corner.linear(chunk.array.grid.box(chunk.index).offset)
        return name, start + position * chunk.data.itemsize

    def _upload(self, name: str, position: int, data: memoryview) -> None:
        """Continue an upload, or begin the next one."""
        errors = self._at.remote.errors("writing", name)
        size = self._sizes[name]
        if self._stream is None or self._name != name:
            part = max(MIN_PART_BYTES, min(MAX_PART_BYTES, self._budget // 4), size // MAX_PARTS)
            self._name, self._stream = name, self._at.remote.stream(name, part)
            data = memoryview(b"".join((self._heads[name], data)))
            position -= len(self._heads[name])
        if self._stream.tell() != position:
            url = f"{self._at.url}/{name}"
            raise StorageError(
                f"byte {position} of {url} follows byte {self._stream.tell()}; "
                "convert again with resume=False",
                url=url,
            )
        with errors:
            # Piece by piece: the stream sends what it has gathered in between.
            for start in range(0, len(data), MIN_PART_BYTES):
                self._stream.write(data[start : start + MIN_PART_BYTES])
            if self._stream.tell() == size:
                self._stream.close()
                self._stream = None
                self._done.add(name)

    def read_back(self) -> SafetensorsSource:
        """Write files that hold no elements, and read all back by their headers."""
        if not self._at.is_local:
            for name in self._sizes.keys() - self._done:
                self._at.write(name, self._heads[name])
        return SafetensorsSource(FileRanges(self._at), list(self._sizes))

    def publish(self) -> None:
        """Put the files in their place, or write the index that makes them a checkpoint.

        Raises:
            CheckpointExistsError: there is one.
        """
        weight_map = {key: name for key, (name, _) in self._places.items()}
        about = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        index = json.dumps(about, indent=2).encode()
        if self._at.is_local and self._single is None:
            self._at.write(INDEX_NAME, index)
            put_in_place(self._at, self._goal)
        elif self._single is None:
            if not self._at.remote.create(INDEX_NAME, index):
                raise exists_error(self._goal)
        else:
            if self._at.is_local:
                put_in_place(self._at.child(self._single), self._goal)
            elif self._goal.exists():
                raise exists_error(self._goal)
            else:
                self._goal.remote.copy_from(self._at.remote, self._single, "", any_size=True)
            self._at.delete()

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
        size += array_bytes(meta)
        if groups[-1] and size > file_bytes:
            groups.append([])
            size = array_bytes(meta)
        groups[-1].append(meta)
    return groups


def _header(arrays: Sequence[ArrayMeta], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file; the tensors follow in their order.

    Raises:
        DTypeMismatchError: a data type that the format lacks.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    for meta in arrays:
        if meta.dtype not in _CODES:
            raise DTypeMismatchError(
                f"key {meta.key!r} has data type {meta.dtype}, which safetensors lacks; convert it "
                "first",
                key=meta.key,
            )
        start, position = position, position + array_bytes(meta)
        header[meta.key] = {
            "dtype": _CODES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [start, position],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
