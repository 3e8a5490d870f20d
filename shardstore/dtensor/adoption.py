"""State dicts of PyTorch as they are: DTensors and plain tensors become sharded tensors.

The rule, for :func:`shardstore.save` and :func:`shardstore.load` alike:

- A **DTensor** anywhere in nested dicts and lists is a sharded tensor, whose key is the path of
  dict keys and list positions that leads to it, joined by dots (``model.layers.0.weight``).
- A **plain tensor** is common state, of which rank 0's is kept, as programs written for
  ``core.dist_checkpointing`` expect, unless the state dict holds DTensors: then it is an array too,
  taken to be the same on all ranks of those DTensors' meshes. When loading, a plain tensor also
  takes the array stored under its path if the state dict holds no sharded types at all; so what was
  trained under FSDP2 loads into a model that is not sharded.
- Everything else is common state.

:func:`shard` applies the same by hand, to every tensor. DTensors are loaded in place.
:mod:`~shardstore.dtensor.layout` cuts a DTensor into shards; :mod:`~shardstore.dtensor.claims`
decides which of the ranks that hold a shard writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardstore.distributed.groups import group_rank, group_size
from shardstore.dtensor.claims import ClaimedTensor
from shardstore.dtensor.layout import sharded_from_dtensor
from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.mapping import ShardedBase, ShardedStateDict, ShardedTensor, StateDict

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Adopted",
    "adopt_for_load",
    "adopt_for_save",
    "keys_of_plain",
    "needs_adoption",
    "shard",
]

Path = tuple[str | int, ...]


def shard(state_dict: StateDict) -> ShardedStateDict:
    """A sharded state dict with every tensor of a state dict, by the rule of this module.

    Called by every rank; it waits for none. Plain tensors are taken to be the same on all ranks of
    the DTensors' meshes, on all ranks where there are none.

    Args:
        state_dict: nested dicts and lists with DTensors, plain tensors and other values; not
            changed. The result shares the tensors' memory.

    Returns:
        What :func:`shardstore.save` and :func:`shardstore.load` take.

    Raises:
        AccessPatternError: a DTensor has partial placements, or is inside a tuple.
        KeyNameError: two tensors have the same key.
    """
    return _adopt(state_dict, _ranks_of(state_dict), plain=lambda key: True, loading=False).state


def adopt_for_save(state_dict: ShardedStateDict) -> ShardedStateDict:
    """The state dict with its DTensors as sharded tensors; itself where there are none."""
    if not _has_dtensors(state_dict):
        return state_dict
    return _adopt(state_dict, _ranks_of(state_dict), plain=lambda key: True, loading=False).state


def adopt_for_load(state_dict: ShardedStateDict, stored: Callable[[], Container[str]]) -> Adopted:
    """The state dict with what is to be loaded from arrays as sharded tensors.

    Args:
        state_dict: what the caller wants.
        stored: gives the keys that are stored; called only if there are tensors to ask for.
    """
    if not needs_adoption(state_dict):
        return Adopted(state_dict)
    keys = stored()
    return _adopt(state_dict, _ranks_of(state_dict), plain=lambda key: key in keys, loading=True)


def keys_of_plain(state_dict: StateDict) -> frozenset[str]:
    """Keys that the plain tensors of a state dict would have beside DTensors."""
    keys = set()

    def walk(value: Any, path: Path) -> None:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in items:
                walk(item, (*path, name))
        elif _is_plain(value):
            keys.add(".".join(map(str, path)))

    walk(state_dict, ())
    return frozenset(keys)


def needs_adoption(state_dict: ShardedStateDict) -> bool:
    """Whether :func:`adopt_for_load` has to know what is stored."""
    if _has_dtensors(state_dict):
        return True
    return not _any(state_dict, _is_ours) and _any(state_dict, _is_plain)


@dataclass
class Adopted:
    """A state dict made ready.

    Attributes:
        state: the sharded state dict.
        lists: paths of lists that became dicts, because they hold both tensors and other values.
    """

    state: ShardedStateDict
    lists: dict[Path, int] = field(default_factory=dict)

    def restore(self, loaded: StateDict) -> StateDict:
        """Lists as lists again, in what was loaded."""
        for path in sorted(self.lists, key=len, reverse=True):
            place: Any = loaded
            for name in path[:-1]:
                place = place[name]
            found = place[path[-1]]
            if isinstance(found, dict):
                place[path[-1]] = [found[i] for i in range(self.lists[path]) if i in found]
        return loaded


# -- what is there ---------------------------------------------------------------------------------


def _dtensor_type() -> type[DTensor] | None:
    """The type, if the program has imported it; else nothing can be of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)


