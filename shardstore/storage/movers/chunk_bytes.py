"""Gathers the bytes of a chunk from arrays of any strides, and scatters them to such arrays.

Data whose memory layout differs from the chunk's goes through scratch memory of the thread.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.storage.format.grid import Box
from shardstore.storage.runtime.parallel import kept_memory

SCRATCH_BYTES = 4 * 1024 * 1024
"""Rows of a strided or padded chunk are gathered, or scattered, in slabs of at most this size."""
IO_BYTES = 2 * 1024 * 1024
"""Size of a single read or write: large enough to make the cost of system calls negligible, small
enough to stay mostly in the processor's cache during checksum and copy."""
MAPPED_FROM_BYTES = 128 * 1024


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the memory of a C-contiguous array as one-dimensional uint8, without a copy."""
    return array.reshape(-1).view(np.uint8)


def scratch(size: int) -> NDArray[np.uint8]:
    """Return the first ``size`` bytes of this thread's scratch memory; ``size`` is at most
    :data:`SCRATCH_BYTES`.

    The content is valid until the next call on the same thread. The memory is kept, because fresh
    pages cost more than the copy.
    """
    buffer: NDArray[np.uint8] | None = getattr(kept_memory, "scratch", None)
    if buffer is None:
        buffer = kept_memory.scratch = np.empty(SCRATCH_BYTES, np.uint8)
    assert size <= len(buffer)
    return buffer[:size]


def lies_as_chunk(data: NDArray[Any], chunk_shape: tuple[int, ...]) -> bool:
    """Return whether an array's memory holds exactly the bytes of its chunk."""
    return data.shape == chunk_shape and data.flags.c_contiguous


