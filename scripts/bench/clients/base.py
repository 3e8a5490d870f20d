"""What the benchmark asks of a client, and the sync that peers without one are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bench.disk_state import sync_file_system
from bench.workload import Entry


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds: the entries with their tensors, and its place among the ranks."""

    entries: Sequence[Entry]
    tensors: dict[str, torch.Tensor]
    rank: int
    world: int


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


def sync_once(path: Path) -> None:
    """One sync for all ranks: wait for their writes, then rank 0 syncs the file system."""
    dist.barrier()
    if dist.get_rank() == 0:
        sync_file_system(path)
    dist.barrier()
