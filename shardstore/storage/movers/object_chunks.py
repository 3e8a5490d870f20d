"""The bytes of a chunk's object: put together from an array, taken apart and verified as they come.

Nothing is copied that need not be: an array that lies in memory as its chunk does is sent from
there, and what comes goes straight to where it is wanted. No requests are made here.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash
from numcodecs.zstd import Zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import CRC32C, ZSTD_LEVEL, ArrayMeta
from shardstore.storage.format.grid import block_bytes, inner_blocks
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.chunk_bytes import Sums, pieces, span, sum_blocks, view_in_chunk
from shardstore.storage.movers.chunk_reader import CRC, CRC_BYTES
from shardstore.storage.movers.chunks import ChunkPart, ChunkWrite, as_bytes

__all__ = [
    "SMALL_BYTES",
    "ChunkSink",
    "SmallChunk",
    "Wanted",
    "encode",
    "held_bytes",
    "stored_bytes",
]

STREAM_HELD_BYTES = 2 * 1024 * 1024
"""What a request holds in memory whose bytes go on as they come."""
SENT_HELD_BYTES = 128 * 1024
"""What a request holds whose bytes are sent from where they are."""
SMALL_BYTES = 64 * 1024
"""Objects up to this size take no memory worth counting, and as little else as can be: where there
are many, what is done for each beside its request is what a load takes longer than plain gets."""

MAPPED_FROM_BYTES = 128 * 1024
"""Gathered chunks beyond this size lie in memory of their own."""


def stored_bytes(array: ArrayMeta) -> int:
    """Size of a chunk's object, if it is not compressed."""
    return array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)


def held_bytes(item: ChunkWrite) -> int:
    """Memory that putting a chunk takes, beside its source."""
    array, source = item.array, item.source
    stored = stored_bytes(array)
    held = 0
    if callable(source):
        box = array.grid.box(item.index)
        held = box.size * dtypes.itemsize(array.dtype)
        gathered = box.shape != array.grid.chunk_shape
    else:
        gathered = not _lies_as_chunk(source, array)
    if gathered:
        held += stored
    if array.is_packed:
        # What the encoder makes, and at least as much again for what the allocator keeps of that.
        return max(held + stored, 2 * stored)
    return held or min(stored, SENT_HELD_BYTES)


def _lies_as_chunk(data: NDArray[np.generic], array: ArrayMeta) -> bool:
    return data.shape == array.grid.chunk_shape and data.flags.c_contiguous


def encode(item: ChunkWrite) -> tuple[list[bytes | memoryview], ChunkRecord]:
    """The parts of a chunk's object, in the source's own memory where they lie there, and what the
    manifest says of it.

    Raises:
        ValueError: the source has another shape or data type than the chunk.
    """
    array, data = item.array, item.data()
    parts: list[bytes | memoryview]
    if _lies_as_chunk(data, array):
        whole = as_bytes(data).data
        crc, running = sum_blocks(whole, None, block_bytes(whole.nbytes), 0, 0)
        digest = xxhash.xxh3_128_digest(whole)
        parts = [whole] if whole.nbytes else []
    else:
        parts, crc, running, digest = _gathered(data, array)
    if array.is_packed:
        packed = Zstd(level=ZSTD_LEVEL).encode(parts[0] if parts else b"")
        parts = [packed, CRC.pack(crc32c(packed, 0))]
    elif array.has_crc:
        parts.append(CRC.pack(crc))
    size = sum(map(len, parts))
    return parts, ChunkRecord(size, crc, digest, running[: inner_blocks(array.chunk_bytes)])


def _memory(size: int) -> NDArray[np.uint8]:
    """Memory that goes back to the system with its last user: of what threads give back to the
    allocator, it keeps a part for each of them."""
    if size <= MAPPED_FROM_BYTES:
        return np.empty(size, np.uint8)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(mapped, np.uint8)


