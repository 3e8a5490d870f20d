"""Builds and parses the documents of a checkpoint: those of arrays and of the root group.

These are ``zarr.json`` of an array and of the root group (Zarr v3 core specification, "Metadata";
consolidated metadata inline, as zarr-python writes it), and ``.zarray`` of the Zarr v2 layout that
Megatron-Core wrote up to 0.15. The functions are pure: they read and write no files.
"""

from __future__ import annotations

import json
import math
from binascii import a2b_base64, b2a_base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from shardstore import errors
from shardstore.storage.format import dtypes, names
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.packs import Places, is_pack
from shardstore.storage.runtime.checksums import crc32c

T = TypeVar("T")

FORMAT_VERSION = 2
"""The largest version in ``attributes.shardstore`` of the root document that is read."""
PLAIN_VERSION = 1
"""Version of a checkpoint each of whose chunks is an object of its own."""

CHUNK_SUMS = "chunk_crc32c"
"""Member of ``attributes.shardstore`` in the root document: the checksums of all chunks."""

CHUNK_BYTES = "chunk_bytes"
"""Member beside it: the sizes of the chunks of compressed arrays."""

FILE_SUMS = "file_crc32c"
"""Member beside it: the checksums of the files other than chunks that loads read."""

FILE_BYTES = "file_bytes"
"""Member beside it: the sizes of these files and of the manifest."""

ROOT_SUM = "root_crc32c"
"""Member beside it: the checksum of the root document itself, see :func:`root_document`."""

PACKS = "packs"
"""Member beside it: the packs, and the arrays whose chunks lie in them."""

ARRAY_DOCUMENTS = "array_documents"
"""Member beside it: false if arrays have no documents of their own; otherwise absent."""

SEPARATOR = "."
"""Separator in chunk keys: ``c.0.1`` needs no folders below the folder of the array. They would be
a third of the files and folders of a small array."""

MAX_AXES, MAX_ELEMENTS = 64, 2**59 - 1
"""Limits of NumPy and torch, for elements of up to 16 bytes."""

CRC32C = "crc32c"
COMPRESSORS: dict[str, dict[str, Any]] = {
    "zstd": {"level": 1, "checksum": False},
    "blosc": {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "blocksize": 0},
}
"""Compressing codecs and their configurations; that of blosc also has the item size as
``typesize``."""
_CHAINS = ((), (CRC32C,), *((name, CRC32C) for name in COMPRESSORS))
"""Codec chains after ``bytes`` that shardstore decodes. TensorStore decodes the others."""


