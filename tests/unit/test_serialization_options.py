"""The options of a save, as one object and as keywords."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import CheckpointManager, SaveOptions, ShardedTensor
from shardstore.errors import AccessPatternError
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

OPTIONS = SaveOptions(target_chunk_bytes=1024, compression="zstd", durable=False)


def state(**more: Any) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(64, 64), **more)}


def chunks_and_codecs(place: Path) -> tuple[Any, Any]:
    meta = shardstore.open(place).metas["w"]
    return meta.grid.chunk_shape, meta.codecs


def test_options_are_taken_whole_and_keywords_replace_them(tmp_path: Path) -> None:
    shardstore.save(state(), tmp_path / "a", options=OPTIONS)
    assert chunks_and_codecs(tmp_path / "a") == ((4, 64), ("zstd", "crc32c"))
    shardstore.save(state(), tmp_path / "a", options=OPTIONS, overwrite=True, compression=None)
    assert chunks_and_codecs(tmp_path / "a") == ((4, 64), ("crc32c",))
    shardstore.async_save(state(), tmp_path / "b", options=OPTIONS).wait()
    assert chunks_and_codecs(tmp_path / "b") == ((4, 64), ("zstd", "crc32c"))
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=2048)
    shardstore.save(state(), tmp_path / "c", strategy, options=OPTIONS)
    assert chunks_and_codecs(tmp_path / "c") == ((8, 64), ("zstd", "crc32c"))
    shardstore.save(state(), tmp_path / "d")
    assert chunks_and_codecs(tmp_path / "d") == ((64, 64), ("crc32c",))


def test_either_the_option_or_the_argument_leaves_a_check_out(tmp_path: Path) -> None:
    unchecked = SaveOptions(validate_access_integrity=False)
    with pytest.raises(AccessPatternError):
        shardstore.save(state(replica_id=1), tmp_path / "a", options=OPTIONS)
    shardstore.save(state(replica_id=1), tmp_path / "b", options=unchecked)
    shardstore.save(state(replica_id=1), tmp_path / "c", None, None, False, options=OPTIONS)


def test_a_manager_keeps_the_base_of_the_options(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1, state())
        options = SaveOptions(base=tmp_path / "step-1", durable=False)
        record = manager.save(2, state(), options=options)
    assert record["reused_bytes"] > 0
