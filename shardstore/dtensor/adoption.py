"""Conversion of DTensors and plain tensors in state dicts to sharded tensors.

:func:`shardstore.save` and :func:`shardstore.load` follow the same rules:

- A **DTensor** in nested dicts and lists is a sharded tensor. Its key is its path of dict keys and
  list positions, joined by dots (``model.layers.0.weight``).
- A **plain tensor** is a common value, and rank 0's is saved, as in ``core.dist_checkpointing``. If
  the state dict holds DTensors, a plain tensor is an array too, and must be equal on all ranks of
  the DTensors' meshes. A load also fills a plain tensor from the array stored under its path if the
  state dict has no sharded types; so a checkpoint of FSDP2 loads into an unsharded model.
- All other values are common values.

:func:`shard` makes a sharded tensor of every tensor. DTensors are loaded in place.
:mod:`~shardstore.dtensor.layout` cuts a DTensor into shards, and decides which rank writes a shard
that several ranks hold.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch

from shardstore.dict_utils import Path, empty_like, leaves
from shardstore.distributed.groups import group_rank, group_size
from shardstore.dtensor.layout import ClaimedTensor, sharded_from_dtensor
from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.mapping import ShardedBase, ShardedStateDict, ShardedTensor, StateDict
from shardstore.state_dict_utils import check_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def adopt_for_save(state_dict: ShardedStateDict) -> ShardedStateDict:
    """Return the state dict with DTensors as sharded tensors; itself if it has none."""
    return adopt(state_dict) if _dtensors(state_dict) else state_dict


def keys_of_plain(state_dict: StateDict) -> frozenset[str]:
    """Return the keys that the plain tensors of a state dict have if it also holds DTensors."""
    return frozenset(_key(path) for path, value in leaves(state_dict) if _is_plain(value))


def needs_adoption(state_dict: ShardedStateDict) -> bool:
    """Return whether a load reads tensors of a state dict that are not sharded tensors, so that
    :func:`adopt` must convert them."""
    if _dtensors(state_dict):
        return True
    values = [value for _, value in leaves(state_dict)]
    return any(map(_is_plain, values)) and not any(isinstance(v, ShardedBase) for v in values)


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _dtensor_type() -> Any:
    """Return the DTensor type if the program has imported it, else a type without instances."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", ())


def _dtensors(state: Any) -> list[DTensor]:
    kind = _dtensor_type()
    return [value for _, value in leaves(state) if isinstance(value, kind)] if kind else []


def adopt(state_dict: StateDict, stored: Container[str] | None = None) -> ShardedStateDict:
    """Return the state dict with tensors as sharded tensors.

    A list that holds both tensors and other values becomes a dict from positions to elements.

    Args:
        state_dict: nested dicts and lists; not changed.
        stored: for a load, the keys of the stored arrays. Other plain tensors do not change.
    """
    kind = _dtensor_type()
    rank, world_size = group_rank(None), group_size(None)
    meshes = {id(tensor.device_mesh): tensor.device_mesh for tensor in _dtensors(state_dict)}
    ranks = {int(n) for mesh in meshes.values() for n in mesh.mesh.flatten().tolist()}
    # Rank 0 has the main copy of a plain tensor, unless the meshes do not contain all ranks.
    outside = bool(ranks) and len(ranks) < world_size
    seen: dict[str, Path] = {}

    def key_of(path: Path) -> str:
        key = _key(path)
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
            items = [walk(item, (*path, i)) for i, item in enumerate(value)]
            has_shards = any(isinstance(item, ShardedBase) for _, item in leaves(items))
            is_mixed = has_shards and not all(isinstance(item, ShardedBase) for item in items)
            return dict(enumerate(items)) if is_mixed else items
        if isinstance(value, tuple) and _dtensors(value):
            raise AccessPatternError(
                f"there is a DTensor inside the tuple at {path}; tuples are not searched for "
                "tensors, so make it a list",
                key=_key(path),
            )
        if isinstance(value, kind):
            return sharded_from_dtensor(key_of(path), value, loading=stored is not None)
        if _is_plain(value) and (stored is None or _key(path) in stored):
            shard_type = ClaimedTensor if outside else ShardedTensor
            replica_id = 0 if outside else rank
            return shard_type.from_rank_offsets(key_of(path), value, replica_id=replica_id)
        return value

    adopted: ShardedStateDict = walk(state_dict, ())
    return adopted
