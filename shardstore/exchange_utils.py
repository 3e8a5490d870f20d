"""Distribute the shards of a process group over its ranks, and exchange loaded shards.

All rank numbers are numbers within the group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from shardstore.distributed.groups import (
    Group,
    broadcast_bytes,
    gathered,
    group_rank,
    group_size,
    raise_together,
)
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedStateDict, ShardedTensor, data_shape, is_main_replica
from shardstore.utils import _sharded_tensor_shard_id, _ShardId, sharded_tensors_of

T = TypeVar("T", bound=Hashable)


class ShardDistribution(NamedTuple):
    """The distribution of shards over the ranks of a group, for a save or a load.

    Attributes:
        main_rank_for_shard: shard -> the rank (in the group) that saves or loads it.
        shards_in_this_group: shards that this group saves or loads.
        shard_to_metadata: shard -> ShardedTensor without data, for all shards that any rank holds.
        all_ranks_for_shard: shard -> the ranks (in the group) that hold it, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def distribute_shards_to_ranks(
    shard_to_ranks: dict[T, list[int]],
    shard_to_size: dict[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: set[T],
) -> dict[T, int]:
    """Assign each shard to one of the ranks that hold it, with about equal bytes for each rank.

    The algorithm is greedy and deterministic: shards with the fewest candidates come first, then
    the largest, then the order is that of shard ids. Each shard goes to the candidate with the
    fewest bytes, and among equal candidates to the one with the lowest number.

    Args:
        shard_to_ranks: shard -> ranks that hold it; no list is empty.
        shard_to_size: shard -> size in bytes.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: shards of other groups; they are assigned last.

    Returns:
        Shard -> rank, in the order of the assignment.

    Raises:
        CheckpointingException: no rank holds a shard.
    """
    load_bytes = [0] * num_ranks
    assignment: dict[T, int] = {}

    def order(shard: T) -> tuple[bool, int, int, Any]:
        return (
            shard in cross_parallelization_group_loads,
            len(shard_to_ranks[shard]),
            -shard_to_size[shard],
            _orderable(shard),
        )

    for shard in sorted(shard_to_ranks, key=order):
        candidates = shard_to_ranks[shard]
        if not candidates:
            raise CheckpointingException(f"No rank holds shard {shard!r}; name a rank that does")
        rank = min(candidates, key=lambda candidate: (load_bytes[candidate], candidate))
        assignment[shard] = rank
        load_bytes[rank] += shard_to_size[shard]
    return assignment


def _orderable(shard_id: Any) -> Any:
    """Return a sort key of a shard id; a whole shard (None) comes before its flattened ranges."""
    if shard_id is None:
        return ()
    if isinstance(shard_id, tuple):
        return tuple(_orderable(part) for part in shard_id)
    return shard_id


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict, parallelization_group: Group, ignore_groups: bool = False
) -> ShardDistribution | None:
    """Distribute the shards of a group over its ranks by size.

    Every rank of the group calls it and waits for the others (one gather of descriptions).

    Args:
        sharded_state_dict: this rank's state dict; only its ShardedTensors are used.
        parallelization_group: ranks that share the work; None for all.
        ignore_groups: also distribute shards whose main replica is in another group. Loads need
            this; in a save only one group may write a shard.

    Returns:
        The distribution, equal on all ranks; None for a group of one rank.
    """
    if group_size(parallelization_group) <= 1:
        return None
    local = [tensor.without_data() for tensor in sharded_tensors_of(sharded_state_dict)]
    by_rank = gathered(local, parallelization_group)

    ranks: dict[_ShardId, list[int]] = {}
    metadata: dict[_ShardId, ShardedTensor] = {}
    in_group: set[_ShardId] = set()
    for rank, shards in enumerate(by_rank):
        for sh_ten in shards:
            shard_id = _sharded_tensor_shard_id(sh_ten)
            metadata.setdefault(shard_id, sh_ten)
            holders = ranks.setdefault(shard_id, [])
            if not holders or holders[-1] != rank:
                holders.append(rank)
            if is_main_replica(sh_ten.replica_id):
                in_group.add(shard_id)
    elsewhere = set(ranks) - in_group if ignore_groups else set()
    in_group |= elsewhere
    ranks = {shard_id: holders for shard_id, holders in ranks.items() if shard_id in in_group}
    sizes = {
        shard_id: math.prod(data_shape(metadata[shard_id])) * metadata[shard_id].dtype.itemsize
        for shard_id in ranks
    }
    main_ranks = distribute_shards_to_ranks(ranks, sizes, len(by_rank), elsewhere)
    return ShardDistribution(main_ranks, in_group, metadata, ranks)


