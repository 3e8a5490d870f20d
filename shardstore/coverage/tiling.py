"""Check whether boxes tile a region, and find a part where they do not.

The functions are pure integer geometry. They are exact for any boxes, and take nearly linear time
in the number of boxes for the cuts of real models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Largest number of grid cells that are counted at once. A region with more is cut in two.
_MAX_CELLS = 1 << 20


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
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]], global_shape: Sequence[int]
) -> TilingFault | None:
    """Find a part of a global shape that boxes leave uncovered or cover twice.

    Args:
        boxes: offset and extent of each box. Boxes without elements, and parts outside the global
            shape, are ignored.
        global_shape: the region to tile, from the origin.

    Returns:
        One fault, or None if each element is in exactly one box.
    """
    ndim = len(global_shape)
    bounds = np.array(boxes, np.int64).reshape(len(boxes), 2, ndim).cumsum(axis=1)
    # Regions that are not yet checked: their bounds, and the numbers of boxes that may overlap.
    pending = [(np.zeros(ndim, np.int64), np.array(global_shape, np.int64), np.arange(len(boxes)))]
    while pending:
        low, high, numbers = pending.pop()
        starts, stops = bounds[numbers].clip(low, high).swapaxes(0, 1)
        inside = np.all(stops > starts, axis=1)
        starts, stops, numbers = starts[inside], stops[inside], numbers[inside]
        # The edges of all boxes form a grid. Count the boxes that cover each of its cells.
        edges, spans = [], np.zeros((ndim, 2, len(numbers)), np.int64)
        for axis in range(ndim):
            bounds_of_axis = [[low[axis], high[axis]], starts[:, axis], stops[:, axis]]
            found, places = np.unique(np.concatenate(bounds_of_axis), return_inverse=True)
            edges.append(found)
            spans[axis] = places[2:].reshape(2, -1)
        cells = [len(found) - 1 for found in edges]
        if math.prod(cells) > _MAX_CELLS:
            axis = int(np.argmax(cells))
            left_high, right_low = high.copy(), low.copy()
            left_high[axis] = right_low[axis] = edges[axis][cells[axis] // 2]
            pending += [(right_low, high, numbers), (low, left_high, numbers)]
            continue
        counts = np.zeros(cells, np.int64)
        for first, last in zip(*spans.transpose(1, 2, 0).tolist(), strict=True):
            counts[tuple(map(slice, first, last))] += 1
        for cell in np.argwhere(counts != 1)[:1].tolist():
            offset = tuple(int(edges[axis][i]) for axis, i in enumerate(cell))
            end = tuple(int(edges[axis][i + 1]) for axis, i in enumerate(cell))
            covering = np.all((starts <= offset) & (stops >= end), axis=1)
            shape = tuple(b - a for a, b in zip(offset, end, strict=True))
            return TilingFault(offset, shape, tuple(numbers[covering].tolist()))
    return None
