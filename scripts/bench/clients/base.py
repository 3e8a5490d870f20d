"""What the benchmark asks of a client, and what several clients need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

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


class Client(Protocol):
    """Saves and loads a share; every rank calls each method with the same path.

    `prepare` is not timed. `save` returns when all bytes of this rank are written, and after one
    sync of what all ranks wrote if `sync` is true. `load` fills the share's own tensors, or
    returns new ones where the client cannot read into given memory.
    """

    settings: str

    def prepare(self, share: Share) -> Any:
        """The state dict in the client's own terms."""

    def save(self, prepared: Any, path: Path, sync: bool) -> None:
        """Write a checkpoint to `path`, which does not exist yet."""

    def load(self, prepared: Any, path: Path) -> dict[str, torch.Tensor] | None:
        """Read it back into the prepared tensors, or return what was read."""


class Saving(Protocol):
    """A save in the background; a future, or an `AsyncSave`."""

    def done(self) -> bool:
        """Whether everything is on the disk."""

    def result(self) -> Any:
        """Wait until everything is on the disk; raises what went wrong."""


class BackgroundClient(Protocol):
    """Saves in the background."""

    settings: str

    def prepare(self, share: Share) -> Any:
        """The state dict in the client's own terms."""

    def start(self, prepared: Any, path: Path) -> Saving:
        """Start a durable save; the time that this takes is the stall."""


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