def exchange_by_distribution(
    loaded_tensors: Mapping[_ShardId, torch.Tensor],
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: Group = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """Send the tensors that each rank loaded to the ranks that hold the same shard.

    Every rank of the group calls it with the same distribution and waits for all others: one
    broadcast for each shard that several ranks hold. It needs memory for the results and for the
    largest shard that this rank does not hold.

    Args:
        loaded_tensors: tensors that this rank loaded.
        unloaded_shards: shards that other ranks loaded for this rank. They are received into the
            ``data`` of a shard if it is contiguous.
        shard_distribution: the rank that loaded each shard.
        parallelization_group: ranks of the exchange; None for all.
        exchange_algo: ``"broadcast"``; ``"gather_rounds"`` and ``"gather_object"`` do the same.

    Returns:
        Shard id -> tensor that this rank loaded or received.

    Raises:
        NotImplementedError: there is no such algorithm.
        RanksError: on some rank, a loaded tensor does not match the shard's description or is
            missing; raised on every rank of the group.
    """
    require_known(exchange_algo)
    described = shard_distribution.shard_to_metadata
    main_ranks, rank = shard_distribution.main_rank_for_shard, group_rank(parallelization_group)
    shared = [key for key in main_ranks if len(shard_distribution.all_ranks_for_shard[key]) > 1]
    with raise_together(parallelization_group, "Exchange of loaded tensors"):
        found = {key: (item.dtype, data_shape(item)) for key, item in unloaded_shards.items()}
        found |= {key: (item.dtype, tuple(item.shape)) for key, item in loaded_tensors.items()}
        for shard_id in unloaded_shards.keys() - main_ranks.keys():
            raise CheckpointingException(
                f"{shard_id} is wanted, but the distribution names no rank that loads it"
            )
        for shard_id in shared:
            form = described[shard_id].dtype, data_shape(described[shard_id])
            is_here = shard_id in found or main_ranks[shard_id] == rank
            if is_here and found.get(shard_id) != form:
                verb = "was loaded" if main_ranks[shard_id] == rank else "is wanted"
                raise CheckpointingException(
                    f"{shard_id} {verb} as {found.get(shard_id)}, described as {form}"
                )
    results = dict(loaded_tensors)
    for shard_id in shared:
        tensor = loaded_tensors.get(shard_id)
        if tensor is None:
            wanted = unloaded_shards.get(shard_id, described[shard_id])
            tensor = wanted.data
            if tensor is None or tensor.is_meta or not tensor.is_contiguous():
                tensor = torch.empty(data_shape(wanted), dtype=wanted.dtype, device="cpu")
        # Not reshape, because a single element with a stride cannot be viewed as bytes.
        flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
        broadcast_bytes(flat.view(torch.uint8), main_ranks[shard_id], parallelization_group)
        if shard_id in unloaded_shards:
            results[shard_id] = tensor
    return results


exchange_loaded_tensors_broadcast = exchange_by_distribution
exchange_loaded_tensors_gather_rounds = exchange_by_distribution
exchange_loaded_tensors_gather_object = exchange_by_distribution


def require_known(exchange_algo: str) -> None:
    """Raise :class:`NotImplementedError` for an unknown exchange algorithm."""
    known = ("broadcast", "gather_rounds", "gather_object")
    if exchange_algo not in known:
        raise NotImplementedError(
            f"Unknown exchange algorithm {exchange_algo!r}; give one of {', '.join(known)}"
        )


def exchange_loaded_objects_gather_object(
    loaded_objects: dict[_ShardId, Any],
) -> dict[_ShardId, Any]:
    """Gather the objects that all ranks of the default process group loaded, on every rank.

    Every rank calls it and waits for all others.

    Args:
        loaded_objects: objects that this rank loaded.

    Returns:
        Objects that all ranks loaded.

    Raises:
        CheckpointingException: two ranks loaded the same object; raised on every rank.
    """
    by_rank = gathered(loaded_objects)
    results: dict[_ShardId, Any] = {}
    for rank, received in enumerate(by_rank):
        for shard_id in received.keys() & results.keys():
            first = next(r for r, loaded in enumerate(by_rank) if shard_id in loaded)
            raise CheckpointingException(
                f"Ranks {first} and {rank} both loaded {shard_id}: one object has one main "
                "replica; give the copies different replica ids",
                key=str(shard_id[0]),
            )
        results.update(received)
    return results
