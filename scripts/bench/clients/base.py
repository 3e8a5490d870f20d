"""What several clients need.

A client has `settings`, words for the page, and methods that every rank calls with the same path:

- `prepare(share)` makes the client's state, and is not timed.
- `save(prepared, path, sync)` returns when this rank has written its bytes, and with `sync` after
  one sync of what all ranks wrote.
- `load(prepared, path)` fills the share's own tensors, or returns new ones where the client cannot
  read into given memory.
- `start(prepared, path)` starts a durable save in the background, and returns an object with `done`
  and `result`. Its own time is the stall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench.workload import Entry
from testing.machine import sync_file_system


@dataclass(frozen=True)
class Share:
    """What one rank holds: the entries with their tensors, and its place among the ranks."""

    entries: Sequence[Entry]
    tensors: dict[str, torch.Tensor]
    rank: int
    world: int

    def writes(self, entry: Entry) -> bool:
        """Whether this rank writes the entry, where each client has one writer a tensor."""
        return self.rank == 0 or not entry.replicated


def sync_once(path: Path) -> None:
    """One sync for all ranks: wait for their writes, then rank 0 syncs the file system."""
    dist.barrier()
    if dist.get_rank() == 0:
        sync_file_system(path)
    dist.barrier()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


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
