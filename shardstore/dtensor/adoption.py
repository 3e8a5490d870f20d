"""Conversion of DTensors and plain tensors in state dicts to sharded tensors.

:func:`shardstore.save` and :func:`shardstore.load` follow the same rules:

- A **DTensor** in nested dicts and lists is a sharded tensor, and so is a tensor that names its
  parts. Its key is its path of dict keys and list positions, joined by dots
  (``model.layers.0.weight``).
- A **plain tensor** is an array too, if the state of any rank holds DTensors, or if the ranks hold
  different tensors and none of Megatron-Core's types. Otherwise it is a common value. Without
  Megatron-Core's types, a load fills a plain tensor from the array stored under its path, or from
  the common value there; so a checkpoint of FSDP2 loads into an unsharded model.
- All other values are common values, see :mod:`shardstore.saving.plain`.

:func:`shard` makes a sharded tensor of every tensor. DTensors are loaded in place.
:mod:`~shardstore.dtensor.layout` cuts a DTensor into shards, and decides which rank writes a shard
that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from shardstore.dict_utils import Path, dotted, empty_like
from shardstore.dtensor.layout import ClaimedTensor, claimed, factory_of, held_shards
from shardstore.errors import KeyNameError
from shardstore.mapping import ShardedStateDict, StateDict
from shardstore.state_dict_utils import (
    HeldShards,
    check_state,
    check_tuple,
    is_distributed,
    is_plain,
)
from shardstore.storage.format import dtypes


@dataclass(eq=False, repr=False)
class Adoption:
    """Makes sharded tensors of the tensors of one state while it is walked, see
    :class:`~shardstore.state_dict_utils.StateSplit`. It describes a tensor once, however often the
    state is walked.

    Attributes:
        everyone: the ranks of the save or load; ``None``: no rank claims a shard.
        loading: whether the state is loaded, not saved.
        arrays: keys of the plain tensors that are arrays; ``True``: all. A save takes all after its
            first DTensor.
        has_distributed: whether there was a DTensor, or a tensor that names its parts.
        held: the DTensors that were described, by path.
        left: the tensors that were left as values, by path; of a save, those that an array can
            have.
    """

    everyone: frozenset[int] | None
    loading: bool
    arrays: Container[str] | bool = False
    has_distributed: bool = False
    left: dict[Path, torch.Tensor] = field(default_factory=dict)
    held: dict[Path, HeldShards] = field(default_factory=dict)
    _made: dict[str, tuple[Path, Any]] = field(default_factory=dict)

    def __call__(self, value: Any, path: Path) -> Any:
        """Return what takes the place of a tensor, or of a shard of a class of its own.

        Raises:
            AccessPatternError: a DTensor has partial placements.
            KeyNameError: two tensors have the same key.
        """
        if not isinstance(value, torch.Tensor):
            return value if self.everyone is None else claimed(self.everyone, value)
        key = dotted(path)
        if is_distributed(value):
            self.has_distributed = True
            self.arrays = self.arrays or not self.loading
        elif not (self.loading or is_plain(value)):
            return value
        elif not (self.arrays is True or (self.arrays and key in self.arrays)):
            self.left[path] = value if self.loading else dtypes.unwrapped(value)
            return self.left[path]
        if key not in self._made:
            self._made[key] = path, self._described(path, key, value)
        other, made = self._made[key]
        if other != path:
            raise KeyNameError(
                f"the tensors at {other} and {path} would both have the key {key!r}; rename one of "
                "the dict keys",
                key=key,
            )
        return made

    def _described(self, path: Path, key: str, value: Any) -> Any:
        if is_distributed(value):
            held = self.held[path] = held_shards(key, value, self.loading)
            return held
        return ClaimedTensor.from_rank_offsets(key, value)


def shard(state_dict: StateDict) -> ShardedStateDict:
    """Return a sharded state dict that describes every tensor of a state dict.

    Every rank calls it; it waits for no other. The key of a tensor is its path, joined by dots.
    Plain tensors must be equal on all ranks of the DTensors' meshes, or, without DTensors, on all
    ranks.

    Args:
        state_dict: nested dicts and lists with DTensors, plain tensors and other values; not
            changed. The result shares the tensors' memory.

    Returns:
        A sharded state dict for :func:`shardstore.save` and :func:`shardstore.load`.

    Raises:
        AccessPatternError: a DTensor has partial placements, or is inside a tuple.
        KeyNameError: two tensors have the same key.
    """
    check_state(state_dict)
    adoption = Adoption(None, loading=False, arrays=True)

    def described(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            made = empty_like(value)
            for name, item in value.items():
                made[name] = described(item, (*path, name))
            return made
        if isinstance(value, list):
            return [described(item, (*path, n)) for n, item in enumerate(value)]
        if isinstance(value, tuple):
            check_tuple(value, path)
        if not isinstance(value, torch.Tensor):
            return value
        made = adoption(value, path)
        return factory_of(dotted(path), made) if isinstance(made, HeldShards) else made

    return cast(ShardedStateDict, described(state_dict, ()))
