"""Describe the part of a DTensor that this rank holds, as sharded tensors.

Placements apply to the mesh's dimensions from left to right, as in ``torch.distributed.tensor``.
``Shard`` cuts the held part by the rule of ``torch.chunk``. ``_StridedShard`` first cuts it into
``split_factor`` blocks and then cuts each block, so that a coordinate may hold several runs of an
axis. Every rank computes the parts of all ranks without communication.

A mesh defines which of its ranks hold copies of a shard. Ranks outside the mesh may hold another
copy (a norm sharded over the data-parallel ranks of each tensor-parallel rank), or nothing (another
pipeline stage). So unless the mesh has exactly the ranks of the save or load, these exchange the
shards that they hold (:func:`claims`, sent with the reports of a save), and the first rank that
holds a shard writes it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch

from shardstore import mapping
from shardstore.coverage import as_flat_range
from shardstore.errors import AccessPatternError, ArgumentError, DTypeMismatchError
from shardstore.state_dict_utils import HeldShards, is_dtensor
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, Shape, grid_of
from shardstore.utils import _sharded_tensor_shard_id, _ShardId

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Runs ``(start, length)`` of an axis, in the order of the local tensor."""


ANY_RANKS = frozenset({-1})
"""The holders of a shard of which nobody knows who holds it; see :class:`ClaimedTensor`."""


class AxisCut(NamedTuple):
    """One dimension of a mesh that cuts an axis.

    Attributes:
        parts: size of the mesh along the dimension.
        split_factor: 1 for ``Shard``; for ``_StridedShard`` see the module docstring.
    """

    parts: int
    split_factor: int = 1


