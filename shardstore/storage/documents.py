"""Pure: the JSON documents of a checkpoint, built, parsed and validated.

``zarr.json`` of an array and of the root group (Zarr v3 core specification, "Metadata";
consolidated metadata as zarr-python writes it, inline), and ``.zarray`` of the Zarr v2 layout that
Megatron-Core wrote up to 0.15. Values in, values
out: nothing here reads or writes a file.
"""

from __future__ import annotations

import json
import math
import struct
from binascii import a2b_base64
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shardstore.errors import FormatVersionError, NotACheckpointError
from shardstore.storage import dtypes, names
from shardstore.storage.grid import Grid

__all__ = [
    "FORMAT_VERSION",
    "ArrayMeta",
    "RootDocument",
    "array_document",
    "parse_array",
    "parse_root",
    "parse_v2_array",
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
_CHAINS = ((), (CRC32C,), (ZSTD, CRC32C))


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """One array of a checkpoint: everything that its document says.

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

    def expected_crc(self, index: Sequence[int]) -> int | None:
        """crc32c that the commit has of a decoded chunk; ``None`` where it has none."""
        if self.crcs is None:
            return None
        crc: int = _CRC.unpack_from(self.crcs, 4 * self.grid.linear(index))[0]
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
        if self.zarr_format == 2:
            return self.separator.join(map(str, index)) if index else "0"
        return self.separator.join(["c", *map(str, index)])

    @property
    def document_name(self) -> str:
        """Name of the array's own document below its node."""
        return ".zarray" if self.zarr_format == 2 else "zarr.json"


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


def _loads(text: str | bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (UnicodeDecodeError, ValueError) as error:
        raise NotACheckpointError(
            f"{url} is not valid JSON ({error}): it is damaged, or not part of a checkpoint",
            url=url,
        ) from error
    if not isinstance(document, dict):
        raise NotACheckpointError(
            f"{url} holds no JSON object; is not a distributed checkpoint", url=url
        )
    return document


@dataclass(frozen=True, slots=True)
class RootDocument:
    """The parsed root document.

    Attributes:
        attributes: of the root group.
        arrays: key -> array, parsed on first use of each.
        format_version: of ``attributes.shardstore``, ``None`` where another program wrote the
            group.
        consolidated: whether the group lists its arrays; other programs need not.
    """

    url: str
    attributes: dict[str, Any]
    documents: dict[str, dict[str, Any]]
    format_version: int | None
    consolidated: bool = True

    @property
    def array_documents(self) -> bool:
        """Whether arrays have documents of their own, as far as this one says."""
        about = self.attributes.get("shardstore")
        return not isinstance(about, dict) or about.get(ARRAY_DOCUMENTS) is not False

    def arrays(self, without: Container[str] = ()) -> dict[str, ArrayMeta]:
        """All arrays by key.

        Args:
            without: nodes that are left out.

        Raises:
            FormatVersionError, DTypeMismatchError: an array uses what this version does not read.
        """
        out: dict[str, ArrayMeta] = {}
        sums, parser = self.chunk_sums, _ArrayParser()
        for node, document in self.documents.items():
            if node in without:
                continue
            if isinstance(document, dict) and document.get("node_type") == "array":
                _check_node(node, self.url)
                meta = parser.parse(node, document, f"{self.url}/{node}", sums.get(node))
                out[meta.key] = meta
        return out

    def file_sum(self, name: str) -> int | None:
        """crc32c of a file that is no chunk, as the commit wrote it down; ``None`` if it did not.

        Args:
            name: below the root.
        """
        found = self.file_sums.get(name)
        return found if isinstance(found, int) else None

    @property
    def file_sums(self) -> dict[str, int]:
        """Name below the root -> crc32c of each file that is no chunk, as the commit wrote them."""
        about = self.attributes.get("shardstore")
        sums = about.get(FILE_SUMS) if isinstance(about, dict) else None
        return sums if isinstance(sums, dict) else {}

    @property
    def chunk_sums(self) -> dict[str, str]:
        """Node -> base64 of :attr:`ArrayMeta.crcs`, as the commit wrote them."""
        about = self.attributes.get("shardstore")
        sums = about.get(CHUNK_SUMS) if isinstance(about, dict) else None
        return sums if isinstance(sums, dict) else {}


def _check_node(node: str, url: str) -> None:
    plain = "/" not in node and node not in ("", ".", "..")
    if not plain and any(part in ("", ".", "..") for part in node.split("/")):
        raise NotACheckpointError(
            f"{url} names an array {node!r}, which is outside of the checkpoint: it is damaged",
            url=url,
        )


def parse_root(text: str | bytes, url: str) -> RootDocument:
    """Parse the root group's document.

    Raises:
        NotACheckpointError: not a Zarr v3 group.
        FormatVersionError: written by a later format.
    """
    document = _loads(text, url)
    if document.get("zarr_format") != 3 or document.get("node_type") != "group":
        raise NotACheckpointError(
            f"{url} is no Zarr v3 group; is not a distributed checkpoint of this format", url=url
        )
    attributes = document.get("attributes") or {}
    about = attributes.get("shardstore") if isinstance(attributes, dict) else None
    version: int | None = None
    if isinstance(about, dict):
        version = about.get("format_version")
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise FormatVersionError(
                f"{url} has shardstore format version {version!r}; this version of shardstore "
                "reads up to "
                f"{FORMAT_VERSION}: upgrade shardstore to load it",
                url=url,
            )
    consolidated = document.get("consolidated_metadata")
    inline = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    documents = inline if isinstance(inline, dict) else {}
    return RootDocument(url, attributes, documents, version, isinstance(inline, dict))


def parse_array(node: str, document: Mapping[str, Any], url: str, sums: object = None) -> ArrayMeta:
    """Parse an array's ``zarr.json``.

    Args:
        node: its node name.
        document: the parsed JSON.
        url: for error texts.
        sums: base64 of its :attr:`ArrayMeta.crcs`, if known; those of another grid are of no use
            and left out.

    Raises:
        FormatVersionError: grid, key encoding or shape is of a kind that this version does not
            read.
        DTypeMismatchError: an unknown data type.
    """
    return _ArrayParser().parse(node, document, url, sums)


class _ArrayParser:
    """Parses documents one after the other. What all arrays of a data type have alike, codecs and
    the encoding of chunk keys, is looked into once."""

    def __init__(self) -> None:
        self._codecs: dict[str, tuple[object, object, tuple[tuple[str, ...] | None, str]]] = {}

    def parse(
        self, node: str, document: Mapping[str, Any], url: str, sums: object = None
    ) -> ArrayMeta:
        """As :func:`parse_array`."""
        try:
            shape = _shape(document["shape"])
            grid_document = document["chunk_grid"]
            chunk_shape = _shape(grid_document["configuration"]["chunk_shape"])
            data_type = document["data_type"]
            chain, separator = self._encoding(data_type, document)
            if grid_document["name"] != "regular":
                raise ValueError(f"grid {grid_document['name']!r}")
            if len(chunk_shape) != len(shape) or 0 in chunk_shape:
                raise ValueError(f"chunk shape {chunk_shape} for shape {shape}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatVersionError(
                f"{url} is no array that this version of shardstore reads ({type(error).__name__}: "
                f"{error})",
                url=url,
            ) from error
        dtypes.check(data_type)
        attributes = document.get("attributes")
        about = attributes.get("shardstore") if type(attributes) is dict else None
        key = shards = None
        if type(about) is dict:
            key, shards = about.get("key"), about.get("shard_shape")
        grid = Grid(shape, chunk_shape)
        return ArrayMeta(
            key or names.key_of(node) or node,
            node,
            grid,
            data_type,
            chain,
            separator=separator,
            shard_shape=_shape(shards) if shards is not None else None,
            document=document,
            crcs=_crcs(sums, grid) if type(sums) is str else None,
        )

    def _encoding(
        self, data_type: object, document: Mapping[str, Any]
    ) -> tuple[tuple[str, ...] | None, str]:
        """Names of codecs that can be undone here, and what is between a chunk key's numbers."""
        codecs, encoding = document["codecs"], document["chunk_key_encoding"]
        # Types with settings of their own are objects in Zarr; they are refused further on.
        kind = data_type if type(data_type) is str else ""
        known = self._codecs.get(kind)
        if known is not None and known[0] == codecs and known[1] == encoding:
            return known[2]
        if encoding["name"] != "default":
            raise ValueError(f"chunk keys {encoding['name']!r}")
        separator = (encoding.get("configuration") or {}).get("separator", "/")
        codec_names = [codec["name"] for codec in codecs] or [""]
        chain: tuple[str, ...] | None = tuple(codec_names[1:])
        if codec_names[0] != "bytes" or chain not in _CHAINS or _big(document):
            chain = None
        self._codecs[kind] = codecs, encoding, (chain, separator)
        return chain, separator


def _crcs(sums: str, grid: Grid) -> bytes | None:
    try:
        crcs = a2b_base64(sums, strict_mode=True)
    except ValueError:
        return None
    return crcs if len(crcs) == 4 * grid.size else None


def _big(document: Mapping[str, Any]) -> bool:
    configuration = document["codecs"][0].get("configuration") or {}
    return bool(configuration.get("endian", "little") != "little")


def parse_v2_array(node: str, text: str | bytes, url: str) -> ArrayMeta:
    """Parse an array's ``.zarray``.

    Raises:
        FormatVersionError: not a C-order Zarr v2 array.
        DTypeMismatchError: an unknown data type.
    """
    document = _loads(text, url)
    try:
        if document["zarr_format"] != 2 or document["order"] != "C":
            raise ValueError(f"format {document['zarr_format']!r}, order {document['order']!r}")
        grid = Grid(_shape(document["shape"]), tuple(max(1, c) for c in _shape(document["chunks"])))
        if len(grid.chunk_shape) != len(grid.shape):
            raise ValueError(f"chunks {grid.chunk_shape} for shape {grid.shape}")
        plain = document.get("compressor") is None and not document.get("filters")
    except (KeyError, TypeError, ValueError) as error:
        raise FormatVersionError(
            f"{url} is no Zarr v2 array that this version of shardstore reads "
            f"({type(error).__name__}: {error})",
            url=url,
        ) from error
    return ArrayMeta(
        key=names.key_of(node) or node,
        node=node,
        grid=grid,
        dtype=dtypes.v2_dtype_name(document["dtype"]),
        codecs=() if plain else None,
        zarr_format=2,
        separator=document.get("dimension_separator", "."),
        document=document,
    )


def _shape(value: Any) -> tuple[int, ...]:
    shape = tuple(value)
    for n in shape:
        if type(n) is not int or n < 0:
            raise ValueError(f"shape {value!r}")
    return shape


def is_group(text: str | bytes) -> bool:
    """Whether a ``zarr.json`` is a group's; ``False`` for invalid JSON too."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("node_type") == "group"


def parse_array_text(node: str, text: str | bytes, url: str) -> ArrayMeta:
    """Parse the text of an array's ``zarr.json``; errors as :func:`parse_array`, and for invalid
    JSON."""
    document = _loads(text, url)
    if document.get("node_type") != "array":
        raise NotACheckpointError(f"{url} is no Zarr array", url=url)
    return parse_array(node, document, url)
