"""The jobs of a mover, and the stored bytes of a chunk.

:class:`ChunkWrite` writes a whole chunk from memory, :class:`RegionRead` reads a region into
memory. A mover takes lists of jobs and runs them in parallel.

Chunks are encoded and decoded with the codecs ``bytes``, crc32c, zstd and blosc. numcodecs
compresses, so a chunk has the same stored bytes on a disk and in an object store: the bytes that
zarr-python would write. TensorStore decodes the codecs of other programs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardstore.errors import ArgumentError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import COMPRESSORS, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, block_bytes, inner_blocks
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.chunk_bytes import as_bytes, pieces, whole_chunk
from shardstore.storage.runtime.checksums import Sums, crc32c

PIECE_BYTES = 1024 * 1024
"""The chunks of a constant array are hashed in pieces of this size."""
CRC = struct.Struct("<I")
CRC_BYTES = CRC.size
MAX_COMPRESSED_BYTES = 0x7E000000
"""The largest buffer that numcodecs compresses."""
Source = NDArray[Any] | Callable[[], NDArray[Any]]
FEW_CUTS = 16

SmallFiles = Sequence[tuple[str, bytes]]
"""Names below a location, and contents, of files that are no chunks."""
WriteDone = Callable[["ChunkWrite", ChunkRecord], None]
"""Callback that receives each written chunk."""
GetManifest = Callable[[], Manifest | None]
"""Function that returns the manifest of a checkpoint, which few reads need."""
ReadDone = Callable[[int, int], None]
"""Callback that receives the number of bytes that reached their destination, and of how many
chunks they are."""


# -- jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk to be written whole.

    Attributes:
        array: the array it belongs to.
        index: its index in the chunk grid.
        source: the part of the chunk within the array, with any strides and the array's data type;
            or a function that returns it. The mover calls the function when it writes the chunk.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    source: Source

    def data(self) -> NDArray[Any]:
        """Return the source array. Call the source function if there is one.

        Raises:
            ValueError: the array's shape or data type differs from the chunk's.
        """
        data = self.source() if callable(self.source) else self.source
        shape, dtype = self.array.grid.box(self.index).shape, dtypes.numpy_dtype(self.array.dtype)
        if data.shape != shape or data.dtype != dtype:
            raise ValueError(
                f"chunk {self.index} of key {self.array.key!r} takes {dtype} of shape {shape}, "
                f"not {data.dtype} of shape {data.shape}"
            )
        return data


@dataclass(slots=True)
class RegionRead:
    """A region to be read. Not frozen, because freezing takes longer than the construction itself.

    Attributes:
        array: the array to read from.
        box: the region, in elements of the array.
        out: the destination, with the region's shape, any strides and the array's data type.
    """

    array: ArrayMeta
    box: Box
    out: NDArray[Any]

    def __post_init__(self) -> None:
        dtype = dtypes.numpy_dtype(self.array.dtype)
        if self.out.shape != self.box.shape or self.out.dtype != dtype:
            raise ValueError(
                f"a region of key {self.array.key!r} gives {dtype} of shape {self.box.shape}, its "
                f"destination takes {self.out.dtype} of shape {self.out.shape}"
            )


@dataclass(slots=True)
class ChunkPart:
    """The part of a region that lies in one chunk. Not frozen, for the same reason as
    :class:`RegionRead`.

    Attributes:
        array: the array to read from.
        index: index of the chunk.
        within: the part, relative to the chunk's corner.
        out: the destination of the part.
        number: position of the chunk in C order over the grid.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    within: Box
    out: NDArray[Any]
    number: int


def chunk_parts(read: RegionRead) -> Iterator[ChunkPart]:
    """Split a region along the chunk grid."""
    array, out = read.array, read.out
    cuts = _few_cuts(array.grid, read.box) or _cuts(array.grid, read.box)
    for index, within, where, number in cuts:
        yield ChunkPart(array, index, within, out if where is None else out[where], number)