@lru_cache(maxsize=4096)
def held(length: int, cuts: tuple[AxisCut, ...], indices: tuple[int, ...]) -> Runs:
    """Return the runs of an axis that a coordinate of the mesh holds.

    Args:
        length: length of the axis.
        cuts: the mesh dimensions that cut it, from left to right.
        indices: the coordinate along each of them.
    """
    runs = [(0, length)] if length else []
    for cut, index in zip(cuts, indices, strict=True):
        total = sum(n for _, n in runs)
        block = -(-total // cut.split_factor)
        taken: list[tuple[int, int]] = []
        for start in range(0, total, max(1, block)):
            size = min(block, total - start)
            part = -(-size // cut.parts)
            low, high = (start + min(i * part, size) for i in (index, index + 1))
            for first, n in _between(runs, low, high):
                if taken and sum(taken[-1]) == first:
                    first, n = taken[-1][0], taken.pop()[1] + n
                taken.append((first, n))
        runs = taken
    return tuple(runs)


def _between(runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs at positions ``start:stop`` of the concatenated runs."""
    position = 0
    for first, length in runs:
        low, high = max(start, position), min(stop, position + length)
        if low < high:
            yield first + low - position, high - low
        position += length


@lru_cache(maxsize=4096)
def held_by_all(length: int, cuts: tuple[AxisCut, ...]) -> tuple[Runs, ...]:
    """Return the runs of an axis that each coordinate holds. The result is the same on every
    rank."""
    coordinates = itertools.product(*(range(cut.parts) for cut in cuts))
    return tuple(held(length, cuts, indices) for indices in coordinates)


@lru_cache(maxsize=4096)
def fragments(length: int, cuts: tuple[AxisCut, ...]) -> int | None:
    """Return the number of shards along an axis; ``None`` if they differ in length or have several
    runs."""
    pieces = held_by_all(length, cuts)
    even = all(len(runs) == 1 and runs[0][1] == pieces[0][0][1] for runs in pieces)
    return len(pieces) if even or not cuts else None


@lru_cache(maxsize=4096)
def is_flat(shape: tuple[int, ...], cuts: tuple[tuple[AxisCut, ...], ...], itemsize: int) -> bool:
    """Return whether the shards are saved as flattened ranges of the tensor.

    Shards are saved as ranges if the mesh cuts only the first axis, and if a grid that fits all
    boundaries would have very many very small chunks. Nested uneven cuts cause this (a vocabulary
    of 50257 over 2 x 4 ranks). With flattened ranges, few chunks contain a boundary, and one rank
    assembles each of those.
    """
    if not shape or not cuts[0] or any(cuts[1:]):
        return False
    zeros = (0,) * (len(shape) - 1)
    all_runs = itertools.chain.from_iterable(held_by_all(shape[0], cuts[0]))
    boxes = [Box((start, *zeros), (n, *shape[1:])) for start, n in all_runs]
    return grid_of(shape, boxes, itemsize, DEFAULT_TARGET_CHUNK_BYTES).straddles


def held_shards(key: str, tensor: Any, loading: bool) -> HeldShards:
    """Return the shards of a tensor that this rank holds; none if it holds no element.

    Args:
        key: key of the tensor.
        tensor: a DTensor, or a tensor that names its parts. A load replaces a DTensor on the meta
            device by a new one on its mesh's device.
        loading: whether the tensor is loaded, not saved.

    Raises:
        AccessPatternError: a placement is neither a shard nor a replica, or a tensor names its
            parts wrongly.
        ArgumentError: a tensor that names its parts is on the meta device.
        DTypeMismatchError: the local tensor is not plain memory.
    """
    if not is_dtensor(tensor):
        if tensor.is_meta:
            raise ArgumentError(
                f"key {key!r} names its parts and is on the meta device, where it has no values; "
                "make it with torch.empty_like() on another device, and name its parts there",
                key=key,
            )
        try:
            return HeldShards(tensor, _named_parts(key, tensor))
        except TypeError as error:
            text = f"key {key!r} does not name its parts as torch's CheckpointableTensor does"
            raise AccessPatternError(
                f"{text} ({error}); give tuples of whole numbers", key=key
            ) from error
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return HeldShards(tensor, ())  # This rank is not in the mesh.
    try:
        where = tuple(zip(tuple(mesh.shape), coordinate, tensor.placements, strict=True))
        part = _part(where, _order(tensor), shape)
    except AccessPatternError as error:
        raise AccessPatternError(f"key {key!r} {error}", key=key) from None
    inner, holders = cast(Any, tensor)._local_tensor, _ranks_of(mesh)
    # torch's LocalShardsWrapper and the tensors of Megatron-FSDP say themselves what they hold.
    if hasattr(inner, "__create_chunk_list__"):
        local_shards = inner.local_shards() if hasattr(inner, "local_shards") else [inner]
        found = []
        # One without shards has a chunk all the same.
        for data, chunk in zip(local_shards, inner.__create_chunk_list__(), strict=False):
            about = (data.dtype, data.shape, shape, chunk.offsets, None, part.replica_id)
            if data.numel():
                found.append(ClaimedTensor(key, data.detach(), *about, holders=holders))
        return HeldShards(tensor, found)
    is_later = inner.is_meta or hasattr(inner, "trigger_wait")
    if part.boxes and not (is_later or dtypes.is_plain(dtypes.unwrapped(inner))):
        raise DTypeMismatchError(
            f"key {key!r} is a DTensor of {type(inner).__name__}, which has no plain memory; "
            f"{dtypes.how_to_save(inner)}, where t is its to_local(), and each rank has keys of "
            "its own",
            key=key,
        )
    with torch.no_grad():  # else to_local() makes a node of the autograd graph
        local = cast(Any, tensor).to_local()
        local = (local.wait() if hasattr(local, "wait") else local).detach()
    made = tensor
    if local.is_meta and loading:
        local = torch.empty_like(local, device=mesh.device_type)
        # With the same specification: torch.empty_like(tensor) loses the order of the shards.
        made = cast(Any, type(tensor))(local, cast(Any, tensor)._spec, requires_grad=False)
    if not part.boxes:
        return HeldShards(made, ())
    local = dtypes.unwrapped(local)
    if not math.prod(shape):
        local = local.new_empty(shape)
    return HeldShards(made, _shards(key, local, shape, part, not loading, holders))


def _named_parts(key: str, tensor: Any) -> list[mapping.ShardedTensor]:
    """Return the shards of a tensor that names its parts. Several ranks may hold one."""
    parts = [tensor.global_offsets, tensor.local_offsets, tensor.local_sizes]
    counts, shape = [*map(len, parts)], tuple(tensor.global_shape)
    if len(set(counts)) > 1:
        raise AccessPatternError(
            f"key {key!r} names {counts} global_offsets, local_offsets and local_sizes; give as "
            "many of each",
            key=key,
        )
    data = dtypes.unwrapped(tensor.detach())
    if not math.prod(shape):
        parts, data = [[(0,) * len(shape)], [()], [shape]], data.new_empty(shape)
    found: list[mapping.ShardedTensor] = []
    for start, at, size in zip(*parts, strict=True):
        held = data[tuple(map(slice, at, map(operator.add, at, size)))]
        about = (held.dtype, tuple(size), shape, tuple(start), None)
        if held.numel() or not math.prod(shape):
            found.append(ClaimedTensor(key, held, *about, holders=ANY_RANKS))
    return found


class _Part(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        cuts: the mesh dimensions that cut each axis.
        fragmentations: number of equal parts of each axis; ``None`` if a cut is irregular.
        replica_id: number of this copy.
        boxes: offset and shape of each box in the tensor, and where it lies in the local tensor.
    """

    cuts: tuple[tuple[AxisCut, ...], ...]
    fragmentations: tuple[int, ...] | None
    replica_id: mapping.ReplicaId
    boxes: Sequence[tuple[Shape, Shape, tuple[slice, ...]]]

    @classmethod
    def of(
        cls,
        shape: Shape,
        cuts: tuple[tuple[AxisCut, ...], ...],
        runs: Sequence[Runs],
        replica_id: mapping.ReplicaId = 0,
    ) -> _Part:
        """Return the part with these runs of each axis."""
        counts = tuple(map(fragments, shape, cuts))
        fragmentations = None if None in counts else cast(tuple[int, ...], counts)
        boxes = [
            (
                tuple(start for start, _, _ in box),
                tuple(n for _, n, _ in box),
                tuple(slice(position, position + n) for _, n, position in box),
            )
            for box in itertools.product(*map(_with_position, runs))
        ]
        return cls(cuts, fragmentations, replica_id, boxes)


@lru_cache(maxsize=4096)
def _part(
    placed: Sequence[tuple[int, int, Placement]], order: Sequence[int], shape: Shape
) -> _Part:
    """Return what a rank holds of a DTensor. A pure function: meshes are equal where this process
    has another coordinate, as after it joined another process group.

    Args:
        placed: for each dimension of the mesh its size, the rank's coordinate, and the placement.
        order: the dimensions in the order in which they cut the axes, see :func:`_order`.
        shape: shape of the DTensor.

    Raises:
        AccessPatternError: a placement is neither a shard nor a replica.
    """
    cuts: list[list[AxisCut]] = [[] for _ in shape]
    indices: list[list[int]] = [[] for _ in shape]
    replica: list[int] = []
    for parts, index, placement in (placed[dim] for dim in order):
        axis = getattr(placement, "dim", None)
        if placement.is_replicate():
            replica.append(index)
        elif isinstance(axis, int):
            cuts[axis].append(AxisCut(parts, int(getattr(placement, "split_factor", 1))))
            indices[axis].append(index)
        else:
            raise AccessPatternError(
                f"has the placement {placement}: every rank holds only a part of a sum; "
                "redistribute it first (tensor.redistribute(placements=[Replicate()]))"
            )
    if not math.prod(shape):
        # No rank holds an element, and one rank creates the array.
        runs, cut = [((0, n),) for n in shape], ((),) * len(shape)
        return _Part.of(shape, cut, runs, tuple(index for _, index, _ in placed))
    axes = tuple(map(tuple, cuts))
    held_runs = [held(n, *of) for n, *of in zip(shape, axes, map(tuple, indices), strict=True)]
    return _Part.of(shape, axes, held_runs, tuple(replica) or 0)


def factory_of(key: str, held: HeldShards) -> Any:
    """Return a factory of the shards of a tensor that merges them back into it; a
    :class:`LocalNonpersistentObject` if this rank holds none."""
    if not held.shards:
        return mapping.LocalNonpersistentObject(held.tensor)
    with torch.no_grad():
        local = (held.tensor.to_local() if is_dtensor(held.tensor) else held.tensor).detach()
    shards = {str(number): one for number, one in enumerate(held.shards)}

    def merge(_: object) -> torch.Tensor:
        if local.is_meta:
            raise ArgumentError(
                f"{key!r}: shard() was given a DTensor on the meta device, which has no memory to "
                "load into; give load() the DTensor itself, or make it with torch.empty_like() on "
                "another device first"
            )
        return cast(torch.Tensor, held.tensor)

    return mapping.ShardedTensorFactory(key, local, lambda *_: {**shards}, merge)


@lru_cache(maxsize=64)
def _ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def _shards(
    key: str,
    local: torch.Tensor,
    shape: Shape,
    part: _Part,
    may_be_flat: bool,
    holders: frozenset[int] = frozenset(),
) -> list[mapping.ShardedTensor]:
    """Return this rank's sharded tensors, which share the local tensor's memory: one for each box,
    or flattened ranges."""
    flat = may_be_flat and is_flat(shape, part.cuts, local.element_size())
    found = []
    for start, size, where in part.boxes:
        shard = ClaimedTensor(
            key,
            local[where],
            local.dtype,
            size,
            shape,
            start,
            part.fragmentations,
            part.replica_id,
            holders=holders,
        )
        found.append(as_flat_range(shard) if flat else shard)
    return found


def _with_position(runs: Runs) -> list[tuple[int, int, int]]:
    """Return the runs, each with its start position in the local tensor."""
    positions = itertools.accumulate((n for _, n in runs), initial=0)
    return [(start, n, position) for (start, n), position in zip(runs, positions, strict=False)]


def _order(tensor: DTensor) -> tuple[int, ...]:
    """Return the dimensions of the mesh in the order in which they cut the axes.

    The order is from left to right, unless the DTensor defines another one (torch 2.10 and later,
    ``DTensorSpec.shard_order``). Strided shards express their order by the stride, so their
    dimensions stay from left to right.
    """
    order = list(range(tensor.device_mesh.ndim))
    if len(order) == 1 or any(hasattr(one, "split_factor") for one in tensor.placements):
        return tuple(order)
    for entry in getattr(cast(Any, tensor)._spec, "shard_order", None) or ():
        for place, dim in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[place] = dim
    return tuple(order)


@dataclass
class ClaimedTensor(mapping.ShardedTensor):
    """A sharded tensor that further ranks may hold, with the same replica ids.

    Attributes:
        holders: the global ranks whose replica ids differ: those of the DTensor's mesh; none for a
            plain tensor.
        writer: the rank that writes a shard that ranks claim, the first one until
            :func:`apply_claims`; ``None``: the shard is not claimed.
    """

    holders: frozenset[int] = frozenset()
    writer: int | None = None


def claimed(everyone: frozenset[int], shard: Any) -> Any:
    """Return a shard for a save or load by some ranks. If these are not its holders, return a copy,
    which is a main replica on each rank until :func:`apply_claims`."""
    if not isinstance(shard, ClaimedTensor) or shard.holders == everyone:
        return shard
    claimed = copy(shard)
    claimed.writer, claimed.replica_id = min(everyone), 0
    return claimed


def is_claimed(value: object) -> TypeGuard[ClaimedTensor]:
    """Return whether the ranks decide by their claims which of them writes a shard."""
    return isinstance(value, ClaimedTensor) and value.writer is not None


def are_adopted(found: Iterable[Any]) -> bool:
    """Return whether all shards of a state are those of DTensors and plain tensors, so that none is
    of Megatron-Core's types that the program made."""
    return all(isinstance(one, ClaimedTensor) for one in found)


def claims(shards: Iterable[Any]) -> list[_ShardId]:
    """Return the identities of the shards that this rank claims."""
    return [_sharded_tensor_shard_id(one) for one in filter(is_claimed, shards)]


def decide_claims(claimed_by: Mapping[int, Iterable[_ShardId]]) -> dict[_ShardId, int]:
    """Return the first rank that holds each shard, from the :func:`claims` by rank."""
    owners: dict[_ShardId, int] = {}
    for rank, identities in claimed_by.items():
        for identity in identities:
            owners.setdefault(identity, rank)
    return owners


def apply_claims(shards: Iterable[Any], owners: Mapping[_ShardId, int], rank: int) -> None:
    """Give the claimed shards that another rank writes a replica id other than 0, in place."""
    for tensor in filter(is_claimed, shards):
        tensor.writer = owners[_sharded_tensor_shard_id(tensor)]
        tensor.replica_id = 0 if tensor.writer == rank else rank + 1
