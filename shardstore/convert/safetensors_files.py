"""The safetensors format: headers, and tensors mapped from or written to their place in a file.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> ``dtype``,
``shape``, ``data_offsets``) and the tensors' bytes. The library of that name reads and writes files
whole; converting needs slices and files that grow.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError, DTypeMismatchError, NotACheckpointError
from shardstore.storage import dtypes

__all__ = ["INDEX_SUFFIX", "Entry", "header_bytes", "open_files", "read_header"]

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
        path: the file.
        dtype: Zarr name of the data type.
        shape: its shape.
        start: byte of the file that it begins at.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)

    def mapped(self) -> NDArray[Any]:
        """Its elements, mapped from the file."""
        dtype = dtypes.numpy_dtype(self.dtype)
        if not self.nbytes:
            return np.empty(self.shape, dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, (self.nbytes,))
        found: NDArray[Any] = np.asarray(raw).view(dtype).reshape(self.shape)
        return found


def _damaged(path: Path, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is no whole safetensors file ({what}); get it anew", url=str(path)
    )


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file, and its metadata.

    Raises:
        DamagedCheckpointError: the file is truncated, or no safetensors file.
        DTypeMismatchError: a data type that can not be stored.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = {str(k): str(v) for k, v in header.pop(METADATA, {}).items()}
        found = {key: _entry(path, key, about, 8 + length) for key, about in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, DTypeMismatchError):
            raise
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    for key, entry in found.items():
        if entry.start + entry.nbytes > size:
            raise _damaged(path, f"{key!r} ends beyond the file's end")
    return found, metadata


def _entry(path: Path, key: str, about: Mapping[str, Any], base: int) -> Entry:
    code = about["dtype"]
    if code not in _NAMES:
        raise DTypeMismatchError(
            f"key {key!r} of {path} has data type {code!r}, which can not be stored as a Zarr "
            f"array; known: {', '.join(_NAMES)}",
            key=key,
            url=str(path),
        )
    shape = tuple(int(n) for n in about["shape"])
    start, stop = (int(n) for n in about["data_offsets"])
    entry = Entry(path, _NAMES[code], shape, base + start)
    if start < 0 or any(n < 0 for n in shape) or stop - start != entry.nbytes:
        raise ValueError(f"{key!r} of shape {shape} in {stop - start} bytes")
    return entry


def open_files(place: Path) -> tuple[dict[str, Entry], dict[str, str], list[Path]]:
    """All tensors of a file, of an index, or of a folder with either.

    Returns:
        Key -> tensor, the metadata, and the files.

    Raises:
        NotACheckpointError: there is no such file.
        DamagedCheckpointError: a file is damaged, or not what the index says.
    """
    if place.is_dir():
        indices = sorted(place.glob(f"*{INDEX_SUFFIX}"))
        files = sorted(place.glob("*.safetensors"))
        if len(indices) == 1:
            place = indices[0]
        elif len(files) == 1:
            place = files[0]
        else:
            raise NotACheckpointError(
                f"{place} holds {len(indices)} safetensors indices and {len(files)} files; name "
                "the one that is meant",
                url=str(place),
            )
    if not place.is_file():
        raise NotACheckpointError(f"{place} does not exist", url=str(place))
    if not place.name.endswith(INDEX_SUFFIX):
        found, metadata = read_header(place)
        return found, metadata, [place]
    return _of_index(place)


def _of_index(index: Path) -> tuple[dict[str, Entry], dict[str, str], list[Path]]:
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(index, f"{type(error).__name__}: {error}") from error
    found: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    paths = []
    for name in dict.fromkeys(weight_map.values()):
        path = index.parent / name
        if path.name != name or not path.is_file():
            raise _damaged(index, f"it names {name!r}, which is not beside it")
        entries, about = read_header(path)
        metadata.update(about)
        paths.append(path)
        found.update({key: entry for key, entry in entries.items() if weight_map.get(key) == name})
    if missing := sorted(set(weight_map) - set(found)):
        raise _damaged(index, f"{missing[:4]} are in no file")
    return found, metadata, paths


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


def fingerprint(paths: Sequence[Path]) -> list[list[Any]]:
    """What tells files from others of the same names: sizes and times."""
    found = []
    for path in sorted(paths):
        status = os.stat(path)
        found.append([path.name, status.st_size, status.st_mtime_ns])
    return found
