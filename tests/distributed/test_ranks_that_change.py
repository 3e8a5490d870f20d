"""A process that joins a new default group under another number, as elastic launchers let it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardstore
from tests.helpers.ranks_helper import join, run_ranks


def _state(rank: int, world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    rows = torch.arange(4.0).reshape(world_size, -1)[rank]
    return {"w": DTensor.from_local(rows.clone(), mesh, [Shard(0)], run_check=False)}


def _twice(rank: int, world_size: int, folder: str) -> None:
    for turn, number in enumerate([rank, world_size - 1 - rank]):
        if turn:
            dist.destroy_process_group()
            join(f"{folder}/meet", number, world_size)
        shardstore.save(_state(number, world_size), f"{folder}/{turn}")
        assert torch.equal(
            shardstore.load_plain_tensors(f"{folder}/{turn}")["w"], torch.arange(4.0)
        ), turn


def test_a_dtensor_is_cut_for_the_number_of_now(tmp_path: Path) -> None:
    run_ranks(_twice, 2, str(tmp_path))
