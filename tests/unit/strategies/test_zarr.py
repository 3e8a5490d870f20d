"""Functions of the zarr strategy for one tensor write and read what saves and loads do for many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import NotACheckpointError
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import (
    _create_or_open_zarr_arrays,
    _load_from_array,
    _open_zarr_array_verbose,
    _save_to_existing_array,
    flatten_range,
    pad_to_expected_shape,
    postprocess_numpy_array,
)
from tests.helpers.programs import run_text
from tests.helpers.ranks_helper import run_ranks

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def parts(kind: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """All shards of one tensor, as one process holds them."""
    whole = WHOLE.to(dtype, copy=True)
    if kind == "whole":
        return [ShardedTensor.from_rank_offsets("w", whole)]
    if kind == "regular":
        return [
            ShardedTensor.from_rank_offsets("w", whole[:, 2 * i : 2 * i + 2].clone(), (1, i, 3))
            for i in range(3)
        ]
    if kind == "irregular":
        cuts = [(0, 3), (3, 4), (4, 7)]
        return [
            ShardedTensor("w", whole[a:b].clone(), dtype, (b - a, 6), (7, 6), (a, 0), None)
            for a, b in cuts
        ]
    bounds = [(0, 10), (10, 29), (29, 42)]  # of a shard in one chunk
    return [
        ShardedTensor.from_rank_offsets_flat(
            "w", whole.reshape(-1)[a:b].clone(), (7, 6), flattened_range=slice(a, b)
        )
        for a, b in bounds
    ]


def files_of(place: str) -> dict[str, bytes]:
    """The document and the chunks of the array."""
    location = Location.of(place)
    if location.is_local:
        names = [f"w/{path.name}" for path in (location.path / "w").iterdir()]
    else:
        names = list(location.remote.walk("w"))
    return {name: location.read(name) for name in names}


@pytest.mark.parametrize("kind", ["whole", "regular", "irregular", "flat"])
@pytest.mark.parametrize(
    ("scheme", "dtype"), [("", torch.float32), ("memory://one-tensor", torch.bfloat16)]
)
def test_one_tensor_is_written_as_by_a_save(
    tmp_path: Path, scheme: str, kind: str, dtype: torch.dtype
) -> None:
    root = f"{scheme}{tmp_path}"
    alone, saved = f"{root}/alone", f"{root}/saved"
    if not scheme:
        Path(alone).mkdir()
    shards = parts(kind, dtype)
    arrays = _create_or_open_zarr_arrays(shards, alone)
    for shard, array in zip(shards, arrays, strict=True):
        _save_to_existing_array(shard, array)
    for shard in shards:
        assert shard.data is not None
        assert torch.equal(_load_from_array(shard.without_data(), alone), shard.data)
    shardstore.save({str(i): shard for i, shard in enumerate(shards)}, saved)
    assert files_of(alone) == files_of(saved)
    assert torch.equal(shardstore.load_plain_tensors(saved)["w"], WHOLE.to(dtype))
    for shard in shards:  # and once more, in the other order
        shard.data.neg_()
    for shard, array in reversed(list(zip(shards, arrays, strict=True))):
        _save_to_existing_array(shard, array)
    whole = ShardedTensor.from_rank_offsets("w", WHOLE.to(dtype)).without_data()
    assert torch.equal(_load_from_array(whole, alone), -WHOLE.to(dtype))


def thirds(rank: int, world: int, folder: str) -> None:
    for kind in ("irregular", "flat"):
        root, shard = f"{folder}/{kind}", parts(kind, torch.float32)[rank]
        (array,) = _create_or_open_zarr_arrays([shard], f"{root}/alone")
        for turn in range(world):  # they share chunks
            if turn == rank:
                _save_to_existing_array(shard, array)
            dist.barrier()
        shardstore.save({"w": shard}, f"{root}/saved")
        assert files_of(f"{root}/alone") == files_of(f"{root}/saved")


def test_ranks_agree_on_the_chunks_as_in_a_save(tmp_path: Path) -> None:
    for kind in ("irregular", "flat"):
        (tmp_path / kind / "alone").mkdir(parents=True)
    run_ranks(thirds, 3, str(tmp_path))


def test_replicas_write_nothing(tmp_path: Path) -> None:
    replica = ShardedTensor.from_rank_offsets("w", WHOLE, replica_id=1)
    assert _create_or_open_zarr_arrays([replica], tmp_path) == [None]
    _save_to_existing_array(replica, None)
    assert list(tmp_path.iterdir()) == []


def test_an_array_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(NotACheckpointError, match=r"Array .*y could not be opened.*\['x'\]"):
        _open_zarr_array_verbose(tmp_path / "y", "r")


def test_an_array_in_memory_is_padded_and_flattened() -> None:
    wanted: dict[str, Any] = {"allow_shape_mismatch": True}
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4), **wanted)
    stored = np.ones((2, 4), np.float32)
    padded = postprocess_numpy_array(stored, tensor)
    assert padded.shape == (3, 4)
    assert padded.sum() == 8
    assert torch.equal(padded, pad_to_expected_shape(torch.ones(2, 4), tensor))
    flat = ShardedTensor.from_rank_offsets_flat(
        "w", torch.zeros(5), (3, 4), flattened_range=slice(6, 11)
    )
    assert torch.equal(flatten_range(flat, padded), padded.reshape(-1)[6:11])


def test_a_process_that_opens_alone_knows_bfloat16(tmp_path: Path) -> None:
    _create_or_open_zarr_arrays(parts("whole", torch.bfloat16), tmp_path)
    script = (
        "import sys; from shardstore.strategies.zarr import _open_zarr_array_verbose as opened; "
        "print(opened(sys.argv[1], 'r+').dtype)"
    )
    done = run_text(script, tmp_path / "w")
    assert done.stdout.strip() == "bfloat16", done.stderr


@pytest.mark.parametrize("scheme", ["", "memory://one-tensor-again"])
def test_an_array_of_zarr_is_written_more_than_once(tmp_path: Path, scheme: str) -> None:
    """With any codecs and names of chunks, also chunks of zeros."""
    url = f"{scheme}{tmp_path}/w"
    wanted: dict[str, Any] = {"shape": (7, 6), "chunks": (4, 6), "dtype": "float32"}
    array = zarr.create_array(url, compressors=zarr.codecs.GzipCodec(), **wanted)
    for value in (WHOLE, -WHOLE, torch.zeros(7, 6)):
        shard = ShardedTensor.from_rank_offsets("w", value)
        _save_to_existing_array(shard, array)
        assert np.array_equal(array[:], value.numpy())
        if not scheme:
            assert torch.equal(_load_from_array(shard.without_data(), tmp_path), value)
