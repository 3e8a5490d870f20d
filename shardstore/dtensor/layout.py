"""How one DTensor lies on its mesh, and the sharded tensors that stand for this rank's part of it:
its cuts, its replicas, boxes or flattened ranges, and where it is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from shardstore.distributed.groups import group_size
from shardstore.dtensor.claims import ClaimedTensor
from shardstore.dtensor.mesh import AxisCut, LocalPart, local_parts, summary
from shardstore.errors import AccessPatternError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["sharded_from_dtensor"]

SMALL_CELL_BYTES = 64 * 1024
CELLS_PER_SHARD = 64


def sharded_from_dtensor(key: str, tensor: DTensor, loading: bool) -> Any:
    """What stands for a DTensor: a factory that gives its parts and takes the DTensor back.

    Args:
        key: of the tensor.
        tensor: the DTensor; on the meta device one is made on its mesh's device when loading.
        loading: whether its values are to be read, not written.

    Raises:
        AccessPatternError: a placement is neither a shard nor a replica.
    """
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
    if _order(tensor) != list(range(tensor.device_mesh.ndim)):
        raise AccessPatternError(
            "a DTensor on the meta device is cut by the dimensions of its mesh in an order of its "
            f"own ({_spec_of(tensor).shard_order}), of which none can be made; load into one that "
            "has memory (torch.empty_like(tensor, device=...))"
        )
    made = Kind.from_local(
        fresh,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return fresh, made


def _spec_of(tensor: DTensor) -> Any:
    return cast(Any, tensor)._spec


def _order(tensor: DTensor) -> list[int]:
    """The dimensions of the mesh, those that cut an axis in the order in which they cut it.

    That is from left to right, unless the DTensor says otherwise (torch 2.10 and later,
    ``DTensorSpec.shard_order``). Strided shards say it by their stride, and go from left to right.
    """
    order = list(range(tensor.device_mesh.ndim))
    if any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return order
    for entry in getattr(_spec_of(tensor), "shard_order", None) or ():
        for place, dim in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[place] = dim
    return order


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
        kind = ShardedTensor if tensor.device_mesh.size() == group_size(None) else ClaimedTensor
        cuts: list[list[AxisCut]] = [[] for _ in shape]
        indices: list[list[int]] = [[] for _ in shape]
        replica: list[int] = []
        sizes = tuple(tensor.device_mesh.shape)
        placed = list(zip(sizes, coordinate, tensor.placements, strict=True))
        for parts, index, placement in (placed[dim] for dim in _order(tensor)):
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
