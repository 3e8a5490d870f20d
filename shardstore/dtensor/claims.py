"""Who writes a shard that several ranks hold and none can know of by itself.

A mesh says which of its ranks hold copies of a shard. What it does not say is what the ranks
outside of it hold: another copy (a norm sharded over the data-parallel ranks of each
tensor-parallel one), or nothing (another pipeline stage). So where a mesh is not the whole world,
the ranks tell each other what they hold, and the lowest one that holds a shard writes it. What is
said travels with a save's own exchanges; nothing is sent here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardstore.dict_utils import nested_values
from shardstore.distributed.groups import group_rank
from shardstore.mapping import ShardedStateDict, ShardedTensor, is_main_replica

__all__ = ["ClaimedTensor", "apply_claims", "claims", "decide_claims"]


@dataclass
class ClaimedTensor(ShardedTensor):
    """A sharded tensor that ranks unknown to this one may hold too, as the same replica."""


def _identity(tensor: ShardedTensor) -> tuple[Any, ...]:
    flat = tensor.flattened_range
    bounds = None if flat is None else (flat.start, flat.stop)
    return tensor.key, tensor.global_offset, tensor.local_shape, bounds


def _claimed(state: Any) -> list[ClaimedTensor]:
    return [value for value in nested_values(state) if isinstance(value, ClaimedTensor)]


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
    rank = group_rank(None)
    for tensor in _claimed(state):
        if _is_first_copy(tensor) and owners.get(_identity(tensor), rank) != rank:
            tensor.replica_id = rank + 1
