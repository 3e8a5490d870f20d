"""The tensors that a load fills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import shardstore
from shardstore.loading.plan import with_destinations
from shardstore.mapping import ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy


def test_tensors_without_memory_are_made_on_the_device_and_others_keep_theirs() -> None:
    given = torch.zeros(2)
    wanted = {
        "given": ShardedTensor.from_rank_offsets("given", given),
        "none": ShardedTensor("none", None, torch.int8, (2,), (2,), (0,), None),
        "meta": ShardedTensor.from_rank_offsets("meta", torch.zeros(2, device="meta")),
    }
    made = with_destinations(wanted, torch.device("cpu"))
    assert made["given"] is wanted["given"]
    assert [made[name].data.device.type for name in ("none", "meta")] == ["cpu", "cpu"]


class Whole(torch.Tensor):
    """A subclass whose parts are copies."""

    def __getitem__(self, where: Any) -> Any:
        return super().__getitem__(where).clone()


def test_a_subclass_is_filled_as_a_whole(tmp_path: Path) -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    small = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=8)
    shardstore.save(shardstore.shard({"w": rows}), tmp_path, small)
    given = torch.zeros(3, 2, dtype=torch.float64).as_subclass(Whole)
    shardstore.load(shardstore.shard({"w": given}), tmp_path, cast=True)
    assert given.tolist() == rows.tolist()
