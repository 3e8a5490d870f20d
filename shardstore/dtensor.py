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

A mesh says which of its ranks hold copies of a shard. What it does not say is what the ranks
outside of it hold: another copy (a norm sharded over the data-parallel ranks of each
tensor-parallel one), or nothing (another pipeline stage). So where a mesh is not the whole world,
the ranks tell each other what they hold, and the lowest one that holds a shard writes it.

:func:`shard` applies the same by hand, to every tensor. DTensors are loaded in place.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from shardstore.errors import AccessPatternError, KeyNameError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
)
from shardstore.mesh_layout import AxisCut, LocalPart, local_parts, summary

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Adopted",
    "ClaimedTensor",
    "adopt_for_load",
    "adopt_for_save",
    "apply_claims",
    "claims",
    "decide_claims",
    "needs_adoption",
    "shard",
]

SMALL_CELL_BYTES = 64 * 1024
CELLS_PER_SHARD = 64

Path = tuple[str | int, ...]


@dataclass
class ClaimedTensor(ShardedTensor):
    """A sharded tensor that ranks unknown to this one may hold too, as the same replica."""


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


def _world() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


# -- who writes what several ranks hold ------------------------------------------------------------


def _identity(tensor: ShardedTensor) -> tuple[Any, ...]:
    flat = tensor.flattened_range
    bounds = None if flat is None else (flat.start, flat.stop)
    return tensor.key, tensor.global_offset, tensor.local_shape, bounds


def _claimed(state: Any) -> list[ClaimedTensor]:
    found: list[ClaimedTensor] = []

    def note(value: Any) -> bool:
        if isinstance(value, ClaimedTensor):
            found.append(value)
        return False

    _any(state, note)
    return found


def claims(state: ShardedStateDict) -> bytes:
    """What this rank holds, as far as others may hold it too; empty where there is nothing."""
    held = [_identity(tensor) for tensor in _claimed(state) if _is_first_copy(tensor)]
    return pickle.dumps(held) if held else b""


def _is_first_copy(tensor: ClaimedTensor) -> bool:
    """Whether this is the main replica as far as its own mesh goes."""
    return is_main_replica(tensor.replica_id)


def decide_claims(reports: Sequence[bytes]) -> bytes:
    """The lowest rank that holds each shard, from all ranks' :func:`claims`."""
    owners: dict[tuple[Any, ...], int] = {}
    for rank, report in enumerate(reports):
        for identity in pickle.loads(report) if report else ():
            owners.setdefault(identity, rank)
    return pickle.dumps(owners) if owners else b""


def apply_claims(state: ShardedStateDict, decided: bytes) -> None:
    """Make the shards that another rank writes replicas, in place."""
    if not decided:
        return
    owners = pickle.loads(decided)
    rank, _ = _world()
    for tensor in _claimed(state):
        if _is_first_copy(tensor) and owners.get(_identity(tensor), rank) != rank:
            tensor.replica_id = rank + 1


# -- from tensors to sharded tensors ---------------------------------------------------------------


def _adopt(
    state: Any, ranks: list[int] | None, *, plain: Callable[[str], bool], loading: bool
) -> Adopted:
    kind = _dtensor_type()
    rank, world_size = _world()
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
            return _of_dtensor(key_of(path), value, loading)
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


def _of_dtensor(key: str, tensor: DTensor, loading: bool) -> Any:
    """What stands for a DTensor: a factory that gives its parts and takes the DTensor back."""
    layout = _Layout.of(key, tensor)
    if layout is None:
        # This rank holds nothing of it.
        return LocalNonpersistentObject(tensor)
    local = cast(Any, tensor.detach()).to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    made = tensor
    if local.is_meta and loading:
        local, made = _materialised(tensor, local)

    def build(*_: object) -> ShardedStateDict:
        parts = layout.shards(key, local, flat=not loading)
        return {str(i): part for i, part in enumerate(parts)}

    return ShardedTensorFactory(key, local, build, lambda _: made)


