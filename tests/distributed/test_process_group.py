"""Default process groups that move no CPU tensors, or are made anew, also with other numbers."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardstore
from shardstore import ShardedTensor, hf
from shardstore.errors import CheckpointingException
from tests.helpers.ranks_helper import join, run_ranks
from tests.helpers.scenarios import logged


def without_cpu_tensors(rank: int, world: int, folder: str) -> list[float]:
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
    """As one of NCCL alone: saves and loads need its store, and nothing else of it."""
    found = run_ranks(without_cpu_tensors, 3, str(tmp_path))
    assert found == [[rank, rank] for rank in range(3)]


def made_anew(rank: int, world: int, folder: Path, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    kept = []
    for number in range(4):
        ended = folder / f"ended-{number}"
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:  # its store, at the same port, must be gone before another rank asks
            ended.touch()
        while not ended.exists():
            time.sleep(0.01)
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)
        data = torch.full((4, 3), 10.0 * number + rank)
        tensor = ShardedTensor.from_rank_offsets("w", data, (0, rank, world))
        shardstore.save({"w": tensor}, folder / f"step-{number}")
        wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(4, 3), (0, rank, world))
        found: Any = shardstore.load({"w": wanted}, folder / f"step-{number}")
        assert torch.equal(found["w"], data)
        for call in (shardstore.save, shardstore.load):
            with pytest.raises(CheckpointingException) as caught:
                call({"w": tensor if rank else 1}, folder / f"step-{number}")
            kept.append(caught.value)
        tensor.axis_fragmentations = (5, 1) if rank else (2, 1)
        kept.append(shardstore.async_save({"w": tensor}, folder / "bad").exception(60))
        assert isinstance(kept[-1], CheckpointingException)


def test_a_process_group_that_is_made_anew_at_the_same_address(tmp_path: Path) -> None:
    """As a trainer that restarts in its processes makes it: the store of the last group has ended
    with it, also if the program keeps errors, and no rank meets addresses of then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(made_anew, 2, tmp_path, port)


def destroyed_meanwhile(rank: int, world: int, folder: Path) -> None:
    gone = threading.Event()

    def held(_: object) -> None:
        assert threading.current_thread() is threading.main_thread() or gone.wait(60)

    rows = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), float(rank)), (0, rank, world))
    handle = shardstore.async_save({"w": rows}, folder / "c", progress=held)
    dist.destroy_process_group()
    gone.set()
    assert handle.result(60)["chunks"] == world


def test_an_asynchronous_save_commits_after_the_process_group_was_destroyed(tmp_path: Path) -> None:
    run_ranks(destroyed_meanwhile, 3, tmp_path)
    loaded = shardstore.load_plain_tensors(tmp_path / "c")
    assert loaded["w"][::2, 0].tolist() == [0, 1, 2]


def launched_alone(rank: int, world: int, folder: Path) -> list[int]:
    """Return how many warnings each save logs: to one place, of rank 0, and to places of ranks."""
    dist.destroy_process_group()
    seen = []
    for place in (
        f"run{rank}x",
        "alone" if rank == 0 else f"own/{rank:03}",
        f"run-1{rank}/rank-{rank}",
        f"rank-{rank}/step",
        f"all-{rank}/run/step",  # a number further up is that of a run or a host
    ):
        told = []
        for save in (shardstore.save, hf.save):
            with logged() as texts:
                save({"w": torch.ones(2)}, folder / save.__module__ / place, overwrite=True)
            words = (f"RANK={rank} ", f"/{place}:", "init_process_group", "of its own")
            assert all(word in text for text in texts for word in words), texts
            told.append(len(texts))
        assert len(set(told)) == 1, (place, told)
        seen.append(told[0])
    return seen


def test_a_launched_rank_without_a_process_group_is_told(tmp_path: Path) -> None:
    """Of ranks that save to one place, each would replace the checkpoint of the others."""
    assert run_ranks(launched_alone, 3, tmp_path) == [
        [0, 0, 0, 0, 0],
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
    ]


def rows(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    rows = torch.arange(4.0).reshape(world_size, -1)[rank]
    return {"w": DTensor.from_local(rows.clone(), mesh, [Shard(0)], run_check=False)}


def under_another_number(rank: int, world_size: int, folder: str) -> None:
    for turn, number in enumerate([rank, world_size - 1 - rank]):
        if turn:
            dist.destroy_process_group()
            join(f"{folder}/meet", number, world_size)
        shardstore.save(rows(number, world_size), f"{folder}/{turn}")
        assert torch.equal(
            shardstore.load_plain_tensors(f"{folder}/{turn}")["w"], torch.arange(4.0)
        ), turn


def test_a_dtensor_is_cut_for_the_number_of_now(tmp_path: Path) -> None:
    """A process joins a new default group under another number, as elastic launchers let it."""
    run_ranks(under_another_number, 2, str(tmp_path))
