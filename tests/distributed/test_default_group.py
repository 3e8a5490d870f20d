"""The default process group may move no CPU tensors, as one of NCCL alone: saves and loads need its
store, and nothing else of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.mapping import ShardedTensor
from tests.helpers.ranks_helper import join, run_ranks

WORLD = 3


def _saves_and_loads(rank: int, world: int, folder: str) -> list[float]:
    dist.destroy_process_group()
    join(f"{folder}/rendezvous", rank, world, backend="cuda:gloo")
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))

    def state(value: float) -> dict[str, ShardedTensor]:
        part = slice(5 * rank, 5 * rank + 5)
        flat = torch.full((5,), value)
        return {
            "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value), (0, rank, world)),
            "f": ShardedTensor.from_rank_offsets_flat("f", flat, (15,), flattened_range=part),
        }

    shardstore.save(state(float(rank)), f"{folder}/c")
    shardstore.async_save(state(float(rank)), f"{folder}/a").result(60)
    loaded = shardstore.load(state(-1.0), f"{folder}/c")
    shardstore.load(state(-1.0), f"{folder}/a")
    return [loaded["w"][0].item(), loaded["f"][0].item()]


def test_a_default_group_without_cpu_tensors(tmp_path: Path) -> None:
    found = run_ranks(_saves_and_loads, WORLD, str(tmp_path))
    assert found == [[rank, rank] for rank in range(WORLD)]
