"""Check whether boxes tile a region, and find a part where they do not.

The functions are pure integer geometry. They are exact for any boxes, and take nearly linear time
in the number of boxes for the cuts of real models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Largest number of grid cells that are counted at once. A region with more is cut in two.
_MAX_CELLS = 1 << 20

_Ints = NDArray[np.int64]


class TilingFault(NamedTuple):
    """A part of the region that is not covered exactly once.

    Attributes:
        offset: where the part begins.
        shape: its extent.
        shards: numbers of the boxes that cover all of it: none, or two and more.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    shards: tuple[int, ...]


def find_tiling_fault(
    offsets: _Ints, shapes: _Ints, global_shape: Sequence[int]
) -> TilingFault | None:
    """Find a part of a global shape that boxes leave uncovered or cover twice.

    Args:
        offsets: ``(boxes, axes)``, where each box begins. Parts outside the global shape are
            ignored.
        shapes: ``(boxes, axes)``, extents; boxes without elements are ignored.
        global_shape: the region to tile, from the origin.

    Returns:
        One fault, or None if each element is in exactly one box.
    """
    # Regions that are not yet checked: their bounds, and the clipped boxes that overlap them.
    low = np.zeros(len(global_shape), dtype=np.int64)
    high = np.asarray(global_shape, dtype=np.int64).reshape(len(global_shape))
    pending = [(low, high, offsets, offsets + shapes, np.arange(len(offsets)))]
    while pending:
        low, high, starts, stops, numbers = pending.pop()
        if not np.all(high > low):
            continue
        starts, stops = np.maximum(starts, low), np.minimum(stops, high)
        inside = np.all(stops > starts, axis=1)
        starts, stops, numbers = starts[inside], stops[inside], numbers[inside]
        if not len(numbers):
            return _fault(low, high, numbers)
        whole = np.all((starts == low) & (stops == high), axis=1)
        if np.any(whole):
            if len(numbers) == 1:
                continue
            if np.count_nonzero(whole) > 1:
                return _fault(low, high, numbers[whole])
            # One box covers all, another a part of it: that part is covered twice.
            other = int(np.flatnonzero(~whole)[0])
            both = numbers[[*np.flatnonzero(whole).tolist(), other]]
            return _fault(starts[other], stops[other], both)
        cuts = [
            np.unique(np.concatenate([[low[a], high[a]], starts[:, a], stops[:, a]]))
            for a in range(len(low))
        ]
        if math.prod(len(axis_cuts) - 1 for axis_cuts in cuts) <= _MAX_CELLS:
            fault = _count_cells(cuts, starts, stops, numbers)
            if fault is not None:
                return fault
            continue
        axis = max(range(len(cuts)), key=lambda a: len(cuts[a]))
        middle = cuts[axis][len(cuts[axis]) // 2]
        left_high, right_low = high.copy(), low.copy()
        left_high[axis] = right_low[axis] = middle
        pending.append((right_low, high, starts, stops, numbers))
        pending.append((low, left_high, starts, stops, numbers))
    return None


def _count_cells(
    cuts: list[_Ints], starts: _Ints, stops: _Ints, numbers: _Ints
) -> TilingFault | None:
    """Count the boxes that cover each cell of the grid formed by all their edges. Return a fault
    for a cell that is not covered exactly once."""
    ndim = len(cuts)
    edges = np.stack(
        [
            np.stack(
                [np.searchsorted(cuts[a], starts[:, a]), np.searchsorted(cuts[a], stops[:, a])]
            )
            for a in range(ndim)
        ]
    )
    # An N-d difference array: its cumulative sums along all axes are the counts.
    counts = np.zeros([len(axis_cuts) for axis_cuts in cuts], dtype=np.int64)
    for corner in itertools.product((0, 1), repeat=ndim):
        at = tuple(edges[a, side] for a, side in enumerate(corner))
        np.add.at(counts, at, 1 - 2 * (sum(corner) % 2))
    for a in range(ndim):
        np.cumsum(counts, axis=a, out=counts)
    wrong = np.argwhere(counts[(slice(-1),) * ndim] != 1)
    if not len(wrong):
        return None
    cell = wrong[0]
    low = np.array([cuts[a][cell[a]] for a in range(ndim)])
    high = np.array([cuts[a][cell[a] + 1] for a in range(ndim)])
    covering = np.all((starts <= low) & (stops >= high), axis=1)
    return _fault(low, high, numbers[covering])


def _fault(low: _Ints, high: _Ints, numbers: _Ints) -> TilingFault:
    return TilingFault(tuple(low.tolist()), tuple((high - low).tolist()), tuple(numbers.tolist()))


def find_range_fault(ranges: Sequence[tuple[int, int]], size: int) -> TilingFault | None:
    """Find a part of ``range(size)`` that half-open ranges leave uncovered or cover twice.

    Args:
        ranges: ``(start, stop)`` of each range.
        size: number of elements to cover.

    Returns:
        One fault, or None if each element is in exactly one range.
    """
    bounds = np.array(ranges, dtype=np.int64).reshape(len(ranges), 2)
    return find_tiling_fault(bounds[:, :1], bounds[:, 1:] - bounds[:, :1], (size,))