def _gathered(
    data: NDArray[np.generic], array: ArrayMeta
) -> tuple[list[bytes | memoryview], int, list[int], bytes]:
    """The parts of a chunk that does not lie in memory as in its object, with its checksum, that of
    its blocks, and its hash."""
    sums = Sums(block_bytes(array.chunk_bytes))
    hasher = xxhash.xxh3_128()
    whole = _memory(array.chunk_bytes)
    for piece in pieces(data, array.grid.chunk_shape, sums, into=whole):
        hasher.update(piece)
    return [whole.data] if whole.nbytes else [], sums.crc, sums.running, hasher.digest()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which bytes of a chunk's object are asked for, and how they are verified.

    Attributes:
        first: position of the first byte.
        last: one past the last byte of the chunk that is asked for.
        stored: size of the object if it is read whole, else ``None``.
        sums: running checksums of the manifest, at the ends of blocks, for a part.
        crc: of the whole chunk, by the root document or the manifest.
        packed: whether the object is compressed, and its size not known.
    """

    first: int
    last: int
    stored: int | None
    sums: NDArray[np.uint32] | None
    crc: int | None
    packed: bool = False

    @classmethod
    def of(cls, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> Wanted:
        """What a part of a chunk takes: the blocks that it touches, where the manifest has their
        checksums, else the whole."""
        array = part.array
        total = array.chunk_bytes
        low, high = span(part.within, array.grid.chunk_shape, part.out.dtype.itemsize)
        if array.is_packed:
            return cls(0, total, total, None, array.expected_crc(part.number), packed=True)
        if not array.has_crc:
            whole = (low, high) == (0, total)
            return cls(low, high, total if whole else None, None, None)
        block = block_bytes(total)
        first, last = low // block * block, min(-(-high // block) * block, total)
        crc = array.expected_crc(part.number)
        if (first, last) != (0, total) or crc is None:
            found = manifest()
            sums = None if found is None else found.running_of(array, part.index)
            if sums is not None and (first, last) != (0, total):
                return cls(first, last, None, sums, None)
            crc = int(sums[-1]) if sums is not None else crc
        return cls(0, total, stored_bytes(array), None, crc)

    @property
    def size(self) -> int:
        """How many bytes are to come."""
        return self.last - self.first if self.stored is None else self.stored

    @property
    def request(self) -> tuple[int, int | None]:
        """First byte, and one past the last; ``None``: all that there is."""
        return (0, None) if self.stored is not None else (self.first, self.last)


@dataclass(slots=True)
class SmallChunk:
    """A small chunk that is wanted whole, and goes to memory that lies as it does.

    Attributes:
        part: what is asked for, and where it goes.
        crc: of the chunk, by the root document.
    """

    part: ChunkPart
    crc: int

    @classmethod
    def of(cls, part: ChunkPart) -> SmallChunk | None:
        """A part as a small chunk; ``None``: it is none."""
        array = part.array
        if not part.is_whole or array.codecs != (CRC32C,) or array.chunk_bytes > SMALL_BYTES:
            return None
        crc = array.expected_crc(part.number)
        return None if crc is None or not part.out.flags.c_contiguous else cls(part, crc)

    def take(self, data: bytes) -> str | None:
        """Bring a whole object to the destination, or say what is wrong with it."""
        expected = self.part.array.chunk_bytes + CRC_BYTES
        if len(data) != expected:
            return f"has {len(data)} bytes, not {expected}"
        body = memoryview(data)[:-CRC_BYTES]
        crc, _ = sum_blocks(body, None, SMALL_BYTES, 0, 0)
        (stored,) = CRC.unpack_from(data, len(body))
        if crc != stored:
            return _mismatch(stored, crc)
        if crc != self.crc:
            return _foreign(self.crc, crc)
        as_bytes(self.part.out).data[:] = body
        return None


class ChunkSink:
    """Takes the bytes of a chunk's object in order, verifies them, brings them to their
    destination.

    Args:
        part: what is asked for, and where it goes.
        wanted: the bytes that are asked for.
    """

    def __init__(self, part: ChunkPart, wanted: Wanted) -> None:
        self._part = part
        self._wanted = wanted
        shape = part.array.grid.chunk_shape
        self._low, self._high = span(part.within, shape, part.out.dtype.itemsize)
        size = self._high - self._low
        self._direct = part.out.flags.c_contiguous and part.out.nbytes == size
        self._target: NDArray[np.uint8] | None = None
        self._packed: list[bytes] = []
        self._block = block_bytes(part.array.chunk_bytes)
        self._begin()

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, with the request, beside the destination."""
        if self._wanted.packed:
            return 2 * self._wanted.size
        streamed = min(self._wanted.size, STREAM_HELD_BYTES)
        return streamed if self._direct else streamed + self._high - self._low

    def _begin(self) -> None:
        self._packed.clear()
        self._tail = b""
        self._running: list[int] = []
        self._crc = 0
        number = self._wanted.first // self._block
        if self._wanted.sums is not None and number:
            self._crc = int(self._wanted.sums[number - 1])

    def take(self, position: int, piece: memoryview) -> None:
        """See :data:`shardstore.storage.stores.object_io.Taker`."""
        if position == 0:
            self._begin()
        if self._wanted.packed:
            self._packed.append(bytes(piece))
            return
        at = self._wanted.first + position
        body = piece[: max(0, self._part.array.chunk_bytes - at)]
        if len(body) < len(piece):
            self._tail += bytes(piece[len(body) : len(body) + CRC_BYTES])
        start, stop = max(at, self._low), min(at + len(body), self._high)
        if start < stop:
            if self._target is None:
                size = self._high - self._low
                out = self._part.out
                self._target = as_bytes(out) if self._direct else np.empty(size, np.uint8)
            part = np.frombuffer(body[start - at : stop - at], np.uint8)
            self._target[start - self._low : stop - self._low] = part
        if not self._part.array.has_crc:
            return
        if self._wanted.sums is None:
            self._crc = crc32c(body, self._crc)
        else:
            self._crc, running = sum_blocks(body, None, self._block, self._crc, at)
            self._running += running

    def finish(self, count: int) -> str | None:
        """All ``count`` bytes have come: they are where they belong, or what is wrong with them."""
        if self._wanted.packed:
            return self._unpack(b"".join(self._packed))
        problem = self._problem(count)
        if problem is None and not self._direct and self._target is not None:
            out = self._part.out
            out[...] = view_in_chunk(self._target, out, self._part.array.grid.chunk_shape)
        self._target = None
        return problem

    def _problem(self, count: int) -> str | None:
        wanted = self._wanted
        if count != wanted.size:
            if wanted.stored is not None:
                return f"has {count} bytes, not {wanted.stored}"
            return f"ends at byte {wanted.first + count} all of a sudden"
        if not self._part.array.has_crc:
            return None
        if wanted.sums is not None:
            if wanted.last % self._block:
                self._running.append(self._crc)
            number = wanted.first // self._block
            for found, expected in zip(self._running, wanted.sums[number:], strict=False):
                if found != int(expected):
                    return _mismatch(int(expected), found)
            return None
        (stored,) = CRC.unpack(self._tail)
        if self._crc != stored:
            return _mismatch(stored, self._crc)
        if wanted.crc is not None and self._crc != wanted.crc:
            return _foreign(wanted.crc, self._crc)
        return None

    def _unpack(self, data: bytes) -> str | None:
        """Bring the chunk behind a compressed object to its destination."""
        packed = memoryview(data)[:-CRC_BYTES]
        if not len(packed):
            return f"has {len(data)} bytes, fewer than any chunk"
        (stored,) = CRC.unpack(data[-CRC_BYTES:])
        crc = crc32c(packed, 0)
        if crc != stored:
            return _mismatch(stored, crc)
        try:
            chunk: bytes = Zstd().decode(packed)
        except RuntimeError as error:
            return f"can not be decompressed ({error})"
        if len(chunk) != self._part.array.chunk_bytes:
            return f"decompresses to {len(chunk)} bytes, not {self._part.array.chunk_bytes}"
        if self._wanted.crc is not None and crc32c(chunk, 0) != self._wanted.crc:
            return _foreign(self._wanted.crc, crc32c(chunk, 0))
        out = self._part.out
        raw = np.frombuffer(chunk, np.uint8)[self._low : self._high]
        out[...] = view_in_chunk(raw, out, self._part.array.grid.chunk_shape)
        return None


def _foreign(expected: int, found: int) -> str:
    return (
        "is whole, but it is not the chunk that was committed, a late writer of another save "
        f"changed it (crc32c {expected:#010x} expected, {found:#010x} found)"
    )


def _mismatch(expected: int, found: int) -> str:
    return f"fails its checksum (crc32c {expected:#010x} expected, {found:#010x} found)"
