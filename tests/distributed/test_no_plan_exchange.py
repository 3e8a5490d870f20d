"""What ranks tell each other before bytes move does not grow with what they save."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.distributed.coordinator import Ranks
from shardstore.mapping import ShardedTensor
from shardstore.storage.movers.files import FolderMover
from tests.helpers.ranks_helper import run_ranks

WORLD = 3
COLLECTIVES = ("all_gather_object", "gather_object", "all_gather", "all_to_all", "all_reduce")


def _told(rank: int, world: int, folder: str, tensors: int, flat: bool) -> tuple[int, bool]:
    """Bytes that went either way until the first chunk was written, and whether any was."""
    state: dict[str, Any] = {}
    for i in range(tensors):
        data = torch.full((4, 6), float(i))
        state[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", data, (0, rank, world))
        if flat:
            state[f"f{i}"] = ShardedTensor.from_rank_offsets_flat(
                f"f{i}", torch.ones(3), (3 * world,), flattened_range=slice(3 * rank, 3 * rank + 3)
            )
    told, written = 0, False
    together, write = Ranks.together, FolderMover.write

    def counting(ranks: Ranks, report: Any = None, **about: Any) -> Any:
        nonlocal told
        answer = together(ranks, report, **about)
        told += 0 if written else len(pickle.dumps(report)) + len(pickle.dumps(answer))
        return answer

    def writing(mover: FolderMover, writes: Any, *others: Any) -> None:
        nonlocal written
        written = written or bool(writes)
        write(mover, writes, *others)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of torch's")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "together", counting)
        patch.setattr(FolderMover, "write", writing)
        for name in COLLECTIVES:
            patch.setattr(dist, name, never)
        shardstore.save(state, f"{folder}/{tensors}-{flat}")
    return told, written


def _all(rank: int, world: int, folder: str) -> list[tuple[int, bool]]:
    return [
        _told(rank, world, folder, tensors, flat) for flat in (False, True) for tensors in (1, 100)
    ]


def test_only_flattened_ranges_are_told_before_bytes_move(tmp_path: Path) -> None:
    for found in run_ranks(_all, WORLD, str(tmp_path)):
        assert all(written for _, written in found)
        one, many, flat_one, flat_many = (told for told, _ in found)
        # The place has one name of three characters more; nothing else may differ.
        assert abs(many - one) <= 16
        assert one < 4096
        assert flat_many > flat_one + 100
