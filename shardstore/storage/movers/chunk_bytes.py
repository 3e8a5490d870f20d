"""The bytes of a chunk in memory: its parts in order, where a box of it lies.

Sources and destinations are NumPy arrays of any strides; what does not lie in memory as it lies in
the chunk goes through a little scratch memory of the thread. Nothing here knows files or stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.storage.format.grid import Box
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.chunks import as_bytes

__all__ = [
    "COMPILED",
    "SCRATCH_BYTES",
    "SPARE_BYTES",
    "Sums",
    "free_scratch",
    "pieces",
    "scratch",
    "slabs",
    "span",
    "spare",
    "sum_blocks",
    "view_in_chunk",
]

try:
    from shardstore.storage.movers import _copy_crc
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True


@dataclass(slots=True)
class Sums:
    """What is known of a chunk's bytes up to some position.

    Attributes:
        block: bytes of the blocks whose ends are noted.
        crc: crc32c of all bytes so far.
        position: how many they are.
        running: values of ``crc`` at the ends of blocks.
    """

    block: int
    crc: int = 0
    position: int = 0
    running: list[int] = field(default_factory=list)

    def add(self, source: memoryview | NDArray[np.uint8], to: memoryview | None = None) -> None:
        """Take further bytes in; they are copied to ``to`` on the way, which they may have to be
        where ``source`` has gaps between its rows."""
        self.crc, found = sum_blocks(source, to, self.block, self.crc, self.position)
        self.position += source.nbytes
        self.running += found


def sum_blocks(
    source: memoryview | bytes | NDArray[np.uint8],
    target: memoryview | None,
    block: int,
    crc: int,
    position: int,
) -> tuple[int, list[int]]:
    """Carry a crc32c over bytes, and note it wherever a block ends.

    Args:
        source: bytes; with a target, an array of them whose last axis has no gaps.
        target: as many bytes, which those of ``source`` are copied to, in C order; ``None``:
            ``source`` has no gaps and stays where it is.
        block: bytes of a block.
        crc: of what came before.
        position: of the first byte, in what is cut into blocks.

    Returns:
        The checksum at the end, and its values at the ends of blocks, one at the very end included.
    """
    data: Any = source
    if COMPILED:
        return _copy_crc.sum_blocks(data, target, block, crc, position)
    if target is not None:
        np.frombuffer(target, np.uint8).reshape(data.shape)[...] = data
        data = target
    view = memoryview(data)
    running = []
    start, size = 0, view.nbytes
    while start < size:
        step = min(block - (position + start) % block, size - start)
        crc = crc32c(view[start : start + step], crc)
        start += step
        if (position + start) % block == 0:
            running.append(crc)
    return crc, running


SCRATCH_BYTES = 4 * 1024 * 1024
"""Rows of a strided or padded chunk are gathered, or scattered, in slabs of at most this size."""
SPARE_BYTES = 1024 * 1024
"""Bytes that are read only to be checksummed go through pieces of this size."""

_local = threading.local()


def scratch(size: int) -> NDArray[np.uint8]:
    """The first ``size`` bytes, at most :data:`SCRATCH_BYTES`, of this thread's scratch memory.

    One buffer a thread: what it holds is valid until the next call on the same thread. Kept until
    :func:`free_scratch`, because fresh pages cost more than the copy.
    """
    buffer: NDArray[np.uint8] | None = getattr(_local, "scratch", None)
    if buffer is None:
        buffer = _local.scratch = np.empty(SCRATCH_BYTES, np.uint8)
    assert size <= len(buffer)
    return buffer[:size]


def spare(size: int) -> memoryview:
    """Memory for ``size`` bytes, at most :data:`SPARE_BYTES`, that nobody wants."""
    buffer: NDArray[np.uint8] | None = getattr(_local, "spare", None)
    if buffer is None:
        buffer = _local.spare = np.empty(SPARE_BYTES, np.uint8)
    return buffer[:size].data


def free_scratch() -> None:
    """Give this thread's scratch memory back; threads that end do so themselves."""
    _local.__dict__.clear()


def pieces(
    source: NDArray[Any],
    chunk_shape: tuple[int, ...],
    sums: Sums | None = None,
    most_bytes: int | None = None,
    into: NDArray[np.uint8] | None = None,
) -> Iterator[memoryview]:
    """The bytes of a chunk in order, zeros where ``source`` does not reach to the chunk's edge.

    The source's own memory where it lies right, else gathered: in scratch memory, where a piece is
    valid only until the next one is asked for, or one after the other in memory that is given.

    Args:
        source: the chunk, or what there is of it.
        chunk_shape: of the whole chunk.
        sums: takes each piece in before it is handed out.
        most_bytes: of a piece; default: no limit where nothing is gathered.
        into: for the chunk, if it is gathered; default: scratch memory.
    """
    if source.shape == chunk_shape and source.flags.c_contiguous:
        whole = as_bytes(source).data
        step = most_bytes or len(whole)
        for start in range(0, len(whole), step) if whole else ():
            piece = whole[start : start + step]
            if sums is not None:
                sums.add(piece)
            yield piece
        return
    yield from _gathered(source, chunk_shape, sums, scratch if into is None else _in_order(into))


