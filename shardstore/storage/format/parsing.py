"""Pure: documents of arrays, parsed and validated: ``zarr.json``, and ``.zarray`` of the Zarr v2
layout that Megatron-Core wrote up to 0.15.

Texts and parsed JSON in, values out: nothing here reads a file.
"""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardstore.errors import FormatVersionError, NotACheckpointError
from shardstore.storage.format import dtypes, names
from shardstore.storage.format.documents import CRC32C, ZSTD, ArrayMeta
from shardstore.storage.format.grid import Grid

__all__ = [
    "ArrayParser",
    "crcs_of",
    "is_group",
    "json_object",
    "parse_array",
    "parse_array_text",
    "parse_v2_array",
]

_CHAINS = ((), (CRC32C,), (ZSTD, CRC32C))


def json_object(text: str | bytes, url: str) -> dict[str, Any]:
    """The JSON object that a document is.

    Raises:
        NotACheckpointError: it is none.
    """
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
    return ArrayParser().parse(node, document, url, sums)


class _Layout(NamedTuple):
    """What arrays of one shape, cut and data type have alike, as it was found in the first one."""

    codecs: object
    encoding: object
    grid: Grid
    chunks: int
    chain: tuple[str, ...] | None
    separator: str


class ArrayParser:
    """Parses documents one after the other. A model has many arrays of few layouts: what those of
    one layout have alike is looked into once."""

    def __init__(self) -> None:
        self._layouts: dict[object, _Layout] = {}

    def parse(
        self, node: str, document: Mapping[str, Any], url: str, sums: object = None
    ) -> ArrayMeta:
        """As :func:`parse_array`."""
        try:
            data_type = document["data_type"]
            layout = self._layout(data_type, document)
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
        return ArrayMeta(
            key or names.key_of(node) or node,
            node,
            layout.grid,
            data_type,
            layout.chain,
            separator=layout.separator,
            shard_shape=_shape(shards) if shards is not None else None,
            document=document,
            crcs=crcs_of(sums, layout.chunks) if type(sums) is str else None,
        )

    def _layout(self, data_type: object, document: Mapping[str, Any]) -> _Layout:
        codecs, encoding = document["codecs"], document["chunk_key_encoding"]
        cut = document["chunk_grid"]
        shape, chunk_shape = document["shape"], cut["configuration"]["chunk_shape"]
        # Types with settings of their own are objects in Zarr; they are refused further on.
        kind = data_type if type(data_type) is str else ""
        known = self._layouts.get((kind, cut["name"], tuple(shape), tuple(chunk_shape)))
        if known is not None and known.codecs == codecs and known.encoding == encoding:
            return known
        grid = Grid(_shape(shape), _shape(chunk_shape))
        chain, separator = _chunk_encoding(codecs, encoding)
        if cut["name"] != "regular":
            raise ValueError(f"grid {cut['name']!r}")
        if len(grid.chunk_shape) != len(grid.shape) or 0 in grid.chunk_shape:
            raise ValueError(f"chunk shape {grid.chunk_shape} for shape {grid.shape}")
        found = _Layout(codecs, encoding, grid, grid.size, chain, separator)
        self._layouts[kind, cut["name"], grid.shape, grid.chunk_shape] = found
        return found


def _chunk_encoding(codecs: Any, encoding: Any) -> tuple[tuple[str, ...] | None, str]:
    """Names of codecs that can be undone here, and what is between a chunk key's numbers."""
    if encoding["name"] != "default":
        raise ValueError(f"chunk keys {encoding['name']!r}")
    separator = _separator((encoding.get("configuration") or {}).get("separator", "/"))
    codec_names = [codec["name"] for codec in codecs] or [""]
    chain: tuple[str, ...] | None = tuple(codec_names[1:])
    if codec_names[0] != "bytes" or chain not in _CHAINS or _big(codecs):
        chain = None
    return chain, separator


def _separator(value: object) -> str:
    """What is between a chunk key's numbers: any other text could lead out of the checkpoint."""
    if value not in (".", "/"):
        raise ValueError(f"separator {value!r}")
    return str(value)


def crcs_of(sums: str, chunks: int) -> bytes | None:
    """:attr:`ArrayMeta.crcs` of so many chunks, from base64; ``None`` where it is of another
    grid."""
    try:
        crcs = a2b_base64(sums, strict_mode=True)
    except ValueError:
        return None
    return crcs if len(crcs) == 4 * chunks else None


def _big(codecs: Any) -> bool:
    configuration = codecs[0].get("configuration") or {}
    return bool(configuration.get("endian", "little") != "little")


def parse_v2_array(node: str, text: str | bytes, url: str) -> ArrayMeta:
    """Parse an array's ``.zarray``.

    Raises:
        FormatVersionError: not a C-order Zarr v2 array.
        DTypeMismatchError: an unknown data type.
    """
    document = json_object(text, url)
    try:
        if document["zarr_format"] != 2 or document["order"] != "C":
            raise ValueError(f"format {document['zarr_format']!r}, order {document['order']!r}")
        grid = Grid(_shape(document["shape"]), tuple(max(1, c) for c in _shape(document["chunks"])))
        if len(grid.chunk_shape) != len(grid.shape):
            raise ValueError(f"chunks {grid.chunk_shape} for shape {grid.shape}")
        plain = document.get("compressor") is None and not document.get("filters")
        separator = _separator(document.get("dimension_separator", "."))
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
        separator=separator,
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
    document = json_object(text, url)
    if document.get("node_type") != "array":
        raise NotACheckpointError(f"{url} is no Zarr array", url=url)
    return parse_array(node, document, url)
