"""Reads one chunk file in order and verifies what it reads, whichever part of it is wanted.

Every byte that is read is checksummed while it is still in the processor's cache: against the
running checksums of the manifest where those are given, else, over the whole chunk, against the
crc32c stored behind it. It knows one open file; not where parts come from.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import ChunkCorruptError
from shardstore.storage.format.grid import block_bytes, inner_blocks
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.chunk_bytes import (
    SPARE_BYTES,
    scratch,
    slabs,
    span,
    spare,
    sum_blocks,
    view_in_chunk,
)
from shardstore.storage.movers.chunks import ChunkPart, as_bytes

__all__ = ["COMPILED", "CRC", "CRC_BYTES", "checksum_whole_file", "read_part", "read_whole_files"]

try:
    from shardstore.storage.movers import _copy_crc
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

_BYTE = np.dtype("u1")


def read_whole_files(
    paths: list[str], outs: list[NDArray[Any]], expected: list[int | None]
) -> list[int]:
    """Fill each array from a file of just its bytes and their crc32c (four bytes, little-endian).

    Args:
        paths: of chunk files.
        outs: any data types and shapes.
        expected: the checksum that a file has to have, where one is known.

    Returns:
        Positions of those that have to be read in another way, where what is wrong with them shows:
        the file is not there, has another size, is not in memory, its checksum is wrong, or the
        array's elements do not lie one behind the other along its last axis. Such an array may have
        been written to.
    """
    if not COMPILED:
        return list(range(len(paths)))
    views: list[NDArray[Any]] = []
    gaps = []
    for i, out in enumerate(outs):
        strides = out.strides
        if strides and strides[-1] == out.itemsize:
            views.append(out.view(_BYTE))
        elif out.flags.c_contiguous:  # also of one element, whatever its strides
            views.append(out.reshape(-1).view(_BYTE))
        else:
            gaps.append(i)
    if not gaps:
        return _copy_crc.read_chunks(paths, views, expected)
    others = sorted(set(range(len(paths))).difference(gaps))
    left = _copy_crc.read_chunks([paths[i] for i in others], views, [expected[i] for i in others])
    return sorted([*gaps, *(others[i] for i in left)])


def checksum_whole_file(path: str, size: int, tail: bytearray) -> int | None:
    """The crc32c of the first ``size`` bytes of a file that has just so many and the tail's.

    Args:
        path: of a chunk file.
        size: bytes before the tail.
        tail: takes what follows.

    Returns:
        ``None`` as for :func:`read_whole_files`.
    """
    return _copy_crc.checksum_file(path, size, tail) if COMPILED else None


CRC_BYTES = 4
CRC = struct.Struct("<I")
READ_BYTES = 2 * 1024 * 1024
"""A single read, checksummed while it is still in the processor's cache."""

Corrupt = Callable[[str], ChunkCorruptError]


def read_part(
    fd: int, part: ChunkPart, manifest: Callable[[], Manifest | None], corrupt: Corrupt
) -> int:
    """Read a part of a chunk into its destination.

    Args:
        fd: the chunk's file, of the right size.
        part: what is wanted, and where it goes.
        manifest: asked only where a part, and not the whole, of a large chunk is wanted.
        corrupt: makes the error out of what is wrong.

    Returns:
        Number of bytes read.

    Raises:
        ChunkCorruptError: a checksum does not fit. The destination may have been written to.
    """
    array, out = part.array, part.out
    shape, total = array.grid.chunk_shape, array.chunk_bytes
    if array.has_crc and out.nbytes == total and out.flags.c_contiguous:
        done = _read_whole(fd, as_bytes(out), array.expected_crc(part.number), corrupt)
        if done:
            return done
    low, high = span(part.within, shape, out.dtype.itemsize)
    sums = _sums(part, high - low, manifest) if array.has_crc else None
    if sums is not None:
        block = block_bytes(total)
        first, last = low // block * block, min(-(-high // block) * block, total)
    elif array.has_crc:
        first, last = 0, total
    else:
        first, last = low, high
    file = _Verified(
        fd,
        corrupt,
        total,
        first,
        sums,
        check=array.has_crc,
        expected=array.expected_crc(part.number),
    )
    if out.flags.c_contiguous and out.nbytes == high - low:
        file.read(low, as_bytes(out).data)
    else:
        for start, stop, target in slabs(out, part.within, shape):
            buffer = scratch(stop - start)
            file.read(start, buffer.data)
            target[...] = view_in_chunk(buffer, target, shape)
    return file.finish(last)


def _read_whole(fd: int, out: NDArray[np.uint8], expected: int | None, corrupt: Corrupt) -> int:
    """A whole chunk that lies in memory as it lies in the file: most of what a load does.

    Args:
        expected: the checksum that the commit has of this chunk, if it has one.

    Returns:
        Number of bytes read; 0 where a read came up short, for the caller to go step by step.
    """
    total = len(out)
    tail = bytearray(CRC_BYTES)
    crc = _read_ahead(fd, out.data, tail)
    if crc is None:
        return 0
    (stored,) = CRC.unpack(tail)
    if crc != stored:
        raise corrupt(_mismatch(stored, crc))
    if expected is not None and crc != expected:
        raise corrupt(_foreign(expected, crc))
    return total + CRC_BYTES


