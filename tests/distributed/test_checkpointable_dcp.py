"""Shards through the real PyTorch DCP, on real ranks, saved by some and loaded by others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardstore.mapping import ShardedTensor
from shardstore.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from tests.helpers.ranks_helper import run_ranks

ROWS, COLUMNS = 12, 10


def _truth(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).to(dtype)


def _shards(rank: int, world_size: int, grid: tuple[int, int], fill: bool) -> list[ShardedTensor]:
    """The cells of a regular grid, dealt out in turn, so that most ranks hold several."""
    height, width = ROWS // grid[0], COLUMNS // grid[1]
    held = []
    for number in range(grid[0] * grid[1]):
        if number % world_size != rank:
            continue
        row, column = divmod(number, grid[1])
        part = _truth(torch.float32)[
            row * height : (row + 1) * height, column * width : (column + 1) * width
        ].contiguous()
        held.append(
            ShardedTensor.from_rank_offsets(
                "grid",
                part if fill else torch.full_like(part, -1),
                (0, row, grid[0]),
                (1, column, grid[1]),
            )
        )
    return held


def _layers(rank: int, world_size: int, fill: bool) -> list[ShardedTensor]:
    """Six layers stacked on a prepended axis, dealt out in turn."""
    truth = torch.arange(6 * 3).reshape(6, 3).to(torch.bfloat16)
    return [
        ShardedTensor.from_rank_offsets(
            "layers",
            truth[layer].clone() if fill else torch.full((3,), -1, dtype=torch.bfloat16),
            (0, layer, 6),
            prepend_axis_num=1,
        )
        for layer in range(rank, 6, world_size)
    ]


def _uneven(rank: int, world_size: int, fill: bool) -> list[ShardedTensor]:
    """Seven elements on the first rank, none on the others, beside one of each of the rest."""
    truth = torch.arange(7 + world_size - 1)
    start = 0 if rank == 0 else 6 + rank
    length = 7 if rank == 0 else 1
    cut = [(start, length), (start, 0)] if rank else [(0, 7), (7, 0)]
    return [
        ShardedTensor(
            "uneven",
            truth[o : o + n].clone() if fill else torch.full((n,), -1),
            torch.int64,
            (n,),
            (len(truth),),
            (o,),
            None,
        )
        for o, n in cut
    ]


def _state(shards: list[list[ShardedTensor]]) -> dict[str, torch.Tensor]:
    return {
        some[0].key: LocalShardsContainer(
            [CheckpointableShardedTensor.from_sh_ten(one) for one in some]
        )
        for some in shards
    }


def _save(rank: int, world_size: int, folder: Path) -> None:
    others = [_layers(rank, world_size, True), _uneven(rank, world_size, True)]
    for name, grid in (("cells", (4, 2)), ("rows", (12, 1))):
        shards = [_shards(rank, world_size, grid, True), *others]
        dcp.save(_state(shards), checkpoint_id=folder / name)


def _load(rank: int, world_size: int, place: Path, grid: tuple[int, int]) -> None:
    grid_shards = _shards(rank, world_size, grid, False)
    layers = _layers(rank, world_size, False)
    assert len(grid_shards) > 1, "several shards to a rank are the point of this test"
    dcp.load(_state([grid_shards, layers]), checkpoint_id=place)
    for got, expected in zip(
        grid_shards + layers,
        _shards(rank, world_size, grid, True) + _layers(rank, world_size, True),
        strict=True,
    ):
        torch.testing.assert_close(got.data, expected.data, rtol=0, atol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_save, 2, folder)
    return folder


def test_resharded_round_trip(saved: Path) -> None:
    run_ranks(_load, 3, saved / "cells", (3, 5))
    _load(0, 1, saved / "rows", (2, 2))


def test_an_empty_shard_does_not_hide_its_neighbour(saved: Path) -> None:
    wanted = ShardedTensor.from_rank_offsets("uneven", torch.full((8,), -1))
    shard = CheckpointableShardedTensor.from_sh_ten(wanted)
    dcp.load({"uneven": shard}, checkpoint_id=saved / "cells", no_dist=True)
    assert wanted.data.tolist() == list(range(8))


def test_another_global_shape_is_refused_by_dcp(saved: Path) -> None:
    wanted = ShardedTensor.from_rank_offsets("grid", torch.zeros(ROWS, COLUMNS + 1))
    shard = CheckpointableShardedTensor.from_sh_ten(wanted)
    with pytest.raises(CheckpointException, match=r"Size mismatch.*\[12, 10\].*\[12, 11\]"):
        dcp.load({"grid": shard}, checkpoint_id=saved / "cells", no_dist=True)
