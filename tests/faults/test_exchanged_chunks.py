"""Chunks that are whole, and in the wrong place: only the commit can tell."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import ChunkCorruptError
from shardstore.strategies.zarr import ZarrSaveShardedStrategy


def whole(key: str, data: torch.Tensor) -> dict[str, Any]:
    return shardstore.shard({key: data})


def exchange(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


@pytest.mark.parametrize("rows", [64, 64 * 1024], ids=["small", "large"])
def test_two_chunks_of_one_array(tmp_path: Path, rows: int) -> None:
    data = torch.arange(rows * 8, dtype=torch.int64).reshape(rows, 8)
    chunk_bytes = data.nbytes // 4
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=chunk_bytes)
    shardstore.save(whole("w", data), tmp_path / "c", strategy)
    folder = tmp_path / "c" / "w"
    assert (folder / "c.3.0").exists()
    exchange(folder / "c.1.0", folder / "c.2.0")
    with pytest.raises(ChunkCorruptError, match="not the chunk that was committed") as caught:
        shardstore.load(whole("w", torch.empty_like(data)), tmp_path / "c")
    assert caught.value.key == "w"
    assert caught.value.chunk in ((1, 0), (2, 0))
    # A part of a chunk, and what is not damaged.
    part = ShardedTensor.from_rank_offsets("w", torch.empty(rows // 8, 8, dtype=torch.int64))
    part.global_shape, part.global_offset = (rows, 8), (rows // 4 + rows // 16, 0)
    part.axis_fragmentations = None
    with pytest.raises(ChunkCorruptError):
        shardstore.load({"w": part}, tmp_path / "c", validate_access_integrity=False)
    part.global_offset = (0, 0)
    shardstore.load({"w": part}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(part.data, data[: rows // 8])


def test_a_chunk_of_another_checkpoint(tmp_path: Path) -> None:
    """What a late writer of another attempt leaves: right in size and checksum, but older."""
    shardstore.save(whole("w", torch.zeros(16)), tmp_path / "a")
    shardstore.save(whole("w", torch.ones(16)), tmp_path / "b")
    shutil.copy(tmp_path / "a" / "w" / "c.0", tmp_path / "b" / "w" / "c.0")
    with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
        shardstore.load(whole("w", torch.empty(16)), tmp_path / "b")


def test_after_other_arrays_were_removed(tmp_path: Path) -> None:
    place = tmp_path / "c"
    shardstore.save(shardstore.shard({key: torch.ones(4) for key in "abc"}), place)
    shardstore.remove_sharded_tensors(place, "b")
    out = torch.zeros(4)
    shardstore.load(whole("c", out), place)
    assert out.tolist() == [1, 1, 1, 1]
    (place / "a" / "c.0").write_bytes((place / "a" / "c.0").read_bytes()[::-1])
    with pytest.raises(ChunkCorruptError):
        shardstore.load(whole("a", out), place)
