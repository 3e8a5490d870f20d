"""Verifies one chunk: its size, its own crc32c, and the checksums of the commit.

Every read of a chunk in steps, from a file or an object, for a load or a verification, goes through
:class:`ChunkVerifier`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import xxhash

from shardstore.errors import ChunkCorruptError, ChunkMissingError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import block_bytes
from shardstore.storage.movers.chunk_bytes import IO_BYTES, buffers, span, view_in_chunk
from shardstore.storage.movers.chunks import (
    CRC,
    CRC_BYTES,
    BadChunkError,
    ChunkPart,
    GetManifest,
    decompress,
    most_stored_bytes,
    stored_bytes,
)
from shardstore.storage.runtime.checksums import Sums, crc32c

_NOTHING = memoryview(bytearray())


@dataclass(slots=True)
class ChunkVerifier:
    """The bytes that a read of a chunk needs. Verifies them as they arrive.

    Attributes:
        array: the chunk's array.
        number: position of the chunk in C order over the grid.
        first: first byte of the range to read, in the uncompressed chunk.
        last: one past the last byte of the range.
        sums: the manifest's running checksums, one per block, from the block that starts at
            ``first``. They verify a part of the chunk, which starts and ends at block boundaries.
        before: running checksum of the bytes before that part.
        crc: the commit's crc32c of the whole chunk, if known.
        digest: the manifest's hash of the whole chunk, if the read compares it.
        count: number of bytes that have arrived.
        chunk: a compressed chunk's content, after :meth:`finish`.
    """

    array: ArrayMeta
    number: int
    first: int
    last: int
    sums: Sequence[int] = ()
    before: int = 0
    crc: int | None = None
    digest: bytes | None = None
    count: int = field(default=0, init=False)
    chunk: bytes | None = field(default=None, init=False)
    _rest: bytearray = field(default_factory=bytearray, init=False)
    """The stored crc32c; all bytes of a compressed chunk."""
    _found: Sums = field(init=False)

    def __post_init__(self) -> None:
        size = self.array.chunk_bytes
        hasher = None if self.digest is None else xxhash.xxh3_128()
        block = block_bytes(size) if self.sums else size
        self._found = Sums(block, self.before, self.first, hasher=hasher)

    @classmethod
    def of(cls, part: ChunkPart, manifest: GetManifest) -> ChunkVerifier:
        """Return the verifier of the bytes to read for ``part``: the blocks that it overlaps if the
        manifest has their checksums, else the whole chunk. Call ``manifest`` only if the result
        needs it."""
        array, number = part.array, part.number
        total, block = array.chunk_bytes, block_bytes(array.chunk_bytes)
        low, high = span(part.within, array.grid.chunk_shape, part.out.dtype.itemsize)
        if array.is_plain and not array.has_crc:
            return cls(array, number, low, high)
        first, last = low // block * block, min(-(-high // block) * block, total)
        # If the part is all but the padding, read the padding too: the chunk's own checksum
        # then suffices.
        is_all = part.within.shape == array.grid.box(part.index).shape
        is_whole = array.is_compressed or last - first == total or (is_all and 2 * high >= total)
        crc = array.expected_crc(number)
        found = None if is_whole and crc is not None else manifest()
        rows = None if found is None else found.rows(array)
        if rows is None:
            return cls(array, number, 0, total, crc=crc)
        if is_whole:
            return cls(array, number, 0, total, crc=int(rows.crc[number]))
        sums, begin = [*rows.running[number].tolist(), int(rows.crc[number])], first // block
        return cls(array, number, first, last, sums[begin:], sums[begin - 1] if begin else 0)

    def update(self, data: memoryview) -> None:
        """Take the next stored bytes of the chunk."""
        end = 0
        if not self.array.is_compressed:
            end = max(0, self.last - self.first - self.count)
            if self.array.has_crc or self.crc is not None:
                self._found.add(data[:end])
        self._rest += data[end:]
        self.count += len(data)

    def finish(self) -> None:
        """Compare the checksums after the last byte.

        Raises:
            BadChunkError: the size or a checksum differs.
        """
        array, has_own = self.array, self.array.has_crc and not self.sums
        size = self.last - self.first + (CRC_BYTES if has_own else 0)
        if array.is_compressed or self.count != size:
            require_stored_size(array, self.number, self.first + self.count)
            if not array.is_compressed:
                raise BadChunkError("size", f"came as {self.count} bytes where {size} were read")
        body = memoryview(self._rest)[:-CRC_BYTES]
        if has_own:
            (own,) = CRC.unpack(self._rest[-CRC_BYTES:])
            _require_equal(own, crc32c(body, 0) if array.is_compressed else self._found.crc)
        if array.is_compressed:
            self.chunk = decompress(array, body)
            self._found.add(memoryview(self.chunk))
        for wanted, crc in zip(self.sums, self._found.ends(), strict=False):
            _require_equal(wanted, crc)
        if self.crc not in (None, self._found.crc):
            how = f"crc32c {self.crc:#010x} expected, {self._found.crc:#010x} found"
        elif self._found.hasher is not None and self.digest != self._found.hasher.digest():
            how = "its xxh3-128 hash differs"
        else:
            return
        raise BadChunkError(
            "manifest",
            f"is intact but not the chunk that was committed ({how}): it was replaced, or "
            "overwritten by a late writer of another save",
        )

    def targets(self, part: ChunkPart) -> Iterator[memoryview]:
        """Yield memory for the bytes of an uncompressed chunk to read, in order. The caller fills
        each view before it requests the next one."""
        shape = self.array.grid.chunk_shape
        for buffer, target, _ in buffers(part.out, part.within, shape, self.first, self.last):
            for start in range(0, len(buffer), IO_BYTES):
                yield buffer[start : start + IO_BYTES].data
            if target is not None:
                target[...] = view_in_chunk(buffer, target, shape)
        if self.array.has_crc and not self.sums:
            yield memoryview(bytearray(CRC_BYTES))

    def receive(self, part: ChunkPart, pieces: Iterator[bytes | memoryview]) -> None:
        """Verify the stored bytes of the chunk, and copy the elements of a part; those of a large
        uncompressed chunk before they are verified.

        Args:
            part: receives its elements.
            pieces: the bytes in order, up to :data:`IO_BYTES` of an uncompressed chunk in one; none
                if there is no chunk.

        Raises:
            BadChunkError: the chunk is missing, or its size or a checksum differs.
        """
        piece = next(pieces, None)
        if piece is None:
            raise BadChunkError("missing", "is missing")
        if self.array.is_compressed or self.last - self.first <= IO_BYTES:
            for data in chain([piece], pieces):
                self.update(memoryview(data))
            self.finish()
            self.scatter(part, self.chunk or piece)
            return
        targets, target = self.targets(part), _NOTHING
        while piece is not None:
            left = memoryview(piece)
            while left:
                # Without a target the chunk is too long, which is found at its end.
                target = target or next(targets, _NOTHING)
                count = min(len(target) or len(left), len(left))
                self.update(left[:count])
                target[:count] = left[: len(target)]
                left, target = left[count:], target[count:]
            del piece, left  # before the next one is taken
            piece = next(pieces, None)
        next(targets, None)  # scatters the last buffer
        self.finish()

    def scatter(self, part: ChunkPart, data: bytes | memoryview) -> None:
        """Copy the elements of a part from the bytes ``first:last`` of the uncompressed chunk."""
        shape, out = part.array.grid.chunk_shape, part.out
        low, high = span(part.within, shape, out.dtype.itemsize)
        wanted = np.frombuffer(data, np.uint8)[low - self.first : high - self.first]
        out[...] = view_in_chunk(wanted, out, shape)


def _require_equal(expected: int, found: int) -> None:
    if expected != found:
        text = f"fails its checksum (crc32c {expected:#010x} expected, {found:#010x} found)"
        raise BadChunkError("crc", text)


def require_stored_size(array: ArrayMeta, number: int, found: int) -> None:
    """Raise :class:`BadChunkError` if a chunk's file or object has a wrong size. ``number`` is the
    position of the chunk in C order over the grid."""
    stored, most = stored_bytes(array, number), most_stored_bytes(array, number)
    if stored is None and not CRC_BYTES < found <= most:
        raise BadChunkError("size", f"has {found} bytes, not {CRC_BYTES + 1} to {most}")
    if stored not in (None, found):
        raise BadChunkError("size", f"has {found} bytes, not {stored}")


def chunk_error(
    array: ArrayMeta, index: Sequence[int], url: str, problem: BadChunkError, manifest: GetManifest
) -> ChunkMissingError | ChunkCorruptError:
    """Return the error for a chunk that cannot be read. The error names the rank that wrote the
    chunk, if the manifest has it."""
    rank = None
    with suppress(OSError):  # an unreadable manifest matters less than the damaged chunk
        found = manifest()
        rank = None if found is None else found.writer(array, index)
    by = "" if rank is None else f" (written by rank {rank})"
    kind = ChunkMissingError if problem.kind == "missing" else ChunkCorruptError
    return kind(
        f"chunk {tuple(index)} of key {array.key!r} {problem.text}: {url}{by}; the checkpoint is "
        "damaged, load an earlier one",
        key=array.key,
        chunk=tuple(index),
        rank=rank,
        url=url,
    )
