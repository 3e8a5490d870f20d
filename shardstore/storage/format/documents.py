"""Pure: what a checkpoint says of an array, and the texts that say it.

``zarr.json`` of an array and of the root group (Zarr v3 core specification, "Metadata";
consolidated metadata as zarr-python writes it, inline), and ``.zarray`` of the Zarr v2 layout that
Megatron-Core wrote up to 0.15. They are read in :mod:`.array_parsing` and :mod:`.root_document`.
Values in, texts out: nothing here writes a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Grid

__all__ = [
    "FORMAT_VERSION",
    "ArrayMeta",
    "array_document",
    "root_document",
]

FORMAT_VERSION = 1
"""Of ``attributes.shardstore`` in the root document; a reader refuses a larger one."""

CHUNK_SUMS = "chunk_crc32c"
"""In ``attributes.shardstore`` of the root: checksums that tie each chunk to the commit."""

FILE_SUMS = "file_crc32c"
"""Beside it: the same for the files that are no chunks and that loads read."""

ARRAY_DOCUMENTS = "array_documents"
"""Beside it: false where arrays have no documents of their own; else it is left out."""

SEPARATOR = "."
"""Of chunk keys: ``c.0.1`` needs no folders below the array's own (a third of the creations of a
small array)."""

_CRC = struct.Struct("<I")

CRC32C = "crc32c"
ZSTD = "zstd"
ZSTD_LEVEL = 1


@dataclass(slots=True, unsafe_hash=True)
class ArrayMeta:
    """One array of a checkpoint: everything that its document says. Nobody changes it; to freeze it
    would take three times as long as to make it.

    Attributes:
        key: the tensor's key.
        node: its node name below the root.
        grid: shape and chunk shape.
        dtype: Zarr name of the data type.
        codecs: names after ``bytes``, in order; ``None`` for a chain that only TensorStore can
            undo.
        zarr_format: 3, or 2 for the layout of Megatron-Core.
        separator: between the numbers of a chunk key.
        shard_shape: edges of the shards it was saved from, if known.
        document: the parsed document where it was read and not built.
        crcs: crc32c of each chunk in C order over the grid, little-endian uint32, where the commit
            has them.
    """

    key: str
    node: str
    grid: Grid
    dtype: str
    codecs: tuple[str, ...] | None = (CRC32C,)
    zarr_format: int = 3
    separator: str = SEPARATOR
    shard_shape: tuple[int, ...] | None = None
    document: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    crcs: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.grid.shape

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return _chunk_bytes(self.grid.chunk_shape, self.dtype)

    def expected_crc(self, number: int) -> int | None:
        """crc32c that the commit has of a decoded chunk, by its position in C order over the grid;
        ``None`` where it has none."""
        if self.crcs is None:
            return None
        crc: int = _CRC.unpack_from(self.crcs, 4 * number)[0]
        return crc

    @property
    def has_crc(self) -> bool:
        """Whether each chunk ends with its own crc32c."""
        return self.codecs is not None and self.codecs[-1:] == (CRC32C,)

    @property
    def is_plain(self) -> bool:
        """Whether a chunk object is the chunk's bytes, with or without a crc32c behind them."""
        return self.codecs in ((), (CRC32C,))

    @property
    def is_packed(self) -> bool:
        """Whether a chunk object is the compressed chunk with a crc32c behind it."""
        return self.codecs == (ZSTD, CRC32C)

    def chunk_key(self, index: Sequence[int]) -> str:
        """Key of a chunk below the array (Zarr v3 core specification, "Chunk key encoding":
        default; or v2)."""
        return chunk_key(self.zarr_format, self.separator, tuple(index))

    @property
    def document_name(self) -> str:
        """Name of the array's own document below its node."""
        return ".zarray" if self.zarr_format == 2 else "zarr.json"


@lru_cache(maxsize=4096)
def chunk_key(zarr_format: int, separator: str, index: tuple[int, ...]) -> str:
    """See :meth:`ArrayMeta.chunk_key`."""
    if zarr_format == 2:
        return separator.join(map(str, index)) if index else "0"
    return separator.join(["c", *map(str, index)])


@lru_cache(maxsize=4096)
def _chunk_bytes(chunk_shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(chunk_shape) * dtypes.itemsize(dtype)


def _dumps(document: object) -> str:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def _fill_value(dtype: str) -> object:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if "float" in dtype else 0


def _codec_documents(dtype: str, codecs: tuple[str, ...] | None) -> list[dict[str, Any]]:
    bytes_codec: dict[str, Any] = {"name": "bytes"}
    if dtypes.itemsize(dtype) > 1:
        bytes_codec["configuration"] = {"endian": "little"}
    documents = [bytes_codec]
    for name in codecs or ():
        if name == ZSTD:
            documents.append(
                {"name": ZSTD, "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
            )
        else:
            documents.append({"name": name})
    return documents


def array_document(meta: ArrayMeta) -> str:
    """Text of an array's own document, the same on every rank for the same array."""
    if meta.zarr_format == 2:
        return _dumps(
            {
                "zarr_format": 2,
                "shape": list(meta.shape),
                "chunks": list(meta.grid.chunk_shape),
                "dtype": dtypes.v2_dtype(meta.dtype),
                "compressor": None,
                "fill_value": None,
                "order": "C",
                "filters": None,
                "dimension_separator": meta.separator,
            }
        )
    key = _dumps(meta.key)
    before, between = _of_kind(meta.dtype, meta.codecs, meta.separator)
    shards = "" if meta.shard_shape is None else f',"shard_shape":{_numbers(meta.shard_shape)}'
    # Of this array alone: xarray takes equal names for one axis, of one length.
    axes = ",".join(f'{key[:-1]}:{axis}"' for axis in range(len(meta.shape)))
    return (
        f'{{"zarr_format":3,"node_type":"array","shape":{_numbers(meta.shape)},{before}'
        f'"chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":'
        f"{_numbers(meta.grid.chunk_shape)}}}}},{between}"
        f'"dimension_names":[{axes}],"attributes":{{"shardstore":{{"key":{key}{shards}}}}}}}'
    )


def _numbers(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


@lru_cache(maxsize=256)
def _of_kind(dtype: str, codecs: tuple[str, ...] | None, separator: str) -> tuple[str, str]:
    """Members of a document that arrays of one kind share: before their chunk grid, and behind it.

    Kept, because putting documents together was a large part of planning a save.
    """
    keys = {"name": "default", "configuration": {"separator": separator}}
    behind = {
        "chunk_key_encoding": keys,
        "fill_value": _fill_value(dtype),
        "codecs": _codec_documents(dtype, codecs),
    }
    return _dumps({"data_type": dtype})[1:-1] + ",", _dumps(behind)[1:-1] + ","


def root_document(arrays: Iterable[tuple[str, str]], attributes: Mapping[str, Any]) -> str:
    """Text of the root group's document, the commit itself.

    Args:
        arrays: ``(node, text of its document)``.
        attributes: attributes of the root group.
    """
    metadata = ",".join(f"{_dumps(node)}:{text}" for node, text in sorted(arrays))
    return (
        f'{{"zarr_format":3,"node_type":"group","attributes":{_dumps(attributes)},'
        '"consolidated_metadata":{"kind":"inline","must_understand":false,'
        f'"metadata":{{{metadata}}}}}}}'
    )