def _materialised(tensor: DTensor, local: torch.Tensor) -> tuple[torch.Tensor, DTensor]:
    from torch.distributed.tensor import DTensor as Kind

    fresh = torch.empty_like(local, device=tensor.device_mesh.device_type)
    made = Kind.from_local(
        fresh,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return fresh, made


@dataclass(frozen=True)
class _Layout:
    """How a DTensor lies on its mesh, seen from one rank."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[AxisCut, ...], ...]
    parts: list[LocalPart]
    replica_id: ReplicaId
    kind: type[ShardedTensor]

    @classmethod
    def of(cls, key: str, tensor: DTensor) -> _Layout | None:
        """The layout; ``None`` where this rank holds no element of it.

        Raises:
            AccessPatternError: a placement is neither a shard nor a replica.
        """
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        shape = tuple(tensor.shape)
        kind = ShardedTensor if tensor.device_mesh.size() == _world()[1] else ClaimedTensor
        cuts: list[list[AxisCut]] = [[] for _ in shape]
        indices: list[list[int]] = [[] for _ in shape]
        replica: list[int] = []
        sizes = tuple(tensor.device_mesh.shape)
        for parts, index, placement in zip(sizes, coordinate, tensor.placements, strict=True):
            axis = getattr(placement, "dim", None)
            if placement.is_replicate():
                replica.append(index)
            elif isinstance(axis, int):
                cuts[axis].append(AxisCut(parts, int(getattr(placement, "split_factor", 1))))
                indices[axis].append(index)
            else:
                raise AccessPatternError(
                    f"key {key!r} has the placement {placement}: its value is not there yet, "
                    "every rank has a part of a sum; redistribute it first "
                    "(tensor.redistribute(placements=[Replicate()]))",
                    key=key,
                )
        replica_id: ReplicaId = tuple(replica) or 0
        if not math.prod(shape):
            # Nobody holds an element, and one rank makes the array.
            replica_id = tuple(coordinate)
            cuts, indices = [[] for _ in shape], [[] for _ in shape]
            whole = local_parts([max(1, n) for n in shape], cuts, indices)
            return cls(shape, tuple(() for _ in shape), whole, replica_id, kind)
        found = local_parts(shape, cuts, indices)
        if not found:
            return None
        return cls(shape, tuple(map(tuple, cuts)), found, replica_id, kind)

    def shards(self, key: str, local: torch.Tensor, *, flat: bool) -> list[ShardedTensor]:
        """The sharded tensors of this rank, over the local tensor's memory."""
        if not math.prod(self.shape):
            whole = local.new_empty(self.shape)
            return [self.kind.from_rank_offsets(key, whole, replica_id=self.replica_id)]
        axes = [summary(n, cuts) for n, cuts in zip(self.shape, self.cuts, strict=True)]
        if flat and self._cells_are_tiny(local.element_size()):
            return [self._flat(key, local, part) for part in self.parts]
        fragments: tuple[int, ...] | None = None
        if all(axis.fragments is not None for axis in axes):
            fragments = tuple(axis.fragments or 1 for axis in axes)
        return [self._box(key, local, part, fragments) for part in self.parts]

    def _box(
        self, key: str, local: torch.Tensor, part: LocalPart, fragments: tuple[int, ...] | None
    ) -> ShardedTensor:
        where = tuple(
            slice(start, start + n)
            for start, n in zip(part.local_offset, part.box.shape, strict=True)
        )
        return self.kind(
            key,
            local[where],
            local.dtype,
            part.box.shape,
            self.shape,
            part.box.offset,
            fragments,
            replica_id=self.replica_id,
        )

    def _cells_are_tiny(self, itemsize: int) -> bool:
        """Whether a grid that fits all boundaries would be of very many very small chunks.

        It is so for uneven cuts of cuts (a vocabulary of 50257 over 2 x 4 ranks). Where only the
        first axis is cut, flattened ranges are the better description: their few chunks that a
        boundary cuts are put together by one rank.
        """
        if not self.cuts or not self.cuts[0] or any(self.cuts[1:]):
            return False
        first = summary(self.shape[0], self.cuts[0])
        row_bytes = math.prod(self.shape[1:]) * itemsize
        shards = math.prod(cut.parts for cut in self.cuts[0])
        cells = -(-self.shape[0] // first.edge)
        return first.edge * row_bytes < SMALL_CELL_BYTES and cells > CELLS_PER_SHARD * shards

    def _flat(self, key: str, local: torch.Tensor, part: LocalPart) -> ShardedTensor:
        row = math.prod(self.shape[1:])
        start, stop = part.box.offset[0] * row, part.box.end[0] * row
        first = part.local_offset[0]
        return self.kind(
            key,
            local[first : first + part.box.shape[0]].reshape(-1),
            local.dtype,
            self.shape,
            self.shape,
            (0,) * len(self.shape),
            (1,) * len(self.shape),
            replica_id=self.replica_id,
            flattened_range=slice(start, stop),
        )
