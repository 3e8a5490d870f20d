"""Pure: from the boxes that an array is written in, all of them known, to its chunk grid.

DCP gathers everybody's plan anyway, and a conversion knows how its source is cut, so the grid can
be made of all boundaries. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardstore.storage.grid import Box, Grid, cut_gcd, plan_grid

__all__ = ["contains", "grid_of"]

SMALL_CHUNK_BYTES = 64 * 1024
CHUNKS_PER_BOX = 64
STRADDLING_CHUNK_BYTES = 1024 * 1024


def grid_of(
    shape: Sequence[int], boxes: Sequence[Box], itemsize: int, target_chunk_bytes: int
) -> tuple[Grid, tuple[int, ...], bool]:
    """The chunk grid of a tensor, the edges of its shards, and whether chunks may straddle boxes.

    No chunk straddles two boxes, unless the boundaries are such that this would take a great many
    tiny chunks (boundaries at 7 and 13 of a thousand have chunks of one): then a plain grid is
    taken, and the few chunks that a boundary cuts have several holders.

    Args:
        shape: global shape.
        boxes: what is written, disjoint; together they cover the tensor.
        itemsize: bytes an element.
        target_chunk_bytes: see :func:`shardstore.storage.grid.plan_grid`.
    """
    edges = cut_gcd(shape, boxes)
    grid = plan_grid(shape, edges, itemsize, target_chunk_bytes)
    chunk_bytes = math.prod(grid.chunk_shape) * itemsize
    parts = max(1, len(boxes))
    if chunk_bytes >= SMALL_CHUNK_BYTES or grid.size <= CHUNKS_PER_BOX * parts:
        return grid, edges, False
    share = math.prod(shape) * itemsize // (4 * parts)
    at_most = min(target_chunk_bytes, max(SMALL_CHUNK_BYTES, min(STRADDLING_CHUNK_BYTES, share)))
    return plan_grid(shape, shape, itemsize, at_most), edges, True


def contains(outer: Box, inner: Box) -> bool:
    """Whether a box lies within another."""
    return all(
        a <= b and b + n <= a + m
        for a, m, b, n in zip(outer.offset, outer.shape, inner.offset, inner.shape, strict=True)
    )
