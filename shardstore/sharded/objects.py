"""Sharded objects and factories.

A factory stands for a tensor that is saved in another form than it has in memory. It builds shards
before a save or load, and merges them into one tensor after a load. The public names are in
:mod:`shardstore.mapping`.
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


@dataclass
class ShardedObject(ShardedBase):
    """A local object as one cell of a global grid of objects.

    It loads only into the same grid that it was saved in.

    Attributes:
        key: identifies the global object; the same on every rank.
        data: the local object; ``None`` if only its description is needed.
        global_shape: shape of the grid, in objects.
        global_offset: cell of this object in the grid.
        replica_id: number of this copy.

    Raises:
        CheckpointingException: on construction, if shape and offset differ in their number of axes.
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
        """Check that shape and offset have the same number of axes.

        Raises:
            AccessPatternError: the numbers of axes differ.
        """
        if len(self.global_shape) != len(self.global_offset):
            raise AccessPatternError(
                f"{self}: global_offset {self.global_offset} and global_shape "
                f"{self.global_shape} must have the same number of axes",
                key=self.key,
            )

    def without_data(self) -> ShardedObject:
        """Return a copy of the description, with ``data=None``."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The name of this cell: ``<key>/shard_<offset>_<shape>``, numbers joined by dots."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the description for a :attr:`unique_key`, without data.

        Args:
            unique_key: ``<key>/shard_<offset>_<shape>``; the key itself may contain slashes.
            replica_id: number of the copy.

        Raises:
            KeyNameError: (a ``ValueError``) the text does not have this form.
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
                f"{unique_key!r} is not the unique key of a sharded object; expected "
                "<key>/shard_<offset>_<shape>, numbers joined by dots",
                key=unique_key,
            ) from error
        # Old names have only the first length of the grid; the others are unknown.
        lengths = tuple(-1 if n is None else n for _, n in zip_longest(offset, shape))
        return cls(key, None, lengths, tuple(offset), replica_id)


ShardedObject.__module__ = "shardstore.mapping"  # what programs and their pickles know it by


FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, slice | None], ShardedStateDict]
FactoryMergeFn: TypeAlias = Callable[[StateDict], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is saved in another form than it has in memory.

    The result of ``build_fn`` must depend only on its arguments. An optimizer calls it with other
    keys and its own tensors, so that its state is cut like the parameter.

    Attributes:
        key: passed to ``build_fn``.
        data: the tensor in its form in memory.
        build_fn: called as ``build_fn(key, data, replica_id, flattened_range)`` before saving and
            loading; returns a sharded state dict.
        merge_fn: takes the loaded form of that state dict and returns one tensor.
        replica_id: number of this copy; passed to ``build_fn``.
        flattened_range: the held range of the flattened tensor; passed to ``build_fn``.
    """

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """Return the sharded state dict that replaces this factory."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: a factory cannot be checked before it is built."""

    def without_data(self) -> ShardedTensorFactory:
        """Return a copy with ``data=None``."""
        return replace(self, data=None)  # type: ignore[arg-type]


ShardedTensorFactory.__module__ = "shardstore.mapping"  # what programs and pickles know it by


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory in nested dicts and lists by the state dict that it builds, in place.

    Factories inside such a state dict are not replaced.
    """

    def built(value: Any) -> Any:
        return value.build() if isinstance(value, ShardedTensorFactory) else value

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(
    x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()
) -> StateDict:
    """Merge the loaded state dict of each factory into one tensor, in place.

    Args:
        x1: the loaded state dict.
        x2: the factories at their places in the structure of ``x1``. In ``x2``, a dict with integer
            keys may name some elements of a list in ``x1``.
        key: path to ``x1`` and ``x2`` in the whole state dict, for error texts.

    Returns:
        ``x1``; if ``x2`` is a factory, the merged tensor.

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
            error.add_note(f"while merging the loaded parts of the factory {x2.key!r} at {at}")
            raise
    places: Iterable[Any]
    if isinstance(x1, dict) and isinstance(x2, dict):
        absent = [k for k in x2 if k not in x1]
        if absent:
            raise StructureError(
                f"factories at {at} need {absent}, which were not loaded; loaded are {list(x1)}"
            )
        places = list(x2)
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise StructureError(
                f"{len(x1)} elements were loaded at {at}, but the factories need {len(x2)}"
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
