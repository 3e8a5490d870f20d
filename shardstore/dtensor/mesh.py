"""Which parts of a tensor a coordinate of a device mesh holds, and how evenly it is cut.

Placements are applied to the mesh's dimensions from left to right, as ``torch.distributed.tensor``
does: ``Shard`` cuts what is held by the rule of ``torch.chunk``; ``_StridedShard`` first cuts it
into ``split_factor`` blocks and then each block, so that a coordinate may hold several runs of an
axis. Pure functions of integers: every rank computes what every other holds, without asking.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardstore.storage.format.grid import Box

__all__ = ["AxisCut", "AxisSummary", "LocalPart", "held", "local_parts", "summary"]

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AxisCut:
    """One dimension of a mesh that cuts an axis.

    Attributes:
        parts: size of the mesh along the dimension.
        split_factor: 1 for ``Shard``; see the module.
    """

    parts: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class AxisSummary:
    """How an axis is cut over all coordinates.

    Attributes:
        fragments: into how many shards, if these are equal and in one piece each; else ``None``.
        edge: the largest length of which all boundaries are multiples.
    """

    fragments: int | None
    edge: int


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A box of the global tensor, and where it lies in the local one."""

    box: Box
    local_offset: tuple[int, ...]


def _between(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """What lies at positions ``start:stop`` of the runs taken one after the other."""
    position = 0
    for first, length in runs:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            yield first + low - position, high - low
        position += length


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    out: list[tuple[int, int]] = []
    for first, length in runs:
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((first, length))
    return tuple(out)


def held(length: int, cuts: Sequence[AxisCut], indices: Sequence[int]) -> Runs:
    """Runs ``(start, length)`` of an axis that a coordinate holds, in its local tensor's order.

    Args:
        length: of the axis.
        cuts: the mesh dimensions that cut it, from left to right.
        indices: the coordinate along each of them.
    """
    runs: Runs = ((0, length),) if length else ()
    for cut, index in zip(cuts, indices, strict=True):
        total = sum(n for _, n in runs)
        block = -(-total // cut.split_factor)
        taken: list[tuple[int, int]] = []
        for start in range(0, total, max(1, block)):
            size = min(block, total - start)
            part = -(-size // cut.parts)
            low, high = min(index * part, size), min((index + 1) * part, size)
            taken += _between(runs, start + low, start + high)
        runs = _joined(taken)
    return runs


@lru_cache(maxsize=4096)
def summary(length: int, cuts: tuple[AxisCut, ...]) -> AxisSummary:
    """How an axis is cut, over all coordinates; the same on every rank."""
    if not cuts:
        return AxisSummary(1, max(1, length))
    edge = 0
    pieces = []
    for indices in itertools.product(*(range(cut.parts) for cut in cuts)):
        runs = held(length, cuts, indices)
        pieces.append(runs)
        for start, n in runs:
            edge = math.gcd(edge, start)
            if start + n != length:
                edge = math.gcd(edge, start + n)
    even = all(len(runs) == 1 and runs[0][1] == pieces[0][0][1] for runs in pieces)
    return AxisSummary(len(pieces) if even else None, edge or max(1, length))


def local_parts(
    shape: Sequence[int],
    cuts: Sequence[Sequence[AxisCut]],
    indices: Sequence[Sequence[int]],
) -> list[LocalPart]:
    """The boxes that a coordinate holds; together they are its local tensor.

    Args:
        shape: global shape.
        cuts: for each axis, the mesh dimensions that cut it.
        indices: for each axis, the coordinate along each of those.
    """
    per_axis = []
    for length, axis_cuts, axis_indices in zip(shape, cuts, indices, strict=True):
        position, runs = 0, []
        for start, n in held(length, axis_cuts, axis_indices):
            runs.append((start, n, position))
            position += n
        per_axis.append(runs)
    return [
        LocalPart(
            Box(tuple(run[0] for run in combined), tuple(run[1] for run in combined)),
            tuple(run[2] for run in combined),
        )
        for combined in itertools.product(*per_axis)
    ]