@dataclass(slots=True, unsafe_hash=True)
class ArrayMeta:
    """The metadata of one array, as in its document. Treat it as immutable; a frozen class would
    take three times as long to construct.

    Attributes:
        key: the tensor's key.
        node: node name of the array below the root.
        grid: shape and chunk shape.
        dtype: Zarr name of the data type.
        codecs: names of the codecs after ``bytes``, in order; ``None`` for a chain that only
            TensorStore or zarr can decode.
        zarr_format: 3, or 2 for the layout of Megatron-Core.
        separator: separator of the numbers in a chunk key.
        shard_shape: shape of the shards that the array was saved from, if known.
        document: text of the document, if only TensorStore or zarr can decode the codecs.
        crcs: crc32c of each chunk in C order over the grid, little-endian uint32, if the commit has
            them.
        sizes: the same for the size of each compressed chunk in bytes.
        v2_keys: whether a Zarr v3 array has the chunk keys of Zarr v2.
        constant: the bits that all elements have, if no chunk is stored.
        places: where the chunks lie, if they are packed.
    """

    key: str
    node: str
    grid: Grid
    dtype: str
    codecs: tuple[str, ...] | None = (CRC32C,)
    zarr_format: int = 3
    separator: str = SEPARATOR
    shard_shape: tuple[int, ...] | None = None
    document: bytes | None = field(default=None, compare=False, repr=False)
    crcs: bytes | None = field(default=None, compare=False, repr=False)
    sizes: bytes | None = field(default=None, compare=False, repr=False)
    v2_keys: bool = False
    constant: bytes | None = None
    places: Places | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.grid.shape

    @property
    def chunk_bytes(self) -> int:
        """Size of a decoded chunk in bytes."""
        return math.prod(self.grid.chunk_shape) * dtypes.ITEMSIZES[self.dtype]

    def expected_crc(self, number: int) -> int | None:
        """Return the crc32c of a decoded chunk from the commit; ``None`` if the commit has none.
        ``number`` is the position of the chunk in C order over the grid."""
        if self.crcs is None:
            return None
        return int.from_bytes(self.crcs[4 * number : 4 * number + 4], "little")

    def expected_size(self, number: int) -> int | None:
        """Return the size of a compressed chunk from the commit, as :meth:`expected_crc`."""
        if self.sizes is None:
            return None
        return int.from_bytes(self.sizes[4 * number : 4 * number + 4], "little")

    @property
    def has_crc(self) -> bool:
        """Whether each chunk ends with its own crc32c."""
        return self.codecs is not None and self.codecs[-1:] == (CRC32C,)

    @property
    def is_plain(self) -> bool:
        """Whether a chunk object is the chunk's bytes, with or without a crc32c after them."""
        return self.codecs in ((), (CRC32C,))

    @property
    def is_compressed(self) -> bool:
        """Whether a chunk object is the compressed chunk with a crc32c after it."""
        return self.codecs is not None and len(self.codecs) == 2

    def chunk_name(self, index: Sequence[int]) -> str:
        """Return the name of a chunk's file or object below the root: the array's node, and the
        chunk's key (Zarr v3 core specification, "Chunk key encoding": default; or v2)."""
        numbers = self.separator.join(map(str, index))
        if self.v2_keys or self.zarr_format == 2:
            return f"{self.node}/{numbers or 0}"
        return f"{self.node}/c{self.separator}{numbers}" if numbers else f"{self.node}/c"

    def has_document(self, *, packs: bool) -> bool:
        """Return whether the array has a document of its own, in a checkpoint with array documents.
        ``packs``: whether the checkpoint has packs, and so no objects for what needs none."""
        is_needed = not packs or (self.constant is None and self.grid.size > 0)
        return is_needed and self.places is None

    @property
    def document_name(self) -> str:
        """Name of the array's own document below its node."""
        return ".zarray" if self.zarr_format == 2 else "zarr.json"


def array_of_one_chunk(key: str, shape: tuple[int, ...], dtype: str) -> ArrayMeta:
    """Return the array of a tensor that a file of another format holds, without codecs."""
    return ArrayMeta(key, key, Grid(shape, tuple(max(1, n) for n in shape)), dtype, codecs=())


_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


@lru_cache(maxsize=256)
def _codec_documents(dtype: str, codecs: tuple[str, ...] | None) -> list[dict[str, Any]]:
    itemsize = dtypes.itemsize(dtype)
    configurations = {**COMPRESSORS, "bytes": {"endian": "little"} if itemsize > 1 else {}}
    configurations["blosc"] = {"typesize": itemsize, **configurations["blosc"]}
    return [
        {"name": name, **({"configuration": found} if (found := configurations.get(name)) else {})}
        for name in ("bytes", *(codecs or ()))
    ]


def array_document(meta: ArrayMeta) -> str:
    """Return the text of an array's own document. It is the same on every rank."""
    shape, chunk_shape = meta.grid
    document: dict[str, Any]
    if meta.zarr_format == 2:
        document = {
            "zarr_format": 2,
            "shape": shape,
            "chunks": chunk_shape,
            "dtype": dtypes.v2_dtype(meta.dtype),
            "compressor": None,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "dimension_separator": meta.separator,
        }
    else:
        ours: dict[str, Any] = {"key": meta.key}
        if meta.shard_shape is not None:
            ours["shard_shape"] = meta.shard_shape
        if meta.constant is not None:
            ours["constant"] = True
        fill_bits = meta.constant or bytes(dtypes.itemsize(meta.dtype))
        document = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": meta.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": meta.separator},
            },
            "fill_value": dtypes.fill_value(meta.dtype, fill_bits),
            "codecs": _codec_documents(meta.dtype, meta.codecs),
            # xarray requires one length for all axes of the same name, so names have the key.
            "dimension_names": [f"{meta.key}:{axis}" for axis in range(len(shape))],
            "attributes": {"shardstore": ours},
        }
    return msgspec.json.encode(document).decode()


_OPENING = b'{"zarr_format":3,"node_type":"group","attributes":{'
"""Beginning of a root document that this package writes; other programs write blanks."""
_SUMMED = _OPENING + b'"shardstore":{"%s":"' % ROOT_SUM.encode()
_SUM_END = len(_SUMMED) + 8