def _any(state: Any, wanted: Callable[[Any], bool]) -> bool:
    if isinstance(state, dict):
        return any(_any(value, wanted) for value in state.values())
    if isinstance(state, list | tuple):
        return any(_any(value, wanted) for value in state)
    return wanted(state)


def _is_ours(value: Any) -> bool:
    return isinstance(value, ShardedBase)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _has_dtensors(state: Any) -> bool:
    kind = _dtensor_type()
    return kind is not None and _any(state, lambda value: isinstance(value, kind))


def _ranks_of(state: Any) -> list[int] | None:
    """Ranks of the meshes of all DTensors; ``None`` where there are none."""
    kind = _dtensor_type()
    meshes: dict[int, Any] = {}

    def note(value: Any) -> bool:
        if kind is not None and isinstance(value, kind):
            meshes[id(value.device_mesh)] = value.device_mesh
        return False

    _any(state, note)
    if not meshes:
        return None
    return sorted({int(rank) for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist()})


# -- from tensors to sharded tensors ---------------------------------------------------------------


def _adopt(
    state: Any, ranks: list[int] | None, *, plain: Callable[[str], bool], loading: bool
) -> Adopted:
    kind = _dtensor_type()
    rank, world_size = group_rank(None), group_size(None)
    # Of the ranks of the meshes, the lowest has the main copy; without meshes, of all ranks.
    outside = ranks is not None and len(ranks) < world_size
    replica = ranks.index(rank) if ranks is not None and rank in ranks else rank
    seen: dict[str, Path] = {}
    adopted = Adopted({})

    def key_of(path: Path) -> str:
        key = ".".join(map(str, path))
        if seen.setdefault(key, path) != path:
            raise KeyNameError(
                f"the tensors at {seen[key]} and {path} would both have the key {key!r}; rename "
                "one of the dict keys",
                key=key,
            )
        return key

    def leaf(value: Any, path: Path) -> Any:
        if isinstance(value, ShardedBase) or not isinstance(value, torch.Tensor):
            if isinstance(value, tuple) and _has_dtensors(value):
                raise AccessPatternError(
                    f"there is a DTensor inside the tuple at {path}, which stays as it is; make "
                    "it a list",
                    key=".".join(map(str, path)),
                )
            return value
        if kind is not None and isinstance(value, kind):
            return sharded_from_dtensor(key_of(path), value, loading)
        key = ".".join(map(str, path))
        if _is_plain(value) and plain(key):
            return _of_plain(key_of(path), value, 0 if outside else replica, outside)
        return value

    def walk(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {name: walk(item, (*path, name)) for name, item in value.items()}
        if not isinstance(value, list):
            return leaf(value, path)
        items = [walk(item, (*path, i)) for i, item in enumerate(value)]
        if not _any(items, _is_ours):
            return items
        if all(isinstance(item, ShardedBase) for item in items):
            return items
        adopted.lists[path] = len(items)
        return dict(enumerate(items))

    adopted.state = walk(state, ())
    return adopted


def _of_plain(key: str, tensor: torch.Tensor, replica: int, claimed: bool) -> ShardedTensor:
    kind = ClaimedTensor if claimed else ShardedTensor
    return kind.from_rank_offsets(key, tensor, replica_id=replica)