def _read_ahead(fd: int, out: memoryview, tail: bytearray) -> int | None:
    """Read a whole chunk by ordinary reads; its checksum, ``None`` where one came up short."""
    total = len(out)
    crc = 0
    for start in range(0, total, READ_BYTES):
        piece = out[start : start + READ_BYTES]
        size = len(piece)
        if start + size == total:
            if os.preadv(fd, (piece, tail), start) != size + CRC_BYTES:
                return None
        elif os.preadv(fd, (piece,), start) != size:
            return None
        crc = crc32c(piece, crc)
    return crc


def _foreign(expected: int, found: int) -> str:
    return (
        f"is whole, but it is not the chunk that was committed (crc32c {expected:#010x} expected, "
        f"{found:#010x} found): it was exchanged or written over"
    )


def _mismatch(expected: int, found: int) -> str:
    return f"fails its checksum (crc32c {expected:#010x} expected, {found:#010x} found)"


def _sums(
    part: ChunkPart, wanted: int, manifest: Callable[[], Manifest | None]
) -> list[int] | None:
    """The running checksums at each block's end, ``None`` where the chunk is to be read whole."""
    array = part.array
    total = array.chunk_bytes
    if not inner_blocks(total):
        return None
    covers = part.within.shape == array.grid.box(part.index).shape
    if covers and wanted * 2 >= total:
        # All of it but padding: the checksum behind the chunk does, and no manifest is needed.
        return None
    found = manifest()
    sums: NDArray[np.uint32] | None = None if found is None else found.running_of(array, part.index)
    return None if sums is None else [int(n) for n in sums]


class _Verified:
    """A chunk file read from a block's start onwards, gaps included where checksums need them."""

    def __init__(
        self,
        fd: int,
        corrupt: Corrupt,
        total: int,
        first: int,
        sums: Sequence[int] | None,
        *,
        check: bool,
        expected: int | None,
    ) -> None:
        self._fd = fd
        self._corrupt = corrupt
        self._total = total
        self._sums = sums
        self._check = check
        self._position = first
        self._size = 0
        self._block = block_bytes(total)
        self._crc = sums[first // self._block - 1] if sums is not None and first else 0
        self._tail = bytearray(CRC_BYTES) if check and sums is None else None
        self._expected = expected

    def read(self, offset: int, view: memoryview) -> None:
        """Read the bytes from ``offset`` on, which is not before what was read last."""
        self._skip_to(offset)
        for start in range(0, len(view), READ_BYTES):
            self._step(view[start : start + READ_BYTES])

    def finish(self, last: int) -> int:
        """Go on to where the checksum can be compared. Returns the number of bytes read."""
        self._skip_to(last)
        if self._tail is not None:
            (stored,) = CRC.unpack(self._tail)
            self._compare(stored, self._crc)
            if self._expected is not None and self._crc != self._expected:
                raise self._corrupt(_foreign(self._expected, self._crc))
        return self._size

    def _skip_to(self, offset: int) -> None:
        if not self._check:
            self._position = offset
        while self._position < offset:
            self._step(spare(min(SPARE_BYTES, offset - self._position)))

    def _step(self, view: memoryview) -> None:
        start, stop = self._position, self._position + len(view)
        into: list[Any] = [view]
        if self._tail is not None and stop == self._total:
            into.append(self._tail)
        self._read_all(into, start)
        self._position = stop
        if self._sums is not None:
            first = start // self._block
            self._crc, found = sum_blocks(view, None, self._block, self._crc, start)
            for i, crc in enumerate(found):
                self._compare(self._sums[first + i], crc)
            if stop == self._total:
                self._compare(self._sums[-1], self._crc)
        elif self._check:
            self._crc = crc32c(view, self._crc)

    def _compare(self, expected: int, found: int) -> None:
        if found != expected:
            raise self._corrupt(_mismatch(expected, found))

    def _read_all(self, into: list[Any], offset: int) -> None:
        size = sum(len(piece) for piece in into)
        got = os.preadv(self._fd, into, offset)
        while got < size:
            more = os.preadv(self._fd, _rest(into, got), offset + got)
            if more == 0:
                raise self._corrupt(f"ends at byte {offset + got} all of a sudden")
            got += more
        self._size += size


def _rest(into: Sequence[Any], skip: int) -> list[memoryview]:
    """What is left of buffers after their first ``skip`` bytes."""
    rest = []
    for piece in into:
        view = memoryview(piece)
        if skip < len(view):
            rest.append(view[skip:])
        skip = max(0, skip - len(view))
    return rest
