"""Saves in the background whose copy has less room than the state: nobody waits for ever."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import StorageError
from shardstore.mapping import ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.helpers.scenarios import files_at_most

CHUNK = 64 * 1024
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)


@pytest.mark.parametrize(
    ("store", "chunks"),
    [
        *(("disk", chunks) for chunks in (1, 2, 3, 7)),
        *(("memory", 1), ("memory", 3), ("s3", 1), ("s3", 2)),
    ],
)
def test_room_for_few_chunks(
    store: str, chunks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    options: dict[str, Any] = {}
    place = str(tmp_path / "a")
    if store == "memory":
        place = f"memory://{uuid.uuid4().hex}/a"
    elif store == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        place, options = f"s3://{server.new_bucket()}/a", server.storage_options
    tensors = {f"w{i}": torch.randn(9, CHUNK // 4) for i in range(3)}
    tensors |= {f"b{i}": torch.randn(i + 1) for i in range(5)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    handle = shardstore.async_save(
        state, place, SMALL, staging_budget_bytes=chunks * CHUNK, storage_options=options
    )
    handle.result(60)
    loaded = shardstore.load_plain_tensors(place, storage_options=options)
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())


@pytest.mark.parametrize(("has_base", "largest"), [(False, 1), (False, 40), (True, 40)])
def test_many_chunks_of_odd_sizes(has_base: bool, largest: int, tmp_path: Path) -> None:
    """An optimizer's step counters: in the copy each takes more than it has."""
    tensors = {f"v{i}": torch.full((1 + i % largest,), float(i)) for i in range(800)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    options: dict[str, Any] = {"durable": False}
    if has_base:
        options["compression"] = "blosc"
        shardstore.save(state, tmp_path / "base", **options)
        options["base"] = tmp_path / "base"
        for value in tensors.values():
            value += 1
    handle = shardstore.async_save(
        state,
        tmp_path / "a",
        staging_budget_bytes=8 << 10,
        overlap_staging=True,
        at_exit="abort",
        **options,
    )
    handle.result(60)
    loaded = shardstore.load_plain_tensors(tmp_path / "a")
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())


def test_a_chunk_that_can_not_be_written(tmp_path: Path) -> None:
    """One thread fails while another waits for memory that only this chunk's end would free."""
    sizes = {"large": 4 << 20, **{f"small{i}": 512 << 10 for i in range(16)}}
    state = shardstore.shard({key: torch.zeros(size // 4) for key, size in sizes.items()})
    strategy = ZarrSaveShardedStrategy("zarr", 2, threads=2)
    with files_at_most(1 << 20), pytest.raises(StorageError, match="ulimit -f") as caught:
        shardstore.async_save(state, tmp_path / "a", strategy, staging_budget_bytes=5 << 20).result(
            60
        )
    assert caught.value.key == "large"
    assert list(tmp_path.iterdir()) == []