class _OverlappedChunk(NamedTuple):
    """A chunk that a region overlaps.

    Attributes:
        chunk: index of the chunk.
        within: the overlap, relative to the chunk.
        where: the overlap, relative to the region; ``None``: the whole region.
        number: position of the chunk in C order.
    """

    chunk: tuple[int, ...]
    within: Box
    where: tuple[Any, ...] | None
    number: int


@lru_cache(maxsize=512)  # many tensors and optimizer moments of a model share few shapes
def _few_cuts(grid: Grid, region: Box) -> Sequence[_OverlappedChunk] | None:
    """Return :func:`_cuts` as a tuple; ``None`` if there are more than :data:`FEW_CUTS`, which
    would take too much memory in the cache."""
    found = tuple(islice(_cuts(grid, region), FEW_CUTS + 1))
    return found if len(found) <= FEW_CUTS else None


def _cuts(grid: Grid, region: Box) -> Iterator[_OverlappedChunk]:
    for index in grid.overlapping(region):
        chunk = grid.box(index)
        common = chunk.intersect(region)
        assert common is not None
        # With the ellipsis, a 0-d part stays an array; indexing with () alone copies the element.
        where = None if common == region else (..., *common.relative_to(region.offset).slices)
        yield _OverlappedChunk(index, common.relative_to(chunk.offset), where, grid.linear(index))


# -- stored bytes ----------------------------------------------------------------------------------


class BadChunkError(Exception):
    """A chunk is missing or damaged.

    Attributes:
        kind: ``missing``, ``size``, ``crc``, ``manifest`` (intact, but not the committed chunk) or
            ``unreadable``.
        text: the predicate of a sentence whose subject is the chunk.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


def uncompressed_bytes(array: ArrayMeta) -> int:
    """Return the size of a stored chunk in bytes if it is not compressed."""
    return array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)


def stored_bytes(array: ArrayMeta, number: int) -> int | None:
    """Return the size of a stored chunk in bytes; ``None`` for a compressed chunk whose size the
    commit does not have. ``number`` is the position of the chunk in C order over the grid."""
    return array.expected_size(number) if array.is_compressed else uncompressed_bytes(array)


def most_stored_bytes(array: ArrayMeta, number: int) -> int:
    """Return the largest possible size of a stored chunk in bytes, see :func:`stored_bytes`. No
    compressor adds more."""
    most = array.chunk_bytes + array.chunk_bytes // 64 + 4096
    return min(stored_bytes(array, number) or most, most)


class EncodedChunk:
    """The stored bytes of one chunk, encoded during the iteration.

    Each item is a list of buffers that hold the next stored bytes in order. The buffers are valid
    until the next item is requested. Checksums and the hash are computed while a piece is in the
    processor's cache.

    Args:
        array: the array.
        data: the chunk's elements within the array, any strides; padding is zeros.
        piece_bytes: largest item of an uncompressed chunk in bytes; ``None``: the whole chunk is
            one item, whose buffers stay valid.
    """

    def __init__(
        self, array: ArrayMeta, data: NDArray[Any], piece_bytes: int | None = None
    ) -> None:
        self._array, self._data, self._piece_bytes = array, data, piece_bytes
        self._stored = 0
        self._hasher = xxhash.xxh3_128()
        self._sums = Sums(block_bytes(array.chunk_bytes), hasher=self._hasher)

    @property
    def record(self) -> ChunkRecord:
        """The chunk's row of the manifest; complete after the iteration."""
        running = self._sums.running[: inner_blocks(self._array.chunk_bytes)]
        return ChunkRecord(self._stored, self._sums.crc, self._hasher.digest(), running)

    def __iter__(self) -> Iterator[list[bytes | memoryview]]:
        array, shape = self._array, self._array.grid.chunk_shape
        data, limit = self._data, self._piece_bytes
        if array.is_compressed or limit is None:
            data, limit = whole_chunk(data, shape), array.chunk_bytes
        for piece in pieces(data, shape, limit):
            self._sums.add(piece)
            item: list[bytes | memoryview] = [piece]
            if array.is_compressed:
                packed = _compress(array, data)
                item = [packed, CRC.pack(crc32c(packed, 0))]
            elif array.has_crc and self._sums.position == array.chunk_bytes:
                item.append(CRC.pack(self._sums.crc))
            self._stored += sum(map(len, item))
            yield item


