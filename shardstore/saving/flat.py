"""Chunks of a tensor that a rank holds as a range of its flattened shard.

Answers for which chunks lie wholly in the range, which are cut by a boundary and who owns those,
and for gathering the elements of a chunk out of the range. Every decision comes out the same on all
ranks. Moves no bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.mapping import ShardedTensor
from shardstore.saving.sources import CutChunk, DevicePart, WritePlan, _Source
from shardstore.sharded.layouts import FlatRange, flat_bounds
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import ChunkWrite


def _plan_flat(
    plan: WritePlan,
    tensor: ShardedTensor,
    meta: ArrayMeta,
    box: Box,
    ranges: Sequence[FlatRange],
) -> None:
    """A chunk that lies wholly in this rank's range is its own, one that a boundary cuts has one
    owner."""
    assert tensor.data is not None
    start, stop = flat_bounds(tensor)
    source = _Source(tensor.data, tensor.key)
    for index, part, position in _parts_in_range(meta, box, start, stop):
        # C order within the chunk is the order of the flattened shard, with or without gaps, so
        # that a range of the shard is a range of the chunk.
        first, last = (_elements_before(part, box.shape, n, position) for n in (start, stop))
        if first == last:
            continue
        if position is not None:
            low = position - start
            data = source.part((slice(low + first, low + last),))
        else:
            data = _gathered(source, part, box.shape, start, first, last)
        if last - first == part.size:
            plan.writes.append(ChunkWrite(meta, index, _shaped(data, part.shape)))
            continue
        bounds = (
            (
                r.rank,
                _elements_before(part, box.shape, r.start, position),
                _elements_before(part, box.shape, r.stop, position),
            )
            for r in ranges
        )
        pieces = tuple(piece for piece in bounds if piece[1] < piece[2])
        owner = max(pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]
        local = data if callable(data) else _constant(data)
        plan.cut.append(CutChunk(meta, index, part.shape, owner, pieces, first, local))


def _parts_in_range(
    meta: ArrayMeta, box: Box, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], Box, int | None]]:
    """The chunks of a shard that may share elements with a flat range of it.

    Yields:
        Index of the chunk, its box within the shard, and where it begins in the flattened shard;
        ``None`` where it is not one range of it.
    """
    grid = meta.grid
    indices = list(grid.overlapping(box))

    def begin(index: tuple[int, ...]) -> int:
        offset = (i * c - o for i, c, o in zip(index, grid.chunk_shape, box.offset, strict=True))
        return _flat_position(tuple(offset), box.shape)

    contiguous = _is_contiguous(grid.box(indices[0]), box.shape)
    if contiguous:
        # Then the chunks lie end to end, in this order: the others need not be looked at.
        first = bisect_right(indices, start, key=begin) - 1
        indices = indices[first : bisect_left(indices, stop, key=begin)]
    for index in indices:
        part = grid.box(index).relative_to(box.offset)
        yield index, part, _flat_position(part.offset, box.shape) if contiguous else None


def _elements_before(part: Box, shape: Sequence[int], position: int, begin: int | None) -> int:
    """How many elements of a part of a box come before a flat position in the box.

    Args:
        part: the part.
        shape: of the box.
        position: in the flattened box.
        begin: where the part begins in it, if it is one range of it.
    """
    if begin is not None:
        return min(max(position - begin, 0), part.size)
    if position >= math.prod(shape):
        return part.size
    before, inside, row = 0, part.size, math.prod(shape)
    for offset, length, extent in zip(part.offset, part.shape, shape, strict=True):
        row //= extent
        inside //= length
        digit, position = divmod(position, row)
        before += min(max(digit - offset, 0), length) * inside
        if not offset <= digit < offset + length:
            break
    return before


def _is_contiguous(part: Box, shape: Sequence[int]) -> bool:
    """Whether a part of a box is one range of the flattened box."""
    axis = next((axis for axis, length in enumerate(part.shape) if length != 1), len(shape))
    return part.shape[axis + 1 :] == tuple(shape[axis + 1 :])


def _gathered(
    source: _Source, part: Box, shape: Sequence[int], start: int, first: int, last: int
) -> Callable[[], NDArray[Any]]:
    """Elements ``first:last`` of a part with gaps, out of a flat range that begins at ``start``."""

    def gathered() -> NDArray[Any]:
        positions = np.zeros((), np.int64)
        for offset, length, extent in zip(part.offset, part.shape, shape, strict=True):
            positions = positions[..., None] * extent + np.arange(offset, offset + length)
        wanted = positions.reshape(-1)[first:last] - start
        low = int(wanted[0])
        data = source.part((slice(low, int(wanted[-1]) + 1),))
        out: NDArray[Any] = (data() if callable(data) else data)[wanted - low]
        return out

    return gathered


def _constant(array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    return lambda: array


def _shaped(
    data: NDArray[Any] | Callable[[], NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[Any] | Callable[[], NDArray[Any]]:
    if callable(data) and not isinstance(data, DevicePart):
        return lambda: data().reshape(shape)
    return data.reshape(shape)


def _flat_position(offset: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for o, n in zip(offset, shape, strict=True):
        position = position * n + o
    return position
