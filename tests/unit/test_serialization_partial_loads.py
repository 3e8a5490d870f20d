"""Parts of a checkpoint: keys, regions, devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.errors import ArgumentError, MissingKeyError
from shardstore.mapping import ShardedTensor
from shardstore.storage.runtime.counters import counters
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

W = torch.arange(64 * 256, dtype=torch.float32).reshape(64, 256)
V = torch.arange(10, dtype=torch.int16)
E = torch.zeros(0, 5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partial") / "c"
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, tensor)
        for key, tensor in (("w", W), ("v", V), ("e", E))
    }
    state["step"] = 3
    shardstore.save(state, folder, ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=4096))
    return folder


def test_only_the_given_keys_are_loaded(place: Path) -> None:
    counters.clear()
    loaded = shardstore.load_plain_tensors(place, keys=["v"])
    assert list(loaded) == ["v"]
    assert torch.equal(loaded["v"], V)
    assert counters["bytes_read"] < 100
    assert shardstore.load_plain_tensors(place, keys=[]) == {}
    assert set(shardstore.load_plain_tensors(place)) == {"w", "v", "e", "step"}


def test_only_chunks_that_a_region_touches_are_read(place: Path) -> None:
    counters.clear()
    loaded = shardstore.load_plain_tensors(place, region={"w": [slice(5, 6), slice(None)]})
    assert list(loaded) == ["w"]
    assert torch.equal(loaded["w"], W[5:6])
    assert counters["chunks_read"] == 1


bounds = st.one_of(st.none(), st.integers(-70, 70))


@pytest.mark.parametrize("key", ["w", "e"])
@given(rows=st.builds(slice, bounds, bounds), columns=st.builds(slice, bounds, bounds))
def test_any_region_is_that_of_the_tensor(
    place: Path, key: str, rows: slice, columns: slice
) -> None:
    loaded = shardstore.load_plain_tensors(place, keys=[key], region=(rows, columns))
    assert torch.equal(loaded[key], {"w": W, "e": E}[key][rows, columns])


def test_wrong_keys_and_regions_are_errors(place: Path) -> None:
    with pytest.raises(MissingKeyError, match="did you mean 'w'"):
        shardstore.load_plain_tensors(place, keys=["ww"])
    with pytest.raises(ArgumentError, match=r"does not fit key .w. of shape .* of whole numbers"):
        shardstore.load_plain_tensors(place, keys=["w"], region=[slice("a")])


def test_map_location(place: Path) -> None:
    given = torch.zeros(10, dtype=torch.int16)
    wanted = {
        "w": ShardedTensor.from_rank_offsets_flat(
            "w", torch.zeros(30), (64, 256), flattened_range=slice(10, 40)
        ),
        "v": ShardedTensor.from_rank_offsets("v", given),
    }
    wanted["w"].data = None
    loaded = shardstore.load(wanted, place, validate_access_integrity=False, map_location="cpu")
    assert torch.equal(loaded["w"], W.reshape(-1)[10:40])
    assert loaded["v"] is given or loaded["v"].data_ptr() == given.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_map_location_on_a_device(place: Path) -> None:
    loaded = shardstore.load_plain_tensors(place, keys=["w"], map_location="cuda")
    assert loaded["w"].is_cuda
    assert torch.equal(loaded["w"].cpu(), W)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_tensors_on_a_device(place: Path, dtype: torch.dtype) -> None:
    given = torch.zeros(W.shape, dtype=dtype, device="cuda")
    flat = torch.zeros(30, device="cuda")
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", given),
        "part": ShardedTensor.from_rank_offsets_flat(
            "w", flat, tuple(W.shape), flattened_range=slice(10, 40)
        ),
    }
    shardstore.load(
        wanted, place, validate_access_integrity=False, cast=True, exchange_budget_bytes=4096
    )
    assert torch.equal(given.cpu(), W.to(dtype))
    assert torch.equal(flat.cpu(), W.reshape(-1)[10:40])