def whole_chunk(data: NDArray[Any], chunk_shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a chunk as contiguous memory, padded with zeros. Return ``data`` itself, without a
    copy, if it has this layout already."""
    if lies_as_chunk(data, chunk_shape):
        return data
    size = math.prod(chunk_shape) * data.dtype.itemsize
    # A freed mapping returns to the system; the allocator would keep memory for each thread.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size, private) if size >= MAPPED_FROM_BYTES else bytearray(size)
    chunk: NDArray[Any] = np.ndarray(chunk_shape, data.dtype, memory)
    chunk[tuple(map(slice, data.shape))] = data
    return chunk


def pieces(
    source: NDArray[Any], chunk_shape: tuple[int, ...], most_bytes: int = SCRATCH_BYTES
) -> Iterator[memoryview]:
    """Yield the bytes of a chunk in order. Pad with zeros if ``source`` is smaller than the chunk.

    Args:
        source: the chunk, or the part of it within the array.
        chunk_shape: shape of the whole chunk.
        most_bytes: largest size of a piece, if the source's memory has the layout of the chunk.
            Otherwise a piece is scratch memory, valid until the next piece is requested.
    """
    if lies_as_chunk(source, chunk_shape):
        whole = as_bytes(source).data
        for start in range(0, len(whole), most_bytes):
            yield whole[start : start + most_bytes]
        return
    total = math.prod(chunk_shape) * source.dtype.itemsize
    box = Box((0,) * source.ndim, source.shape)
    for buffer, part, is_gap in buffers(source, box, chunk_shape, 0, total):
        if is_gap or (part is not None and part.nbytes < len(buffer)):
            buffer[:] = 0
        if part is not None:
            view_in_chunk(buffer, part, chunk_shape)[...] = part
        yield buffer.data


def buffers(
    data: NDArray[Any], box: Box, chunk_shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[NDArray[np.uint8], NDArray[Any] | None, bool]]:
    """Yield memory for the bytes ``first:last`` of a chunk in order, at most :data:`SCRATCH_BYTES`
    at a time: the memory of ``data`` where it has the layout of the chunk, else scratch memory.

    Args:
        data: an array of the box's shape.
        box: a box whose bytes are in the range, relative to the chunk's corner.
        chunk_shape: shape of the chunk.
        first: the first byte.
        last: one past the last byte.

    Yields:
        The memory; the part of ``data`` whose elements belong in it, ``None`` if it is their own
        memory; and whether no element of the box is in it.
    """
    position = first
    for start, stop, part in chain(slabs(data, box, chunk_shape), [(last, last, None)]):
        for low in range(position, start, SCRATCH_BYTES):
            yield scratch(min(SCRATCH_BYTES, start - low)), None, True
        if part is not None and part.flags.c_contiguous and part.nbytes == stop - start:
            yield as_bytes(part), None, False
        elif part is not None:
            yield scratch(stop - start), part, False
        position = stop


def span(box: Box, chunk_shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the first byte, and one past the last byte, of a box within a chunk."""
    first = last = 0
    for o, s, edge in zip(box.offset, box.shape, chunk_shape, strict=True):
        first = first * edge + o
        last = last * edge + o + s - 1
    return first * itemsize, (last + 1) * itemsize


def slabs(
    out: NDArray[Any],
    box: Box,
    chunk_shape: tuple[int, ...],
    start: int = 0,
    gap_bytes: int = SCRATCH_BYTES,
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """Cut a box of a chunk into slabs whose bytes span at most :data:`SCRATCH_BYTES`.

    Args:
        out: an array of the box's shape.
        box: the box, relative to the chunk's corner.
        chunk_shape: shape of the chunk.
        start: byte offset of the chunk.
        gap_bytes: largest gap between two contiguous runs of one slab.

    Yields:
        For each slab its first byte, one past its last byte, and its part of ``out``. Slabs come in
        byte order and do not overlap. A part has only the innermost axes of the chunk that its slab
        spans.
    """
    size = out.dtype.itemsize
    low, high = span(box, chunk_shape, size)
    if high - low <= SCRATCH_BYTES and largest_gap(box, chunk_shape, size) <= gap_bytes:
        yield start + low, start + high, out
        return
    row_bytes = math.prod(chunk_shape[1:]) * size
    inner = Box(box.offset[1:], box.shape[1:])
    inner_low, inner_high = span(inner, chunk_shape[1:], size)
    begin = start + box.offset[0] * row_bytes
    is_whole = inner_high - inner_low <= SCRATCH_BYTES
    if not is_whole or largest_gap(inner, chunk_shape[1:], size) > gap_bytes:
        for i in range(box.shape[0]):
            row = begin + i * row_bytes
            yield from slabs(out[i, ...], inner, chunk_shape[1:], row, gap_bytes)
        return
    rows = 1 + (SCRATCH_BYTES - (inner_high - inner_low)) // row_bytes
    if row_bytes - (inner_high - inner_low) > gap_bytes:
        rows = 1
    for i in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - i)
        first = begin + i * row_bytes + inner_low
        yield first, first + (count - 1) * row_bytes + inner_high - inner_low, out[i : i + count]


def largest_gap(box: Box, chunk_shape: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes of the largest gap between two contiguous runs of a box in a chunk."""
    gap, held, stride = 0, itemsize, itemsize
    for length, edge in zip(reversed(box.shape), reversed(chunk_shape), strict=True):
        if length > 1:
            gap = max(gap, stride - held)
        held += (length - 1) * stride
        stride *= edge
    return gap


def view_in_chunk(
    buffer: NDArray[np.uint8], like: NDArray[Any], chunk_shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return a view of a slab's elements in the bytes of its chunk.

    Args:
        buffer: bytes of the chunk, starting at the slab's first element.
        like: an array of the slab's shape and data type.
        chunk_shape: shape of the chunk.
    """
    inner, size = chunk_shape[len(chunk_shape) - like.ndim :], like.dtype.itemsize
    strides = [size * math.prod(inner[axis:]) for axis in range(1, like.ndim + 1)]
    return np.ndarray(like.shape, like.dtype, buffer, strides=strides)
