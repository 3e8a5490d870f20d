"""The bytes of a chunk's object: put together from an array, and taken apart as they arrive.

An array that lies in memory as its chunk does is sent from there, and what arrives goes straight to
its destination.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers.chunk_bytes import as_bytes, lies_as_chunk, span, view_in_chunk
from shardstore.storage.movers.chunks import ChunkPart, ChunkWrite
from shardstore.storage.movers.codecs import CRC_BYTES, EncodedChunk
from shardstore.storage.movers.verify import ChunkVerifier, Expected, Problem

__all__ = ["SMALL_BYTES", "ChunkSink", "encode", "held_bytes", "stored_bytes"]

STREAM_HELD_BYTES = 2 * 1024 * 1024
"""Memory of a request whose bytes go on as they arrive."""
SENT_HELD_BYTES = 128 * 1024
"""Memory of a request whose bytes are sent from where they are."""
SMALL_BYTES = 64 * 1024
"""Objects up to this size take no memory worth counting."""


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
        gathered = not lies_as_chunk(source, array.grid.chunk_shape)
    if gathered:
        held += stored
    if array.is_packed:
        # What the encoder makes, and at least as much again for what the allocator keeps of that.
        return max(held + stored, 2 * stored)
    return held or min(stored, SENT_HELD_BYTES)


def encode(item: ChunkWrite) -> tuple[list[bytes | memoryview], ChunkRecord]:
    """The parts of a chunk's object, in the source's own memory where they lie there, and the
    chunk's row of the manifest.

    Raises:
        ValueError: the source has another shape or data type than the chunk.
    """
    chunk = EncodedChunk(item.array, item.data())
    (parts,) = chunk
    return parts, chunk.record


class ChunkSink:
    """Takes the bytes of a chunk's object in order, verifies them and brings them to their
    destination.

    Args:
        part: what is asked for, and where it goes.
        expected: the bytes that are asked for.
    """

    def __init__(self, part: ChunkPart, expected: Expected) -> None:
        self._part = part
        self._expected = expected
        shape = part.array.grid.chunk_shape
        self._low, self._high = span(part.within, shape, part.out.dtype.itemsize)
        self._direct = part.out.flags.c_contiguous and part.out.nbytes == self._high - self._low
        self._target: NDArray[np.uint8] | None = None
        self._verifier = ChunkVerifier(part.array, expected)

    @property
    def is_whole(self) -> bool:
        """Whether the whole object is asked for."""
        expected = self._expected
        return (
            expected.sums is None and expected.last - expected.first == self._part.array.chunk_bytes
        )

    @property
    def request(self) -> tuple[int, int | None]:
        """First byte, and one past the last; ``None``: all bytes of the object."""
        return self._expected.first, None if self.is_whole else self._expected.last

    @property
    def size(self) -> int:
        """Number of bytes that are to arrive, uncompressed."""
        if self.is_whole:
            return stored_bytes(self._part.array)
        return self._expected.last - self._expected.first

    @property
    def held_bytes(self) -> int:
        """Memory that it takes, with the request, beside the destination."""
        if self._part.array.is_packed:
            return 2 * self.size
        streamed = min(self.size, STREAM_HELD_BYTES)
        return streamed if self._direct else streamed + self._high - self._low

    def take(self, position: int, piece: memoryview) -> None:
        """See :data:`shardstore.storage.stores.object_io.Taker`."""
        if position == 0:
            self._verifier = ChunkVerifier(self._part.array, self._expected)
        self._verifier.update(piece)
        if not self._part.array.is_packed:
            self._copy(self._expected.first + position, piece)

    def _copy(self, at: int, piece: memoryview) -> None:
        start, stop = max(at, self._low), min(at + len(piece), self._high)
        if start >= stop:
            return
        if self._target is None:
            out, size = self._part.out, self._high - self._low
            self._target = as_bytes(out) if self._direct else np.empty(size, np.uint8)
        part = np.frombuffer(piece[start - at : stop - at], np.uint8)
        self._target[start - self._low : stop - self._low] = part

    def finish(self) -> Problem | None:
        """All bytes have arrived: they are where they belong, or what is wrong with them."""
        problem = self._verifier.finish()
        chunk = self._verifier.chunk
        if chunk is not None:
            self._copy(0, memoryview(chunk))
        if problem is None and not self._direct and self._target is not None:
            out = self._part.out
            out[...] = view_in_chunk(self._target, out, self._part.array.grid.chunk_shape)
        self._target = None
        return problem
