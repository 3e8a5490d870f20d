"""A load by the ranks of one process group alone, and groups that are made anew."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import AccessPatternError, MissingKeyError, NotACheckpointError, RanksError
from tests.helpers.ranks_helper import run_ranks


def wanted(rank: int, world: int, key: str = "w") -> dict[str, Any]:
    data = torch.zeros(8 // world, 3)
    return {"w": ShardedTensor.from_rank_offsets(key, data, (0, rank, world)), "note": "common"}


def load_in_groups(rank: int, world_size: int, place: Path) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, mine = groups[rank // 2], rank % 2
    if rank < 2:  # the others call nothing
        loaded = shardstore.load(wanted(mine, 2), place, process_group=group, strict="raise_all")
        assert torch.equal(loaded["w"], torch.arange(24.0).reshape(8, 3)[4 * mine : 4 * mine + 4])
        with pytest.raises(AccessPatternError):  # on every rank, as among all ranks
            shardstore.load(wanted(0, 2), place, process_group=group)
        with pytest.raises(MissingKeyError if rank == 1 else RanksError):
            shardstore.load(wanted(mine, 2, "wx"[rank]), place, None, False, process_group=group)
    dist.barrier()
    if rank == 3:  # as 0.19 has them, by position; each group asks for each element once
        place = place.parent / "none"
    for _ in range(2):
        loaded = None
        with contextlib.suppress(RanksError, NotACheckpointError):
            given = wanted(mine, 2), place, None, True, "assume_ok_unexpected", False, group
            loaded = shardstore.load(*given)
        assert (loaded is None) == (rank > 1)
    dist.barrier()
    return "done"


def test_one_group_loads_and_the_others_do_not(tmp_path: Path) -> None:
    whole = ShardedTensor.from_rank_offsets("w", torch.arange(24.0).reshape(8, 3))
    shardstore.save({"w": whole, "note": "common"}, tmp_path)
    assert run_ranks(load_in_groups, 4, tmp_path) == ["done"] * 4


def made_anew(rank: int, world: int, folder: Path, port: int) -> str:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
        shardstore.save({"w": tensor, "note": "common"}, folder / f"step-{number}")
        found = shardstore.load(wanted(rank, world), folder / f"step-{number}")
        assert torch.equal(found["w"], data)
    return "done"


def test_a_process_group_that_is_made_anew_at_the_same_address(tmp_path: Path) -> None:
    """As a trainer that restarts in its processes makes it: the store of the last group has ended
    with it, and no rank meets addresses of then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run_ranks(made_anew, 2, tmp_path, port) == ["done"] * 2
