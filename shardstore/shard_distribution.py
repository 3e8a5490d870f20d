"""Sharing out shards that several ranks hold: who of a process group saves or loads which.

Answers for a distribution by size that is computed alike on every rank. Knows nothing of files or
strategies. Ranks are numbered within the group. Public as :mod:`shardstore.exchange_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from shardstore.dict_utils import nested_values
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from shardstore.process_groups import Group, group_size
from shardstore.utils import _sharded_tensor_shard_id, _ShardId

__all__ = [
    "ShardDistribution",
    "data_shape",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
]

T = TypeVar("T", bound=Hashable)


class ShardDistribution(NamedTuple):
    """Which rank of a group saves or loads which shard.

    Attributes:
        main_rank_for_shard: shard -> the rank (in the group) that saves or loads it.
        shards_in_this_group: shards that this group is responsible for.
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
    """Give each shard to one of the ranks that hold it, so that the bytes are spread evenly.

    Greedy and deterministic: shards with the fewest candidates first, then the largest, then by
    shard id, each to the candidate with the least so far (the lowest number among equals).

    Args:
        shard_to_ranks: shard -> ranks that hold it, none of them empty.
        shard_to_size: shard -> size in bytes.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: shards that other groups are responsible for; they come
            after all others, so that they even out what is left.

    Returns:
        Shard -> rank, in the order in which the shards were given out.

    Raises:
        CheckpointingException: a shard has no candidate.
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
            raise CheckpointingException(f"No rank holds shard {shard!r}, so none can be given it")
        rank = min(candidates, key=lambda candidate: (load_bytes[candidate], candidate))
        assignment[shard] = rank
        load_bytes[rank] += shard_to_size[shard]
    return assignment


def _orderable(shard_id: Any) -> Any:
    """A shard id in a form that compares: a whole shard (None) comes before its flat ranges."""
    if shard_id is None:
        return ()
    if isinstance(shard_id, tuple):
        return tuple(_orderable(part) for part in shard_id)
    return shard_id


def _shard_size(sh_ten: ShardedTensor) -> int:
    """Bytes of a shard's data."""
    return math.prod(data_shape(sh_ten)) * sh_ten.dtype.itemsize


def data_shape(sh_ten: ShardedTensor) -> tuple[int, ...]:
    """Shape of a shard's local data: flat for a flattened range."""
    if sh_ten.flattened_range is not None:
        start, stop, _ = sh_ten.flattened_range.indices(math.prod(sh_ten.local_shape))
        return (max(0, stop - start),)
    return tuple(sh_ten.local_shape)


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Group,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Share the shards of a group out among its ranks by size.

    Every rank of the group calls it and waits for the others (one gather of descriptions).

    Args:
        sharded_state_dict: this rank's state dict; leaves other than ShardedTensors are ignored.
        parallelization_group: ranks that share the work; None for all.
        ignore_groups: share out every shard, also those whose main replica is in another group.
            That is what loading needs; for saving only one group may write a shard.

    Returns:
        The distribution, equal on all ranks, or None for a group of one rank.
    """
    if group_size(parallelization_group) <= 1:
        return None
    local = [
        value.without_data()
        for value in nested_values(sharded_state_dict)
        if isinstance(value, ShardedTensor)
    ]
    by_rank: list[list[ShardedTensor]] = [[] for _ in range(group_size(parallelization_group))]
    torch.distributed.all_gather_object(by_rank, local, group=parallelization_group)

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
    elsewhere = set(ranks) - in_group
    if ignore_groups:
        in_group = set(ranks)
    ranks = {shard_id: holders for shard_id, holders in ranks.items() if shard_id in in_group}
    main_ranks = distribute_shards_to_ranks(
        ranks,
        {shard_id: _shard_size(metadata[shard_id]) for shard_id in ranks},
        len(by_rank),
        elsewhere if ignore_groups else set(),
    )
    return ShardDistribution(main_ranks, in_group, metadata, ranks)