def constant_record(array: ArrayMeta, index: tuple[int, ...]) -> ChunkRecord:
    """Return the record of a chunk of a constant array, of which nothing is stored."""
    assert array.constant is not None
    shape, chunk_shape = array.grid.box(index).shape, array.grid.chunk_shape
    return _constant_record(array.dtype, array.constant, chunk_shape, shape)


@lru_cache(maxsize=64)  # a model has many arrays of few layouts
def _constant_record(
    dtype: str, bits: bytes, chunk_shape: tuple[int, ...], shape: tuple[int, ...]
) -> ChunkRecord:
    array = ArrayMeta("", "", Grid(chunk_shape, chunk_shape), dtype, codecs=(), constant=bits)
    chunk = EncodedChunk(array, np.broadcast_to(constant_value(array), shape), PIECE_BYTES)
    deque(chunk, 0)
    return replace(chunk.record, stored_bytes=0)


def constant_value(array: ArrayMeta) -> NDArray[Any]:
    """Return the value of all elements of a constant array, without axes."""
    assert array.constant is not None
    return np.frombuffer(array.constant, dtypes.numpy_dtype(array.dtype)).reshape(())


def decompress(array: ArrayMeta, packed: memoryview) -> bytes:
    """Decompress a chunk.

    Raises:
        BadChunkError: the bytes cannot be decompressed to a chunk.
    """
    assert array.codecs is not None
    # Check the size before the allocation: a few bytes may claim to be gigabytes.
    if (size := _unpacked_bytes(array.codecs[0], bytes(packed[:18]))) != array.chunk_bytes:
        raise BadChunkError("crc", f"decompresses to {size} bytes, not {array.chunk_bytes}")
    try:
        chunk: bytes = _compressor(array.codecs).decode(packed)
    except (RuntimeError, ValueError, SystemError) as error:  # as numcodecs raises
        raise BadChunkError("crc", f"cannot be decompressed ({error})") from None
    return chunk


def _unpacked_bytes(codec: str, header: bytes) -> int:
    """Return the uncompressed size in bytes from the header of a compressed chunk (RFC 8878, "Frame
    Header"; c-blosc, "Blosc Header Format"); 0 if the header has no size."""
    if codec == "blosc":
        return int.from_bytes(header[4:8], "little")
    flags = header[4] if header.startswith(b"\x28\xb5\x2f\xfd") and len(header) > 4 else 0
    is_single = flags >> 5 & 1
    length = (is_single, 2, 4, 8)[flags >> 6]
    start = 6 - is_single + (0, 1, 2, 4)[flags & 3]
    return int.from_bytes(header[start : start + length], "little") + 256 * (length == 2)


def _compress(array: ArrayMeta, chunk: NDArray[Any]) -> bytes:
    if chunk.nbytes > MAX_COMPRESSED_BYTES:
        raise ArgumentError(
            f"a chunk of key {array.key!r} has {chunk.nbytes} bytes and compression takes at most "
            f"{MAX_COMPRESSED_BYTES}: save with a smaller target_chunk_bytes, or uncompressed"
        )
    # blosc takes the item size from the array.
    items = as_bytes(chunk).view(f"V{chunk.dtype.itemsize}")
    packed: bytes = _compressor(array.codecs).encode(items)
    return packed


@cache
def _compressor(codecs: tuple[str, ...]) -> Any:
    # Imported on first use: the import takes longer than most loads.
    from numcodecs import blosc, zstd  # type: ignore[import-untyped]

    settings = COMPRESSORS[codecs[0]]
    if codecs[0] == "zstd":
        return zstd.Zstd(**settings)
    # As in zarr-python: with threads, blosc orders blocks at random, so the bytes would differ.
    blosc.use_threads = False
    return blosc.Blosc(**{**settings, "shuffle": blosc.BITSHUFFLE})
