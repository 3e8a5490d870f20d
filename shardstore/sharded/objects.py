"""Sharded objects, and factories: tensors that are saved in another form than they live in.

A factory's shards are built before a save or load, and what was loaded in their place is merged
into one tensor again. Public as :mod:`shardstore.mapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch

from shardstore.dict_utils import dict_list_map_inplace
from shardstore.errors import AccessPatternError, KeyNameError, StructureError
from shardstore.sharded.base import ReplicaId, ShardedBase, ShardedStateDict, StateDict, ints

__all__ = [
    "FactoryBuildFn",
    "FactoryMergeFn",
    "ShardedObject",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
]


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one cell of a global grid of objects.

    Unlike a tensor's, the cut of a global object cannot change between saving and loading.

    Attributes:
        key: identifies the global object, the same on every rank.
        data: the local object; ``None`` where only the description matters.
        global_shape: shape of the grid, in objects.
        global_offset: cell of this object in the grid.
        replica_id: which copy this is.

    Raises:
        CheckpointingException: on construction, where shape and offset do not have as many axes.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = ints(self.global_shape)
        self.global_offset = ints(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Checks that shape and offset have as many axes.

        Raises:
            AccessPatternError: they do not.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise AccessPatternError(
                f"{self}: global_offset {self.global_offset} and global_shape "
                f"{self.global_shape} must have as many axes",
                key=self.key,
            )

    def without_data(self) -> ShardedObject:
        """A copy of the description alone, with ``data=None``."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """Names this very cell: ``<key>/shard_<offset>_<shape>``, numbers joined by dots."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The description that a :attr:`unique_key` was made from, without data.

        Args:
            unique_key: ``<key>/shard_<offset>_<shape>``; the key itself may contain slashes.
            replica_id: which copy the result stands for.

        Raises:
            KeyNameError: (a ``ValueError``) the text is not of that form.
        """
        key, separator, cell = unique_key.rpartition("/shard_")
        try:
            if not separator:
                raise ValueError("no /shard_")
            offset_text, shape_text = cell.split("_")
            offset = [int(n) for n in offset_text.split(".") if offset_text]
            shape = [int(n) for n in shape_text.split(".") if shape_text]
            if len(shape) > len(offset):
                raise ValueError("more lengths than offsets")
        except ValueError as error:
            raise KeyNameError(
                f"{unique_key!r} names no sharded object; expected <key>/shard_<offset>_<shape>, "
                "numbers joined by dots",
                key=unique_key,
            ) from error
        # Names written when only the first length was recorded leave the others unknown.
        lengths = tuple(-1 if n is None else n for _, n in zip_longest(offset, shape))
        return cls(key, None, lengths, tuple(offset), replica_id)


ShardedObject.__module__ = "shardstore.mapping"  # what programs and their pickles know it by


FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Stands for a tensor that is saved in another form than it lives in.

    What ``build_fn`` returns must depend on its arguments alone: an optimizer calls it with other
    keys and its own tensors, to have its state cut as the parameter is.

    Attributes:
        key: passed to ``build_fn``.
        data: the tensor in the form it lives in.
        build_fn: called as ``build_fn(key, data, replica_id, flattened_range)`` before saving and
            loading; returns a sharded state dict.
        merge_fn: takes what was loaded in place of that state dict and returns one tensor.
        replica_id: which copy this is; passed to ``build_fn``.
        flattened_range: range of the flattened tensor that is held; passed to ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """The sharded state dict that takes this factory's place."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Nothing can be checked before the factory is built."""

    def without_data(self) -> ShardedTensorFactory:
        """A copy with ``data=None``."""
        return replace(self, data=None)  # type: ignore[arg-type]


ShardedTensorFactory.__module__ = "shardstore.mapping"  # what programs and pickles know it by


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replaces every factory in nested dicts and lists by what it builds, in place.

    Factories inside what a factory built are left as they are.
    """

    def built(value: Any) -> Any:
        return value.build() if isinstance(value, ShardedTensorFactory) else value

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(
    x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()
) -> StateDict:
    """Turns what was loaded in place of each factory back into one tensor, in place.

    Args:
        x1: what was loaded.
        x2: factories, at the places where they stood; a part of ``x1``'s structure. A dict of
            integers in ``x2`` may stand for some elements of a list in ``x1``.
        key: where ``x1`` and ``x2`` are within the whole; for error texts.

    Returns:
        ``x1``, or what the factory makes of it if ``x2`` itself is one.

    Raises:
        StructureError: (a ``CheckpointingException`` and ``ValueError``) the structures differ.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(x1: Any, x2: Any, at: tuple[str | int, ...]) -> Any:
    if isinstance(x2, ShardedTensorFactory):
        try:
            return x2.merge_fn(x1)
        except Exception as error:
            error.add_note(f"while merging what was loaded for the factory {x2.key!r} at {at}")
            raise
    places: Iterable[Any]
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [k for k in x2 if k not in x1]
        if absent:
            raise StructureError(
                f"factories at {at} stand for {absent}, which were not loaded; there is {list(x1)}"
            )
        places = list(x2)
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise StructureError(
                f"{len(x1)} elements were loaded at {at} but the factories stand for {len(x2)}"
            )
        places = range(len(x2))
    elif isinstance(x1, list) and isinstance(x2, dict):
        for k in x2:
            if not isinstance(k, int) or not 0 <= k < len(x1):
                raise StructureError(
                    f"factories at {at} name element {k!r} of a list of {len(x1)} elements"
                )
        places = list(x2)
    else:
        raise StructureError(
            f"at {at} a {type(x1).__name__} was loaded, where the factories have a "
            f"{type(x2).__name__}: neither a factory nor a matching dict or list"
        )
    for k in places:
        x1[k] = _merged(x1[k], x2[k], (*at, k))
    return x1
