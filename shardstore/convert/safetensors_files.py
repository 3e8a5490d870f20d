"""The safetensors format: headers, indices, and where in a file a tensor is.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes. The library of that name reads and writes files
whole; converting needs slices and files that grow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardstore.errors import DamagedCheckpointError, DTypeMismatchError, NotACheckpointError
from shardstore.storage.commit.identity import instead
from shardstore.storage.format import dtypes
from shardstore.storage.movers.ranges import FileRanges
from shardstore.storage.stores.location import Location

__all__ = ["INDEX_SUFFIX", "Entry", "header_bytes", "is_file_name", "open_files", "read_header"]

INDEX_SUFFIX = ".safetensors.index.json"
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


def damaged(path: str, what: str) -> DamagedCheckpointError:
    """An error that says what is wrong with a file."""
    return DamagedCheckpointError(
        f"{path} is no whole safetensors file ({what}); get it anew", url=path
    )


def read_header(ranges: FileRanges, name: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file, and its metadata.

    Raises:
        DamagedCheckpointError: the file is truncated, or no safetensors file.
        DTypeMismatchError: a data type that can not be stored.
    """
    path, size = ranges.path(name), ranges.size(name)
    length = int.from_bytes(ranges.read(name, 0, 8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise damaged(path, f"a header of {length} bytes in a file of {size}")
    text = ranges.read(name, 8, 8 + length)
    try:
        header = json.loads(text)
        metadata = {str(k): str(v) for k, v in header.pop(METADATA, {}).items()}
        found = {key: _entry(path, name, key, about, 8 + length) for key, about in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, DTypeMismatchError):
            raise
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    for key, entry in found.items():
        if entry.start + entry.nbytes > size:
            raise damaged(path, f"{key!r} ends beyond the file's end")
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


def open_files(
    place: Location,
) -> tuple[FileRanges, dict[str, Entry], dict[str, str], list[str]]:
    """All tensors of a file, of an index, or of a folder with either.

    Returns:
        What reads the files, key -> tensor, the metadata, and the names of the files.

    Raises:
        NotACheckpointError: there is no such file.
        DamagedCheckpointError: a file is damaged, or not what the index says.
    """
    folder, name = _named(place)
    ranges = FileRanges(folder)
    try:
        if name.endswith(INDEX_SUFFIX):
            return ranges, *_of_index(ranges, name)
        found, metadata = read_header(ranges, name)
    except FileNotFoundError:
        path = ranges.path(name)
        raise NotACheckpointError(f"{path} does not exist", url=path) from None
    return ranges, found, metadata, [name]


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


def _of_index(ranges: FileRanges, index: str) -> tuple[dict[str, Entry], dict[str, str], list[str]]:
    path = ranges.path(index)
    try:
        weight_map: dict[str, str] = dict(json.loads(ranges.location.read(index))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    found: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    files = []
    beside = set(ranges.location.listing())
    for name in dict.fromkeys(weight_map.values()):
        if "/" in str(name) or name not in beside:
            raise damaged(path, f"it names {name!r}, which is not beside it")
        entries, about = read_header(ranges, name)
        metadata.update(about)
        files.append(name)
        found.update({key: entry for key, entry in entries.items() if weight_map.get(key) == name})
    if missing := sorted(set(weight_map) - set(found)):
        raise damaged(path, f"{missing[:4]} are in no file")
    return found, metadata, files


def header_bytes(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file.

    Args:
        tensors: ``(key, Zarr name of the data type, shape)``, in the order of the file.
        metadata: goes into the header.

    Returns:
        The file's first bytes, and for each tensor the byte that it begins at.

    Raises:
        DTypeMismatchError: a data type that the format lacks.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    starts = {}
    for key, dtype, shape in tensors:
        if dtype not in _CODES:
            raise DTypeMismatchError(
                f"key {key!r} has data type {dtype}, which safetensors lacks; convert it first",
                key=key,
            )
        size = math.prod(shape) * dtypes.itemsize(dtype)
        header[key] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        starts[key] = position
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {key: len(begin) + start for key, start in starts.items()}
