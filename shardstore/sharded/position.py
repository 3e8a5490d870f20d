"""Where the box of one shard lies in its global tensor.

Offsets from ranks along cut axes, and checks that shapes, offsets and ranges fit together. Every
length and offset is in elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardstore.errors import AccessPatternError, ShapeMismatchError
from shardstore.sharded.base import ShardedBase

__all__ = ["PositionedShard", "grid_position", "ints", "with_item"]


class PositionedShard(ShardedBase):
    """The box of a global tensor that a shard is, without its data.

    The attributes are those of :class:`shardstore.mapping.ShardedTensor`, which declares them as
    its fields.
    """

    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    prepend_axis_num: int
    allow_shape_mismatch: bool
    flattened_range: slice | None

    def _validate_range(self) -> None:
        """Raises where the flattened range is not a plain slice of the local tensor's elements."""
        flat = self.flattened_range
        if flat is None:
            return
        if not isinstance(flat, slice):
            raise self._wrong(f"flattened_range must be a slice, not {flat!r}")
        if flat.step is not None:
            raise self._wrong(f"flattened_range {flat} must not have a step")
        size = math.prod(self.local_shape)
        start = 0 if flat.start is None else flat.start
        stop = size if flat.stop is None else flat.stop
        if not 0 <= start <= stop <= size:
            raise ShapeMismatchError(
                f"{self}: flattened_range {flat} is not within the {size} elements of the local "
                "tensor; count from 0 and end at its last element",
                key=self.key,
            )

    def _validate_position(self) -> None:
        """Raises where shapes, offsets and fragmentations do not fit together."""
        about = (
            self.local_shape,
            self.global_shape,
            self.global_offset,
            self.axis_fragmentations,
            self.prepend_axis_num,
        )
        try:
            problem = _misfit(*about)
        except TypeError:  # lists, set by hand, can not be looked up
            problem = _misfit.__wrapped__(*about)
        if problem is not None:
            raise self._wrong(problem)

    def _flat_bounds(self) -> tuple[int, int]:
        """First and last-plus-one flat element of the local tensor that the range names."""
        assert self.flattened_range is not None
        start, stop, _ = self.flattened_range.indices(math.prod(self.local_shape))
        return start, max(start, stop)

    def _wrong(self, what: str) -> AccessPatternError:
        return AccessPatternError(f"{self}: {what}", key=self.key)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the global tensor is cut into equal parts along each axis."""
        return self.axis_fragmentations is not None

    def global_slice(self) -> tuple[int | slice, ...]:
        """The box of the global tensor, ready to index it with.

        Prepended axes give integers, so that the indexed result has the local shape. A
        flattened range plays no part: the box is the whole local tensor's.
        """
        prepended = self.prepend_axis_num
        box = (
            slice(offset, offset + size)
            for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True)
        )
        return (*self.global_offset[:prepended], *box)

    def global_coordinates(self) -> tuple[int | npt.NDArray[np.intp], ...]:
        """Global index of each element of a flattened range.

        Returns:
            One entry for each global axis: an integer for a prepended axis, otherwise an array as
            long as the range.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        local = self._coordinates("global_coordinates")
        prepended = self.prepend_axis_num
        shifted = (
            indices + offset
            for indices, offset in zip(local, self.global_offset[prepended:], strict=True)
        )
        return (*self.global_offset[:prepended], *shifted)

    def local_coordinates(self) -> tuple[npt.NDArray[np.intp], ...]:
        """Index in the unflattened local tensor of each element of a flattened range.

        Returns:
            One array, as long as the range, for each local axis.

        Raises:
            CheckpointingException: there is no flattened range.
        """
        return self._coordinates("local_coordinates")

    def _coordinates(self, name: str) -> tuple[npt.NDArray[np.intp], ...]:
        if self.flattened_range is None:
            raise self._wrong(f"{name} needs a flattened_range; use global_slice for a whole box")
        start, stop = self._flat_bounds()
        if not self.local_shape:
            return ()
        return tuple(np.unravel_index(np.arange(start, stop), self.local_shape))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Index of this shard in the grid of shards, one number for each global axis.

        Raises:
            CheckpointingException: the cut is not regular and this shard does not lie at a multiple
                of its own lengths, so that there is no such grid.
        """
        if self.axis_fragmentations is None and any(
            offset % max(1, size)
            for offset, size in zip(
                self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True
            )
        ):
            raise self._wrong("an irregular cut has no grid of chunks to number this one in")
        prepended = self.prepend_axis_num
        index = (
            # A zero-length shard carries no position of its own.
            offset // size if size else 0
            for offset, size in zip(self.global_offset[prepended:], self.local_shape, strict=True)
        )
        return (*self.global_offset[:prepended], *index)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Largest chunk shape under which every shard of a regular cut is whole chunks.

        Returns:
            One length in elements for each global axis.

        Raises:
            CheckpointingException: the cut is not regular, or an axis does not divide evenly and
                ``allow_shape_mismatch`` is not set.
        """
        if self.axis_fragmentations is None:
            raise self._wrong("an irregular cut has no common chunk shape")
        for axis, (size, parts) in enumerate(
            zip(self.global_shape, self.axis_fragmentations, strict=True)
        ):
            if size % parts and not self.allow_shape_mismatch:
                raise self._wrong(
                    f"global axis {axis} of length {size} cannot be cut into {parts} equal parts; "
                    "pad it (allow_shape_mismatch=True) or pass axis_fragmentations=None"
                )
        return tuple(
            size // parts
            for size, parts in zip(self.global_shape, self.axis_fragmentations, strict=True)
        )

    def _narrow_bounds(self, dim: int, start: int, length: int) -> tuple[int, int]:
        """``dim`` and ``start`` counted from 0, checked."""
        ndim = len(self.local_shape)
        if not -ndim <= dim < ndim:
            raise self._wrong(f"axis {dim} to narrow is not one of the {ndim} local axes")
        dim %= ndim
        size = self.local_shape[dim]
        first = start + size if start < 0 else start
        if first < 0 or length < 0 or first + length > size:
            raise self._wrong(
                f"cannot narrow axis {dim} of local length {size} to "
                f"{length} elements from {start} on"
            )
        return dim, first


@lru_cache(maxsize=4096)
def _misfit(
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


def with_item(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    """The values with one of them replaced."""
    return (*values[:position], value, *values[position + 1 :])


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
