"""Asynchronous saves of little or nothing, one after the other, with handles that nobody keeps."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.distributed.coordinator import DEADLINE_VARIABLE
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.progress import Progress
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.helpers.ranks_helper import run_ranks

WORLD = 3


def rows(rank: int, parts: int, value: float = 0.0, width: int = 64) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(
        "w", torch.full((8, width), value + rank), (0, rank, parts)
    )


def nothing_and_hardly_anything(rank: int, world_size: int, folder: Path) -> None:
    """Empty shards, empty tensors, objects alone, no state at all; on some ranks or on all."""
    empty = torch.empty(0, 5)
    states: list[dict[str, Any]] = [
        {},
        {"step": 3},
        {"o": ShardedObject("o", rank, (world_size,), (rank,))},
        {"e": ShardedTensor.from_rank_offsets("e", empty.clone(), replica_id=rank)},
        {"s": ShardedTensor.from_rank_offsets("s", torch.tensor(7.0), replica_id=rank)},
        {} if rank else {"w": rows(0, 1)},
    ]
    for number, state in enumerate(states):
        for budget, overlap in ((None, False), (1, True)):
            place = folder / f"c{number}-{budget}-{overlap}"
            handle = shardstore.async_save(
                dict(state),
                place,
                overlap_staging=overlap,
                staging_budget_bytes=budget,
                durable=False,
            )
            assert handle.wait_staged(60)
            handle.result(60)
            assert shardstore.check_is_distributed_checkpoint(place)
    assert shardstore.load_common_state_dict(folder / "c1-None-False") == {"step": 3}
    asked: Any = shardstore.load(
        {"o": ShardedObject("o", None, (world_size,), (rank,))}, folder / "c2-1-True"
    )
    assert asked["o"] == rank
    loaded = [shardstore.load_plain_tensors(folder / f"c{n}-1-True") for n in (3, 4, 5)]
    assert loaded[0]["e"].shape == (0, 5)
    assert loaded[1]["s"] == 7
    assert torch.equal(loaded[2]["w"], torch.zeros(8, 64))


def many_in_a_row_that_nobody_waits_for(rank: int, world_size: int, folder: Path) -> None:
    tensor = rows(rank, world_size)
    for step in range(6):
        tensor.data.fill_(step)
        shardstore.async_save({"w": tensor, "step": step}, folder / f"step-{step}", durable=False)
        gc.collect()  # the handle is gone, the save is not
    tensor.data.fill_(-1)
    # The one that is asked for last waits for those before it.
    shardstore.async_save({"w": tensor, "step": -1}, folder / "last").result(60)
    for step in range(6):
        loaded = shardstore.load_plain_tensors(folder / f"step-{step}")
        assert (loaded["w"] == step).all()
        assert loaded["step"] == step
    dist.barrier()


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_budget_smaller_than_a_chunk_on_s3(s3_server: S3Server, overlap: bool) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/c", s3_server.storage_options
    whole = torch.arange(300_000.0)
    state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", whole + n) for n in range(4)}
    handle = shardstore.async_save(
        state,
        url,
        ZarrSaveShardedStrategy("zarr", 2, budget_bytes=1),
        staging_budget_bytes=1000,
        overlap_staging=overlap,
        storage_options=options,
    )
    assert handle.wait_staged(60)
    for tensor in state.values():
        tensor.data.zero_()
    handle.result(60)
    loaded = shardstore.load_plain_tensors(url, storage_options=options)
    assert all(torch.equal(loaded[f"w{n}"], whole + n) for n in range(4))


def save_after_a_lost_rank(rank: int, world_size: int, root: str, mixed: bool) -> list[str]:
    """The last rank is away for longer than the deadline, but not for two. Where the calls after
    that are mixed, it has seen its save fail when it calls again, and the others have not."""
    os.environ[DEADLINE_VARIABLE] = "8"
    last = rank == world_size - 1
    asleep: list[int] = []

    def slow(event: Progress) -> None:
        if event.bytes_done and not asleep:
            asleep.append(1)
            time.sleep(12)

    whole = torch.full((4,), float(rank))
    state = {"w": ShardedTensor.from_rank_offsets("w", whole, (0, rank, world_size))}
    lost = shardstore.async_save(state, f"{root}/lost", progress=slow if last else None)
    if mixed and last:
        lost.wait()
    found = []
    for name in ("next", "after"):
        try:
            shardstore.async_save(state, f"{root}/{name}").result(30)
        except CheckpointingException as error:
            found.append(f"{name}: {error}")
    if lost.exception() is None:
        found.append("nobody was lost")
    return found


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_save_works_after_one_that_lost_a_rank(tmp_path: Path, mixed: bool) -> None:
    assert run_ranks(save_after_a_lost_rank, 3, str(tmp_path), mixed) == [[]] * 3
    for name in ("next", "after"):
        loaded = shardstore.load_plain_tensors(tmp_path / name)["w"]
        assert loaded.tolist() == [float(rank) for rank in range(3) for _ in range(4)]
