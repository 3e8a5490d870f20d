"""Pure: where the box of one shard lies in its global tensor.

Offsets from ranks along cut axes, and whether shapes, offsets and cuts fit together. Every length
and offset is in elements.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache

from shardstore.errors import AccessPatternError

__all__ = ["grid_position", "ints", "misfit"]


@lru_cache(maxsize=4096)
def misfit(
    local_shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    global_offset: tuple[int, ...],
    axis_fragmentations: tuple[int, ...] | None,
    prepend_axis_num: int,
) -> str | None:
    """What does not fit together, if anything; many shards of a model are cut alike."""
    ndim = len(global_shape)
    if len(global_offset) != ndim:
        return (
            f"global_offset has {len(global_offset)} axes, global_shape has {ndim}; "
            "give one offset for each global axis"
        )
    if len(local_shape) + prepend_axis_num != ndim:
        return (
            f"local_shape has {len(local_shape)} axes and prepend_axis_num is "
            f"{prepend_axis_num}, but global_shape has {ndim} axes; "
            "the first two must add up to the third"
        )
    if any(n < 0 for n in (*local_shape, *global_shape, *global_offset)):
        return "shapes and offsets must not be negative"
    if axis_fragmentations is None:
        return None
    if len(axis_fragmentations) != ndim or any(n < 1 for n in axis_fragmentations):
        return (
            f"axis_fragmentations {axis_fragmentations} must be one positive number "
            f"for each of the {ndim} global axes, or None for an irregular cut"
        )
    for axis, (offset, size) in enumerate(
        zip(global_offset[prepend_axis_num:], local_shape, strict=True), prepend_axis_num
    ):
        if offset % max(1, size):
            return (
                f"along global axis {axis} the offset {offset} is not a multiple of the local "
                f"length {size}; for an irregular cut pass axis_fragmentations=None"
            )
    return None


def ints(values: Sequence[int]) -> tuple[int, ...]:
    """Plain integers, whatever kind of integers was given."""
    return tuple(int(value) for value in values)


def grid_position(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: Sequence[tuple[int, int, int]],
    prepend_axis_num: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Global shape, global offset and fragmentations that rank offsets stand for."""
    sizes = (1,) * prepend_axis_num + local_shape
    cuts: dict[int, tuple[int, int]] = {}
    for rank_offset in rank_offsets:
        try:
            axis, index, parts = map(operator.index, rank_offset)
        except (TypeError, ValueError) as error:
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset!r} is not (axis, index, parts), "
                "three whole numbers",
                key=key,
            ) from error
        if not 0 <= axis < len(sizes):
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset} names axis {axis}, the global tensor has "
                f"{len(sizes)} axes ({prepend_axis_num} of them prepended); count them from 0",
                key=key,
            )
        if not 0 <= index < parts:
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset} asks for part {index} of {parts}; "
                "parts are numbered from 0 and there must be at least one",
                key=key,
            )
        if cuts.setdefault(axis, (index, parts)) != (index, parts):
            raise AccessPatternError(
                f"{key}: axis {axis} has two different rank offsets, {(axis, *cuts[axis])} and "
                f"{tuple(rank_offset)}; give one",
                key=key,
            )
    places = [cuts.get(axis, (0, 1)) for axis in range(len(sizes))]
    return (
        tuple(size * parts for size, (_, parts) in zip(sizes, places, strict=True)),
        tuple(size * index for size, (index, _) in zip(sizes, places, strict=True)),
        tuple(parts for _, parts in places),
    )
