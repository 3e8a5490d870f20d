"""Functions of the zarr strategy for one tensor write and read what saves and loads do for many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def parts(kind: str, dtype: torch.dtype) -> list[ShardedTensor]:
    """All shards of one tensor, as one process holds them."""
    whole = WHOLE.to(dtype)
    if kind == "whole":
        return [ShardedTensor.from_rank_offsets("w", whole)]
    if kind == "regular":
        return [
            ShardedTensor.from_rank_offsets("w", whole[:, 2 * i : 2 * i + 2].clone(), (1, i, 3))
            for i in range(3)
        ]
    if kind == "irregular":
        cuts = [(0, 3), (3, 7)]
        return [
            ShardedTensor("w", whole[a:b].clone(), dtype, (b - a, 6), (7, 6), (a, 0), None)
            for a, b in cuts
        ]
    bounds = [(0, 10), (10, 29), (29, 42)]
    return [
        ShardedTensor.from_rank_offsets_flat(
            "w", whole.reshape(-1)[a:b].clone(), (7, 6), flattened_range=slice(a, b)
        )
        for a, b in bounds
    ]


def chunks_of(place: str) -> dict[str, bytes]:
    location = Location.of(place)
    names = [name for name in _walk(location, "w") if not name.endswith("zarr.json")]
    return {name: location.read(name) for name in names}


def _walk(location: Location, node: str) -> list[str]:
    if not location.is_local:
        return list(location.remote.walk(node))
    return [str(p.relative_to(location.path)) for p in location.path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["whole", "regular", "irregular", "flat"])
@pytest.mark.parametrize("scheme", ["", "memory://one-tensor"])
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
    loaded = [_load_from_array(shard.without_data(), alone) for shard in shards]
    for shard, found in zip(shards, loaded, strict=True):
        assert shard.data is not None
        assert torch.equal(found, shard.data)
    if kind in ("whole", "regular"):  # a save cuts other chunks where ranks share them
        shardstore.save({str(i): shard for i, shard in enumerate(shards)}, saved)
        named = {name: data for name, data in chunks_of(saved).items() if name.startswith("w/")}
        assert {n: d for n, d in chunks_of(alone).items() if n.startswith("w/")} == named
        again = shardstore.load_plain_tensors(saved)
        assert torch.equal(again["w"], WHOLE.to(dtype))


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
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "w")], capture_output=True, text=True
    )
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