def root_document(arrays: Iterable[tuple[str, str]], attributes: Mapping[str, Any]) -> bytes:
    """Return the root group's document. Writing it commits the checkpoint.

    If the attributes have a member ``shardstore``, the document begins with :data:`_SUMMED` and the
    crc32c of all bytes after it. A reader verifies this checksum over the stored bytes.

    Args:
        arrays: ``(node, text of its document)`` of each array.
        attributes: attributes of the root group.
    """
    metadata = ",".join(f"{_dumps(node)}:{text}" for node, text in sorted(arrays))
    behind = (
        ',"consolidated_metadata":{"kind":"inline","must_understand":false,'
        f'"metadata":{{{metadata}}}}}}}'
    )
    if ours := _dict_of(attributes, "shardstore"):
        # Both come first; the checksum replaces the zeros.
        first = {"shardstore": {ROOT_SUM: "", **ours} | {ROOT_SUM: "0" * 8}}
        attributes = {**first, **attributes, **first}
    text = _OPENING + f"{_dumps(attributes)[1:]}{behind}".encode()
    rest = text[_SUM_END:]
    return b"%s%08x%s" % (_SUMMED, crc32c(rest, 0), rest) if ours else text


Length = Annotated[int, msgspec.Meta(ge=0)]
Shape = tuple[Length, ...]
_NULL = msgspec.Raw(b"null")


class _ChunkShape(msgspec.Struct):
    chunk_shape: Shape


class _ChunkGrid(msgspec.Struct):
    name: Literal["regular"]
    configuration: _ChunkShape


class _Extension(msgspec.Struct):
    name: str
    configuration: dict[str, Any] | None = None


class _Encoding(_Extension):
    name: Literal["default", "v2"]


class _Group(msgspec.Struct, tag_field="node_type", tag="group"):
    pass


class _Array(msgspec.Struct, tag_field="node_type", tag="array"):
    """An array's ``zarr.json``. Members that many arrays share stay raw, and are parsed once."""

    shape: Shape
    data_type: Any  # an object for data types with a configuration
    chunk_grid: _ChunkGrid
    chunk_key_encoding: msgspec.Raw
    codecs: msgspec.Raw
    attributes: msgspec.Raw = _NULL
    fill_value: Any = None


class _V2Array(msgspec.Struct):
    """An array's ``.zarray``."""

    zarr_format: Literal[2]
    shape: Shape
    chunks: Shape
    dtype: Any
    order: Literal["C", "F"]
    compressor: Any = None
    filters: Any = None
    dimension_separator: Literal[".", "/"] = "."

    def __post_init__(self) -> None:
        _require_possible(self.shape, self.chunks)


class _Own(msgspec.Struct):
    key: str | None = None
    shard_shape: Shape | None = None
    constant: bool = False


class _Packed(msgspec.Struct, array_like=True):
    """An array of which each chunk is packed."""

    data_type: str
    shape: Shape
    chunk_shape: Shape
    compressor: str | None
    shard_shape: Shape | None
    key: str | None
    places: str

    def array(self, node: str, files: tuple[str, ...], sums: object) -> ArrayMeta:
        """Return the array. Raise ``ValueError`` if it is impossible."""
        _require_possible(self.shape, self.chunk_shape)
        if 0 in self.chunk_shape:
            raise ValueError(f"chunk shape {self.chunk_shape}")
        dtypes.check(self.data_type, node)
        grid = Grid(self.shape, self.chunk_shape)
        codecs = (CRC32C,) if self.compressor is None else (self.compressor, CRC32C)
        places = Places(files, a2b_base64(self.places, strict_mode=True))
        crcs = _numbers(sums, grid.size) if isinstance(sums, str) else None
        if codecs not in _CHAINS or not places.fit(grid.size) or not crcs:
            raise ValueError(f"{self!r:.200}")
        return ArrayMeta(
            self.key or names.key_of(node) or node,
            node,
            grid,
            self.data_type,
            codecs,
            shard_shape=_shards(self.shard_shape, grid),
            crcs=crcs,
            places=places,
        )


