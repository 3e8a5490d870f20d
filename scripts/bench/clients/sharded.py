"""Sharded state dicts for the two clients that share the vocabulary of core.dist_checkpointing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from bench.clients.base import Share


def sharded_state_dict(mapping: ModuleType, share: Share) -> dict[str, Any]:
    """The share as ShardedTensors of `mapping`, with one plain value beside them.

    Args:
        mapping: `shardstore.mapping` or `megatron.core.dist_checkpointing.mapping`.
        share: what this rank holds.
    """
    kind = mapping.ShardedTensor
    state: dict[str, Any] = {"iteration": 1}
    for entry in share.entries:
        data = share.tensors[entry.key]
        if entry.flat is not None:
            state[entry.key] = kind.from_rank_offsets_flat(
                entry.key, data, entry.global_shape, flattened_range=slice(*entry.flat)
            )
        elif entry.axis is None:
            state[entry.key] = kind.from_rank_offsets(entry.key, data, replica_id=share.rank)
        else:
            place = (entry.axis, share.rank, share.world)
            state[entry.key] = kind.from_rank_offsets(entry.key, data, place)
    return state
