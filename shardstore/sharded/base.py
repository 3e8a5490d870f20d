"""The base class of entries of a sharded state dict, and helpers for them.

The helpers concern main replicas, objects that are not saved, and positions of shards by rank
offsets. The public names are in :mod:`shardstore.mapping`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, TypeAlias

from shardstore.errors import AccessPatternError, ArgumentError

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]


class ShardedBase(ABC):
    """An entry of a sharded state dict: a part of a global tensor or object.

    Attributes:
        key: identifies the global tensor or object; the same on every rank.
        data: the local part; ``None`` if only its description is needed.
        replica_id: number of this copy of the part, see :func:`is_main_replica`.
    """

    __module__ = "shardstore.mapping"  # the name that programs and their pickles know it by

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check the attributes.

        Raises:
            CheckpointingException: they contradict each other.
        """

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy of the description alone, with ``data=None``."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether a replica is the main one, which is saved: 0, or a tuple of zeros.

    The caller must give exactly one rank the main replica of each shard.
    """
    if type(replica_id) is tuple:  # the most frequent case first, for speed
        return replica_id.count(0) == len(replica_id)
    if type(replica_id) is int or isinstance(replica_id, Integral):
        return bool(replica_id == 0)
    if not isinstance(replica_id, Sequence) or isinstance(replica_id, str):
        raise ArgumentError(f"replica_id={replica_id!r} must be a whole number or a tuple of them")
    return all(part == 0 for part in replica_id)


class LocalNonpersistentObject:
    """An object that is not saved. ``load`` returns the local object in its place."""

    __module__ = "shardstore.mapping"  # the name that programs and their pickles know it by

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the object."""
        return self.obj


@lru_cache(maxsize=4096)
def misfit(
    local_shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    global_offset: tuple[int, ...],
    axis_fragmentations: tuple[int, ...] | None,
    prepend_axis_num: int,
) -> str | None:
    """Return an error text if the arguments contradict each other, else ``None``.

    Cached, because many shards of a model have the same cut.
    """
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
    """Convert any kind of integers to a tuple of ``int``.

    Raises:
        ArgumentError: ``values`` is no sequence of numbers.
    """
    try:
        return tuple(int(value) for value in values)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{values!r:.100} must be a tuple of whole numbers, such as (4, 2)"
        ) from None


def grid_position(
    key: str,
    local_shape: tuple[int, ...],
    rank_offsets: Sequence[tuple[int, int, int]],
    prepend_axis_num: int,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return global shape, global offset and fragmentations for rank offsets."""
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
                f"{key}: rank offset {rank_offset} names axis {axis}, but the global tensor has "
                f"{len(sizes)} axes ({prepend_axis_num} of them prepended); axes count from 0",
                key=key,
            )
        if not 0 <= index < parts:
            raise AccessPatternError(
                f"{key}: rank offset {rank_offset} names part {index} of {parts}; "
                "parts count from 0, and there must be at least one",
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