def packed_arrays(metas: Iterable[ArrayMeta], files: Iterable[str]) -> dict[str, Any]:
    """Return the member :data:`PACKS` of a commit.

    Args:
        metas: the packed arrays.
        files: names of the packs.
    """
    arrays = {}
    for meta in metas:
        assert meta.codecs is not None
        assert meta.places is not None
        key = None if names.key_of(meta.node) == meta.key else meta.key
        compressor = meta.codecs[0] if meta.is_compressed else None
        places = b2a_base64(meta.places.rows, newline=False).decode()
        arrays[meta.node] = [meta.dtype, *meta.grid, compressor, meta.shard_shape, key, places]
    return {"files": list(files), "arrays": arrays}


class _Attributes(msgspec.Struct):
    shardstore: _Own | None = None


class _Members(msgspec.Struct):
    metadata: dict[str, msgspec.Raw]


class _Root(msgspec.Struct):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: Any = None
    consolidated_metadata: msgspec.Raw = _NULL


_NODE = msgspec.json.Decoder(_Array | _Group)
_V2_ARRAY = msgspec.json.Decoder(_V2Array)
_ATTRIBUTES = msgspec.json.Decoder(_Attributes)
_ROOT = msgspec.json.Decoder(_Root)


def _decoded(decoder: msgspec.json.Decoder[T], text: bytes, url: str) -> T:
    """Parse a document with a decoder.

    Raises:
        NotACheckpointError: the document is not valid JSON.
        FormatVersionError: the JSON does not match the decoder's type.
    """
    try:
        text.decode()  # the decoder does not check the UTF-8 of members that it skips
        try:
            return decoder.decode(text)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Python and zarr write NaN and Infinity, which are not valid JSON.
            return decoder.decode(msgspec.json.encode(json.loads(text)))
    except msgspec.ValidationError as error:
        raise errors.FormatVersionError(
            f"{url} is not what this version of shardstore reads: {error}", url=url
        ) from error
    except (ValueError, RecursionError) as error:
        raise errors.NotACheckpointError(
            f"{url} is not valid JSON ({error}): it is damaged, or not part of a checkpoint",
            url=url,
        ) from error


