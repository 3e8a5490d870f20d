"""Who holds what of one tensor or object: all ranks agree, and main replicas cover it exactly once.

Checks the shards of one key over all ranks. :mod:`shardstore.coverage.tiling` has the geometry.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from shardstore.coverage.tiling import find_range_fault, find_tiling_fault
from shardstore.errors import AccessPatternError, DTypeMismatchError, ShapeMismatchError
from shardstore.mapping import ShardedObject, ShardedTensor, is_main_replica

__all__ = ["check_access"]


def check_access(global_metadata: Sequence[Sequence[ShardedTensor | ShardedObject]]) -> None:
    """Check that the main replicas of all ranks cover every tensor and object exactly once.

    Any rank may call it; it waits for nobody. Time is near linear in the number of shards.

    Args:
        global_metadata: shards without data of every rank, by rank.

    Raises:
        AccessPatternError: a part is covered twice or not at all; the text names key, region and
            ranks.
        ShapeMismatchError, DTypeMismatchError: ranks do not describe the same global tensor.
    """
    tensors: dict[str, list[tuple[int, ShardedTensor]]] = defaultdict(list)
    objects: dict[str, list[tuple[int, ShardedObject]]] = defaultdict(list)
    for rank, items in enumerate(global_metadata):
        for item in items:
            if isinstance(item, ShardedTensor):
                tensors[item.key].append((rank, item))
            else:
                objects[item.key].append((rank, item))
    for key in sorted(tensors.keys() & objects.keys()):
        raise AccessPatternError(
            f"Invalid access pattern: {key!r} is a ShardedTensor on ranks "
            f"{_ranks(tensors[key])} and a ShardedObject on ranks {_ranks(objects[key])}; "
            f"rename one",
            key=key,
        )
    for sharding in tensors.values():
        _validate_sharding_for_key(sharding)
    for sharded_objects in objects.values():
        _validate_objects_for_key(sharded_objects)


def _validate_sharding_for_key(rank_sharding: list[tuple[int, ShardedTensor]]) -> None:
    """Check one tensor: ranks agree about it, and its main replicas tile it."""
    _validate_agreement(rank_sharding)
    mains = [(rank, ten) for rank, ten in rank_sharding if is_main_replica(ten.replica_id)]
    # Flat ranges of one box count as one tile of the global tensor and are checked within it.
    tiles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, ShardedTensor]]] = {}
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    owners: list[list[tuple[int, ShardedTensor]]] = []
    for rank, ten in mains:
        box = (ten.global_offset, (1,) * ten.prepend_axis_num + tuple(ten.local_shape))
        if ten.flattened_range is not None and box in tiles:
            tiles[box].append((rank, ten))
            continue
        members = [(rank, ten)]
        if ten.flattened_range is not None:
            tiles[box] = members
        boxes.append(box)
        owners.append(members)

    sample = rank_sharding[0][1]
    ndim = len(sample.global_shape)
    fault = find_tiling_fault(
        np.array([offset for offset, _ in boxes], dtype=np.int64).reshape(len(boxes), ndim),
        np.array([shape for _, shape in boxes], dtype=np.int64).reshape(len(boxes), ndim),
        sample.global_shape,
    )
    if fault is not None:
        concerned = [one for number in fault.shards for one in owners[number]]
        held = (
            f"has {len(concerned)} main replicas, on ranks {_ranks(concerned)}"
            if concerned
            else "has no main replica on any rank"
        )
        raise AccessPatternError(
            f"Invalid access pattern for {sample.key!r}, of global shape {sample.global_shape} and "
            f"held by ranks {_ranks(rank_sharding)}: the region at offset {fault.offset} of shape "
            f"{fault.shape} {held}. Each element must belong to exactly one shard with replica_id "
            f"0; check offsets and replica ids. One of the shards: {sample.without_data()}",
            key=sample.key,
            rank=concerned[0][0] if concerned else None,
        )
    for members in tiles.values():
        _validate_sharding_for_key_flattened(members)


def _validate_agreement(rank_sharding: list[tuple[int, ShardedTensor]]) -> None:
    """All ranks, replicas included, describe one and the same global tensor."""
    first_rank, first = rank_sharding[0]
    regular = first.axis_fragmentations is not None
    for rank, ten in rank_sharding[1:]:
        sides = f"on rank {first_rank} and {{}} on rank {rank}; ranks must agree"
        if ten.dtype != first.dtype:
            raise DTypeMismatchError(
                f"{ten.key!r} has dtype {first.dtype} {sides.format(ten.dtype)}",
                key=ten.key,
                rank=rank,
            )
        if tuple(ten.global_shape) != tuple(first.global_shape):
            raise ShapeMismatchError(
                f"{ten.key!r} has global shape {first.global_shape} "
                f"{sides.format(ten.global_shape)}",
                key=ten.key,
                rank=rank,
            )
        if (ten.axis_fragmentations is not None) != regular:
            raise AccessPatternError(
                f"Invalid access pattern: {ten.key!r} has axis_fragmentations "
                f"{first.axis_fragmentations} {sides.format(ten.axis_fragmentations)} about "
                f"whether the grid is regular",
                key=ten.key,
                rank=rank,
            )
    for rank, ten in rank_sharding:
        shape = (1,) * ten.prepend_axis_num + tuple(ten.local_shape)
        for offset, length, limit in zip(ten.global_offset, shape, ten.global_shape, strict=True):
            if offset < 0 or offset + length > limit:
                raise AccessPatternError(
                    f"Invalid access pattern for {ten.key!r}: the shard of rank {rank} at offset "
                    f"{ten.global_offset} of shape {shape} reaches outside the global shape "
                    f"{ten.global_shape}",
                    key=ten.key,
                    rank=rank,
                )


def _validate_sharding_for_key_flattened(
    tensors_by_shard: Sequence[tuple[int, ShardedTensor]],
) -> None:
    """Check that the flat ranges of one shard cover it exactly once."""
    _, sample = tensors_by_shard[0]
    size = math.prod(sample.local_shape)
    ranges = []
    for _, ten in tensors_by_shard:
        assert ten.flattened_range is not None
        ranges.append((int(ten.flattened_range.start), int(ten.flattened_range.stop)))
    fault = find_range_fault(ranges, size)
    if fault is None:
        return
    concerned = [tensors_by_shard[number] for number in fault.shards]
    held = (
        f"is held {len(concerned)} times, by ranks {_ranks(concerned)}"
        if concerned
        else "is held by no rank"
    )
    raise AccessPatternError(
        f"Flattened ranges dont cover the whole shard {sample.without_data()} of {size} elements "
        f"exactly once: elements {fault.offset[0]} to {fault.offset[0] + fault.shape[0]} of the "
        f"shard of {sample.key!r} at offset {sample.global_offset} "
        f"{held} (main replicas alone count). Invalid access pattern",
        key=sample.key,
        rank=concerned[0][0] if concerned else None,
    )


def _compute_shards_access(
    rank_sharding: Iterable[tuple[int, ShardedTensor]],
) -> torch.Tensor:
    """How many main replicas each cell of a regular grid has, as an int32 tensor over the grid."""
    access = torch.empty(0, dtype=torch.int32)
    for number, (_, ten) in enumerate(rank_sharding):
        if number == 0:
            access = torch.zeros(ten.axis_fragmentations or (), dtype=torch.int32)
        if is_main_replica(ten.replica_id):
            access[ten.local_chunk_offset_in_global()] += 1
    return access


def _validate_objects_for_key(sharded_objects: list[tuple[int, ShardedObject]]) -> None:
    """Check that each element of a global object has exactly one main replica."""
    _, first = sharded_objects[0]
    ranks_by_shard: Mapping[str, list[tuple[int, ShardedObject]]] = defaultdict(list)
    for rank, item in sharded_objects:
        if tuple(item.global_shape) != tuple(first.global_shape):
            raise ShapeMismatchError(
                f"Ranks do not agree about the global shape of ShardedObject {item.key!r}: "
                f"{first.global_shape} on rank {sharded_objects[0][0]}, {item.global_shape} on "
                f"rank {rank}",
                key=item.key,
                rank=rank,
            )
        if is_main_replica(item.replica_id):
            ranks_by_shard[item.unique_key].append((rank, item))
    duplicates = {k: _ranks(held) for k, held in ranks_by_shard.items() if len(held) > 1}
    if duplicates:
        shown = "; ".join(f"{k} on ranks {ranks}" for k, ranks in duplicates.items())
        raise AccessPatternError(
            f"Duplicate ShardedObject keys: {sorted(duplicates)}. Invalid access pattern: {shown} "
            f"all with replica_id 0; give the copies different replica ids",
            key=first.key,
            rank=next(iter(duplicates.values()))[0],
        )
    missing = math.prod(first.global_shape) - len(ranks_by_shard)
    if missing:
        raise AccessPatternError(
            f"Invalid access pattern: {missing} ShardedObject are missing of {first.key!r}, of "
            f"global shape {first.global_shape}. There are main replicas of: "
            f"{sorted(ranks_by_shard)}",
            key=first.key,
        )


def _ranks(held: Iterable[tuple[int, object]]) -> list[int]:
    """The ranks among ``(rank, shard)`` pairs, at most a handful of them."""
    ranks = sorted({rank for rank, _ in held})
    return ranks if len(ranks) <= 16 else ranks[:16]
