"""The helper that spawns ranks must not swallow what happens on them."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.ranks_helper import RankFailed, run_ranks


def _raise_on_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("said rank 1")
    dist.barrier()


def _die_on_0(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(3)
    return rank


def _double(rank: int, world_size: int, number: int) -> tuple[int, int]:
    return rank, number * world_size


def test_results_come_back_by_rank() -> None:
    assert run_ranks(_double, 2, 21) == [(0, 42), (1, 42)]


def test_the_first_exception_is_raised_with_the_tracebacks() -> None:
    with pytest.raises(KeyError, match="said rank 1") as caught:
        run_ranks(_raise_on_1, 2, timeout_s=60)
    assert any("_raise_on_1" in note for note in caught.value.__notes__)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0 died with exit code 3"):
        run_ranks(_die_on_0, 2, timeout_s=60)