def _in_order(memory: NDArray[np.uint8]) -> Callable[[int], NDArray[np.uint8]]:
    """Hands out memory from its beginning on."""
    taken = 0

    def take(size: int) -> NDArray[np.uint8]:
        nonlocal taken
        taken += size
        return memory[taken - size : taken]

    return take


def _gathered(
    source: NDArray[Any],
    chunk_shape: tuple[int, ...],
    sums: Sums | None,
    take: Callable[[int], NDArray[np.uint8]],
) -> Iterator[memoryview]:
    row_bytes = source.dtype.itemsize
    for edge in chunk_shape[1:]:
        row_bytes *= edge
    if row_bytes > SCRATCH_BYTES:
        padding = np.zeros((0,) * (len(chunk_shape) - 1), source.dtype)
        for i in range(chunk_shape[0]):
            part = source[i] if i < source.shape[0] else padding
            yield from _gathered(part, chunk_shape[1:], sums, take)
        return
    rows = SCRATCH_BYTES // row_bytes
    for start in range(0, chunk_shape[0], rows):
        count = min(rows, chunk_shape[0] - start)
        buffer = take(count * row_bytes)
        part = source[start : start + count]
        if sums is not None and part.shape == (count, *chunk_shape[1:]) and _rows(part):
            sums.add(part.view(np.uint8), buffer.data)
            yield buffer.data
            continue
        block = buffer.view(source.dtype).reshape(count, *chunk_shape[1:])
        if part.shape != block.shape:
            buffer[:] = 0
        block[tuple(slice(n) for n in part.shape)] = part
        if sums is not None:
            sums.add(buffer.data)
        yield buffer.data


def _rows(part: NDArray[Any]) -> bool:
    """Whether its bytes lie in rows without gaps within."""
    return part.ndim > 0 and part.size > 0 and part.strides[-1] == part.itemsize


def span(box: Box, chunk_shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First byte, and one past the last byte, of a box within a chunk."""
    first = last = 0
    for o, s, edge in zip(box.offset, box.shape, chunk_shape, strict=True):
        first = first * edge + o
        last = last * edge + o + s - 1
    return first * itemsize, (last + 1) * itemsize


def slabs(
    out: NDArray[Any], box: Box, chunk_shape: tuple[int, ...], start: int = 0
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Cut a box of a chunk into slabs whose bytes span at most :data:`SCRATCH_BYTES`.

    Args:
        out: where the box goes, of its shape.
        box: the box, counted from the chunk's corner.
        chunk_shape: edges of the chunk.
        start: first byte of the chunk.

    Yields:
        First byte, one past the last byte, and where the elements between go, in order of the
        bytes; no two slabs overlap. The slab's destination has as many axes as the innermost axes
        of the chunk that it lies in.
    """
    low, high = span(box, chunk_shape, out.dtype.itemsize)
    if high - low <= SCRATCH_BYTES:
        yield start + low, start + high, out
        return
    row_bytes = out.dtype.itemsize
    for edge in chunk_shape[1:]:
        row_bytes *= edge
    inner = Box(box.offset[1:], box.shape[1:])
    inner_low, inner_high = span(inner, chunk_shape[1:], out.dtype.itemsize)
    begin = start + box.offset[0] * row_bytes
    if inner_high - inner_low > SCRATCH_BYTES:
        for i in range(box.shape[0]):
            yield from slabs(out[i], inner, chunk_shape[1:], begin + i * row_bytes)
        return
    rows = 1 + (SCRATCH_BYTES - (inner_high - inner_low)) // row_bytes
    for i in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - i)
        first = begin + i * row_bytes + inner_low
        yield first, first + (count - 1) * row_bytes + inner_high - inner_low, out[i : i + count]


def view_in_chunk(
    buffer: NDArray[np.uint8], like: NDArray[Any], chunk_shape: tuple[int, ...]
) -> NDArray[Any]:
    """The elements of a slab whose bytes, from its first element on, lie in ``buffer``.

    Args:
        buffer: the bytes, rows as far apart as in the chunk.
        like: an array of the slab's shape and data type.
        chunk_shape: edges of the chunk.
    """
    strides, step = [], like.dtype.itemsize
    for edge in reversed(chunk_shape[len(chunk_shape) - like.ndim :]):
        strides.append(step)
        step *= edge
    return np.ndarray(like.shape, like.dtype, buffer, strides=tuple(reversed(strides)))
