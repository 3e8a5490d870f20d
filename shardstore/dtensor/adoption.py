"""Conversion of DTensors and plain tensors in state dicts to sharded tensors.

:func:`shardstore.save` and :func:`shardstore.load` follow the same rules:

- A **DTensor** in nested dicts and lists is a sharded tensor. Its key is its path of dict keys and
  list positions, joined by dots (``model.layers.0.weight``).
- A **plain tensor** is an array too, if the state of any rank holds DTensors, or if the ranks hold
  different tensors and none of Megatron-Core's types. Otherwise it is a common value. A load also
  fills a plain tensor from the array stored under its path if the state dict has no sharded types;
  so a checkpoint of FSDP2 loads into an unsharded model.
- All other values are common values, see :mod:`shardstore.saving.plain`.

:func:`shard` makes a sharded tensor of every tensor. DTensors are loaded in place.
:mod:`~shardstore.dtensor.layout` cuts a DTensor into shards, and decides which rank writes a shard
that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

from shardstore.dict_utils import Path, dotted, empty_like, leaves
from shardstore.dtensor.layout import ClaimedTensor, sharded_from_dtensor
from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.mapping import ShardedStateDict, StateDict
from shardstore.state_dict_utils import check_state, has_dtensors, is_plain


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
    return adopt(state_dict)


def adopt(state: Any, stored: Container[str] | None = None) -> ShardedStateDict:
    """Return a state dict with DTensors and plain tensors as sharded tensors; in a load (``stored``
    has the keys of the stored arrays), plain tensors that are stored as arrays."""
    seen: dict[str, Path] = {}

    def key_of(path: Path) -> str:
        key = dotted(path)
        if seen.setdefault(key, path) != path:
            raise KeyNameError(
                f"the tensors at {seen[key]} and {path} would both have the key {key!r}; rename "
                "one of the dict keys",
                key=key,
            )
        return key

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            walked = empty_like(value)
            for name, item in value.items():
                walked[name] = walk(item, (*path, name))
            return walked
        if isinstance(value, list):
            return [walk(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple) and has_dtensors(one for _, one in leaves(value)):
            raise AccessPatternError(
                f"there is a DTensor inside the tuple at {path}; tuples are not searched for "
                "tensors, so make it a list",
                key=dotted(path),
            )
        if has_dtensors([value]):
            return sharded_from_dtensor(key_of(path), value, loading=stored is not None)
        if is_plain(value) and (stored is None or dotted(path) in stored):
            return ClaimedTensor.from_rank_offsets(key_of(path), value)
        return value

    return cast(ShardedStateDict, walk(state, ()))