def parse_array(
    node: str,
    text: bytes,
    url: str,
    sums: object = None,
    sizes: object = None,
    *,
    constants: bool = False,
) -> ArrayMeta | None:
    """Parse the ``zarr.json`` of a node; ``None`` for a group.

    Args:
        node: name of the node.
        text: the document.
        url: URL of the document, for error texts.
        sums: base64 of :attr:`ArrayMeta.crcs`, if known; ignored if they do not fit the grid.
        sizes: the same for :attr:`ArrayMeta.sizes`.
        constants: whether to believe a document that its array is constant. A program that copies
            an array may copy its attributes, so only the commit of a checkpoint shows it.

    Raises:
        NotACheckpointError: the document is not valid JSON.
        FormatVersionError: this version does not read the array's grid, chunk keys or shape.
        DTypeMismatchError: the data type is unknown.
    """
    document = _decoded(_NODE, text, url)
    if isinstance(document, _Group):
        return None
    chunk_shape = document.chunk_grid.configuration.chunk_shape
    shared = bytes(document.codecs), bytes(document.chunk_key_encoding)
    try:
        own = _ATTRIBUTES.decode(document.attributes).shardstore or _Own()
    except msgspec.ValidationError:
        own = _Own()  # attributes of another program
    try:
        layout = _layout(document.shape, chunk_shape, own.shard_shape, *shared)
        dtypes.check(document.data_type, url)
        constant = (
            own.constant and constants and dtypes.bits_of(document.data_type, document.fill_value)
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise errors.FormatVersionError(
            f"{url} is no array that this version of shardstore reads: {error}", url=url
        ) from error
    return ArrayMeta(
        own.key or names.key_of(node) or node,
        node,
        layout.grid,
        document.data_type,
        layout.codecs,
        separator=layout.separator,
        shard_shape=layout.shard_shape,
        document=text if layout.codecs is None else None,
        crcs=_numbers(sums, layout.chunks) if isinstance(sums, str) else None,
        sizes=_numbers(sizes, layout.chunks) if isinstance(sizes, str) else None,
        v2_keys=layout.v2_keys,
        constant=constant or None,
    )


class _Layout(NamedTuple):
    """Attributes of :class:`ArrayMeta`, and the number of chunks."""

    grid: Grid
    shard_shape: Shape | None
    chunks: int
    codecs: tuple[str, ...] | None
    separator: str
    v2_keys: bool


@lru_cache(maxsize=4096)  # a model has many arrays of few layouts
def _layout(
    shape: Shape, chunk_shape: Shape, shards: Shape | None, codecs: bytes, encoding: bytes
) -> _Layout:
    _require_possible(shape, chunk_shape)
    if 0 in chunk_shape:
        raise ValueError(f"chunk shape {chunk_shape} for shape {shape}")
    keys = msgspec.json.decode(encoding, type=_Encoding)
    v2_keys = keys.name == "v2"
    separator = (keys.configuration or {}).get("separator", "." if v2_keys else "/")
    if separator not in (".", "/"):  # another text could lead out of the checkpoint
        raise ValueError(f"separator {separator!r}")
    first, *others = msgspec.json.decode(codecs, type=list[_Extension])
    little = (first.configuration or {}).get("endian", "little") == "little"
    chain = tuple(codec.name for codec in others)
    known = first.name == "bytes" and little and chain in _CHAINS and not v2_keys
    grid, codec_names = Grid(shape, chunk_shape), chain if known else None
    return _Layout(grid, _shards(shards, grid), grid.size, codec_names, separator, v2_keys)


def _shards(shape: Shape | None, grid: Grid) -> Shape | None:
    """Return the shard shape if it fits the array, else ``None``."""
    fits = shape is not None and len(shape) == len(grid.shape) and 0 not in shape
    return shape if fits else None


def _require_possible(*shapes: Shape) -> None:
    """Raise ``ValueError`` if shape and chunk shape differ in the number of axes, or one exceeds
    :data:`MAX_AXES` or :data:`MAX_ELEMENTS`."""
    for shape in shapes:
        elements = math.prod(max(1, n) for n in shape)
        if not len(shapes[0]) == len(shape) <= MAX_AXES or elements > MAX_ELEMENTS:
            raise ValueError(f"chunk shape {shapes[1]!r:.60} for shape {shapes[0]!r:.60}")


def _numbers(text: str, chunks: int) -> bytes | None:
    try:
        numbers = a2b_base64(text, strict_mode=True)
    except ValueError:
        return None
    return numbers if len(numbers) == 4 * chunks else None


def parse_v2_array(node: str, text: bytes, url: str) -> ArrayMeta:
    """Parse an array's ``.zarray``.

    Raises:
        NotACheckpointError: the document is not valid JSON.
        FormatVersionError: the document is not a Zarr v2 array.
        DTypeMismatchError: the data type is unknown.
    """
    document = _decoded(_V2_ARRAY, text, url)
    plain = document.compressor is None and not document.filters and document.order == "C"
    plain = plain and not str(document.dtype).startswith(">")
    return ArrayMeta(
        key=names.key_of(node) or node,
        node=node,
        grid=Grid(document.shape, tuple(max(1, n) for n in document.chunks)),
        dtype=dtypes.v2_dtype_name(document.dtype, url),
        codecs=() if plain else None,
        zarr_format=2,
        separator=document.dimension_separator,
        document=None if plain else text,
    )


def codec_names(document: bytes) -> list[str]:
    """Return the names of the codecs in an array's document."""
    parsed, codecs = json.loads(document), list[Any]()
    for found in map(parsed.get, ("codecs", "filters", "compressor")):
        codecs += found if isinstance(found, list) else [found]
    return [str(codec.get("name", codec.get("id"))) for codec in codecs if isinstance(codec, dict)]


def by_key(metas: Sequence[ArrayMeta], url: str) -> dict[str, ArrayMeta]:
    """Return the arrays by key.

    Raises:
        DamagedCheckpointError: two arrays have the same key.
    """
    found: dict[str, ArrayMeta] = {}
    for meta in metas:
        if found.setdefault(meta.key, meta) is not meta:
            what = f"has two arrays of the same key, one of them at {meta.node!r}"
            raise errors.damaged(url, what)
    return found


def _dict_of(attributes: object, name: str) -> dict[str, Any]:
    found = attributes.get(name) if isinstance(attributes, dict) else None
    return found if isinstance(found, dict) else {}


Refused: TypeAlias = dict[str, errors.CheckpointingException]
"""Errors of the arrays of another program that this version cannot read, by key."""


@dataclass
class RootDocument:
    """The parsed root document.

    Attributes:
        url: URL of the document, for error texts.
        attributes: attributes of the root group.
        texts: node -> document of each member that the group lists.
        consolidated: whether the group lists its members; groups of other programs may not.
        is_rewritten: whether another program wrote or rewrote the document. Its content may have
            changed, and it has no checksum.
        is_summed: whether the document has a checksum, which was verified.
        about: the attributes that this package wrote; empty if another program wrote the group.
        format_version: version in ``about``; ``None`` if another program wrote the group.
        commit: the commit record; empty if there is none.
        array_documents: whether arrays have documents of their own, according to this document.
        chunk_sums: node -> base64 of :attr:`ArrayMeta.crcs`, from the commit.
        chunk_bytes: node -> base64 of :attr:`ArrayMeta.sizes`, from the commit.
        file_sums: name below the root -> crc32c of each file other than a chunk that the commit
            names.
        file_bytes: name below the root -> size in bytes of these files and the manifest; empty in
            older checkpoints.
        packs: names of the packs; ``None`` for a checkpoint without.
        packed: node -> description of each packed array.
    """

    url: str
    attributes: dict[str, Any]
    texts: dict[str, bytes]
    consolidated: bool = True
    is_rewritten: bool = False
    is_summed: bool = False

    def __post_init__(self) -> None:
        self.about = _dict_of(self.attributes, "shardstore")
        self.format_version: int | None = self.about.get("format_version")
        self.commit = _dict_of(self.about, "commit")
        self.array_documents = self.about.get(ARRAY_DOCUMENTS) is not False
        self.chunk_sums = _dict_of(self.about, CHUNK_SUMS)
        self.chunk_bytes = _dict_of(self.about, CHUNK_BYTES)
        self.file_sums = _dict_of(self.about, FILE_SUMS)
        packs = self.about.get(PACKS)
        self.packed = _dict_of(packs, "arrays")
        self.packs: tuple[str, ...] | None = None
        if isinstance(packs, dict):
            files = packs.get("files")
            self.packs = tuple(map(str, files)) if isinstance(files, list) else ()
        sizes = _dict_of(self.about, FILE_BYTES)
        # No file is larger, and the calls of the operating system take no larger number.
        self.file_bytes = {n: b for n, b in sizes.items() if type(b) is int and 0 <= b < 2**62}

    @property
    def nodes(self) -> set[str]:
        """The nodes of all arrays, and of groups of other programs."""
        return {*self.texts, *self.packed}

    def has_document_of(self, array: ArrayMeta) -> bool:
        """Return whether an array has a document of its own."""
        return self.array_documents and array.has_document(packs=self.packs is not None)

    def used_packs(self, without: Collection[str] = ()) -> set[str]:
        """Return the names of the packs in which a chunk of an array lies. Arrays of the nodes
        ``without`` do not count."""
        arrays = (self._packed_array(node) for node in self.packed if node not in without)
        return {name for array in arrays if array.places for name in array.places.names()}

    def _packed_array(self, node: str) -> ArrayMeta:
        try:
            found = msgspec.convert(self.packed[node], _Packed)
            return found.array(node, self.packs or (), self.chunk_sums.get(node))
        except (msgspec.ValidationError, ValueError, errors.DTypeMismatchError) as error:
            raise self.damaged(
                f"has a description of the packed {node!r} that no save writes ({error})"
            ) from error

    def arrays(self, refused: Refused | None = None) -> dict[str, ArrayMeta]:
        """Return all arrays by key.

        Args:
            refused: receives the errors of arrays in a group of another program, which are then
                not raised.

        Raises:
            FormatVersionError, DTypeMismatchError: this version cannot read an array.
            DamagedCheckpointError: the same in a document without a checksum, because this version
                reads every array that such a save wrote; or a member is not an array; or two
                arrays have the same key.
        """
        sums, sizes = self.chunk_sums, self.chunk_bytes
        version = self.format_version
        ours = version is not None and not self.is_rewritten
        constants = version is not None and version > PLAIN_VERSION
        no_save = "has a description of {!r} that no save writes ({})"
        found = []
        for node, text in self.texts.items():
            try:
                about = sums.get(node), sizes.get(node)
                meta = parse_array(node, text, f"{self.url}/{node}", *about, constants=constants)
            except (errors.FormatVersionError, errors.DTypeMismatchError) as error:
                if refused is not None and self.format_version is None:
                    refused[names.key_of(node) or node] = error
                    continue
                if self.is_summed or not ours:
                    raise
                raise self.damaged(no_save.format(node, error)) from error
            if meta is not None and (meta.codecs is not None or self.is_summed or not ours):
                found.append(meta)
            elif ours:
                what = "a group" if meta is None else "unknown codecs"
                raise self.damaged(no_save.format(node, what))
        found += [self._packed_array(node) for node in self.packed]
        return by_key(found, self.url)

    def without(self, nodes: Collection[str]) -> bytes:
        """Return the document without some arrays and their checksums."""
        about = dict(self.about)
        if self.packs is not None:
            rows = {node: row for node, row in self.packed.items() if node not in nodes}
            about[PACKS] = {"files": list(self.packs), "arrays": rows}
            unused = set(self.packs) - self.used_packs(nodes)
            for name in (FILE_SUMS, FILE_BYTES):
                kept_files = _dict_of(about, name).items()
                about[name] = {file: n for file, n in kept_files if file not in unused}
        for name, column in ((CHUNK_SUMS, self.chunk_sums), (CHUNK_BYTES, self.chunk_bytes)):
            if name in about:
                about[name] = {node: text for node, text in column.items() if node not in nodes}
        if self.commit:
            # The digest covers all arrays and does not fit the remaining ones.
            about["commit"] = {n: v for n, v in self.commit.items() if n != "content"}
        kept = [(node, text.decode()) for node, text in self.texts.items() if node not in nodes]
        return root_document(kept, self.attributes | ({"shardstore": about} if about else {}))

    def damaged(self, what: str) -> errors.DamagedCheckpointError:
        """Return the error for a damaged or changed root document.

        Args:
            what: predicate of the error's sentence; its subject is the document's URL.
        """
        wrong = f"{what}: it is damaged, or another program changed it; put the saved one back"
        return errors.damaged(self.url, wrong)


def parse_root(text: bytes, url: str) -> RootDocument:
    """Parse the root group's document.

    Raises:
        NotACheckpointError: the document is not valid JSON, or not a Zarr v3 group.
        DamagedCheckpointError: the document fails its checksum, or the name of a member leads out
            of the checkpoint.
        FormatVersionError: the document has a later format version.
    """
    if is_summed := text.startswith(_SUMMED):
        stored, found = text[len(_SUMMED) : _SUM_END], b"%08x" % crc32c(text[_SUM_END:], 0)
        if stored != found:
            raise errors.damaged(
                url,
                f"fails its checksum ({ROOT_SUM} {stored!r:.20}, found {found!r}): it is damaged, "
                "or another program changed it and left the checksum in it; put the saved one back",
            )
    try:
        document = _decoded(_ROOT, text, url)
    except errors.FormatVersionError as error:
        raise errors.NotACheckpointError(
            f"{url} is no Zarr v3 group, and so not a distributed checkpoint of this format "
            f"({error.__cause__}); give the folder that save() wrote",
            url=url,
        ) from error
    texts, consolidated = {}, True
    try:
        members = msgspec.json.decode(document.consolidated_metadata, type=_Members)
        texts = {node: bytes(raw) for node, raw in members.metadata.items()}
    except msgspec.ValidationError:
        consolidated = False
    attributes = document.attributes if isinstance(document.attributes, dict) else {}
    is_rewritten = not text.startswith(_OPENING)
    root = RootDocument(url, attributes, texts, consolidated, is_rewritten, is_summed)
    version, ours = root.format_version, attributes.get("shardstore")
    if isinstance(ours, dict) and not (type(version) is int and 1 <= version <= FORMAT_VERSION):
        if not (is_rewritten or is_summed):  # later formats have the checksum
            raise root.damaged(f"has shardstore format version {version!r} and no checksum")
        raise errors.FormatVersionError(
            f"{url} has shardstore format version {version!r}; this version of shardstore reads "
            f"up to {FORMAT_VERSION}: upgrade shardstore to load it",
            url=url,
        )
    for name in (*texts, *root.packed, *root.file_sums):
        names.require_inside(name, url)
    if wrong := [name for name in root.packs or () if not is_pack(name)]:
        raise root.damaged(f"names {wrong[0]!r:.100} as a pack, which no save writes")
    return root
