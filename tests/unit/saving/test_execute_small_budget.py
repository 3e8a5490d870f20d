"""Saves in the background whose copy has less room than the state: nobody waits for ever."""

from __future__ import annotations

import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.mapping import ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.helpers.programs import run_text

CHUNK = 64 * 1024
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
@pytest.mark.parametrize("store", ["memory", "s3", "disk"])
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


@pytest.mark.parametrize(
    ("how", "largest"), [("plain", 1), ("plain", 40), ("blosc", 40), ("base", 40)]
)
def test_many_chunks_of_odd_sizes(how: str, largest: int, tmp_path: Path) -> None:
    """An optimizer's step counters: in the copy each takes more than it has."""
    tensors = {f"v{i}": torch.full((1 + i % largest,), float(i)) for i in range(3000)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    options: dict[str, Any] = {"durable": False}
    if how in ("blosc", "base"):
        options["compression"] = "blosc"
    if how == "base":
        shardstore.save(state, tmp_path / "base", **options)
        options["base"] = tmp_path / "base"
        for value in tensors.values():
            value += 1
    handle = shardstore.async_save(
        state,
        tmp_path / "a",
        staging_budget_bytes=32 << 10,
        overlap_staging=True,
        at_exit="abort",
        **options,
    )
    handle.result(60)
    loaded = shardstore.load_plain_tensors(tmp_path / "a")
    assert all(torch.equal(loaded[key], value) for key, value in tensors.items())


def test_a_chunk_that_can_not_be_written(tmp_path: Path) -> None:
    """One thread fails while another waits for memory that only this chunk's end would free."""
    program = """
        import resource, sys, torch, shardstore
        from shardstore.mapping import ShardedTensor
        from shardstore.strategies.zarr import ZarrSaveShardedStrategy

        sizes = {"large": 4 << 20, **{f"small{i}": 512 << 10 for i in range(16)}}
        tensors = {key: torch.zeros(size // 4) for key, size in sizes.items()}
        state = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            shardstore.async_save(
                state,
                sys.argv[1],
                ZarrSaveShardedStrategy("zarr", 2, threads=2),
                staging_budget_bytes=5 << 20,
            ).result(60)
        except shardstore.CheckpointingException as error:
            print(error.key, error)
    """
    ended = run_text(textwrap.dedent(program), tmp_path / "a")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("large"), ended.stderr
    assert "ulimit -f" in ended.stdout
    assert list(tmp_path.iterdir()) == []
