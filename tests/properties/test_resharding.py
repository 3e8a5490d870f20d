"""Any tensor, saved under any layout and loaded under any other, comes back bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore import zarr_dtypes
from shardstore.mapping import ShardedTensor
from shardstore.storage.format.names import node_name
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.layouts import (
    DTYPES,
    Layout,
    Piece,
    Shape,
    destination,
    expected_part,
    random_layout,
    random_shape,
    random_tensor,
    raw_bytes,
    sharded,
    strided,
)
from tests.helpers.ranks_helper import run_ranks

assert zarr_dtypes is not None  # teaches zarr bfloat16 and float8

TARGETS = (64, 512, 32 * 1024 * 1024)
STORED = (*DTYPES, torch.float4_e2m1fn_x2)


def save_parts(
    tensors: dict[str, torch.Tensor],
    layouts: dict[str, Layout],
    rank: int,
    place: Path,
    strategy: ZarrSaveShardedStrategy,
    rng: random.Random,
) -> None:
    """Save the pieces of one rank; the others do so elsewhere."""
    state: dict[str, list[ShardedTensor]] = {}
    for key, whole in tensors.items():
        for piece in layouts[key].pieces:
            if piece.rank == rank:
                data = strided(expected_part(whole, piece, layouts[key].prepended), rng)
                state.setdefault(key, []).append(sharded(key, whole, layouts[key], piece, data))
    shardstore.save(state, place, strategy, durable=False)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return raw_bytes(one) == raw_bytes(other)


def differences(
    tensors: dict[str, torch.Tensor],
    layouts: dict[str, Layout],
    rank: int,
    place: Path,
    rng: random.Random,
    *,
    load: Callable[..., Any] = shardstore.load,
    same: Callable[[torch.Tensor, torch.Tensor], bool] = same_bits,
    **options: Any,
) -> list[str]:
    """Load the pieces of one rank; what of them is not as it was saved, and where it went."""
    given: dict[str, list[tuple[Piece, torch.Tensor | None]]] = {}
    state = {}
    for key, whole in tensors.items():
        # Shards with an empty flat range are left out of what is loaded.
        given[key] = [
            (piece, destination(piece, layouts[key], whole.dtype, rng))
            for piece in layouts[key].pieces
            if piece.rank == rank and (piece.flat is None or piece.flat[0] < piece.flat[1])
        ]
        state[key] = [sharded(key, whole, layouts[key], *pair) for pair in given[key]]
    loaded = load(state, place, **options)
    assert isinstance(loaded, dict)
    wrong = []
    for key, whole in tensors.items():
        for (piece, data), got in zip(given[key], loaded.get(key, []), strict=True):
            want = expected_part(whole, piece, layouts[key].prepended)
            about = f"{key} {whole.dtype} {tuple(whole.shape)} {piece} of {layouts[key].fragments}"
            if got.shape != want.shape or got.dtype != want.dtype:
                wrong.append(f"{about}: {got.dtype} {tuple(got.shape)}")
            elif not same(got, want):
                wrong.append(f"{about}: other values")
            elif data is not None and not same(data, want):
                wrong.append(f"{about}: not in place")
    return wrong


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, torch.dtype, int, int, random.Random]:
    rng = draw(st.randoms(use_true_random=False))
    dtype = draw(st.sampled_from(STORED))
    target = draw(st.sampled_from(TARGETS))
    version = draw(st.sampled_from([2, 2, 1]))
    return random_shape(rng), dtype, version, target, rng


@settings(
    derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(cases())
def test_any_layout_loads_from_any_layout(
    case: tuple[Shape, torch.dtype, int, int, random.Random],
) -> None:
    """One process holds all shards of both layouts."""
    shape, dtype, version, target, rng = case
    whole = random_tensor(shape, dtype, rng)
    saved, wanted = random_layout(shape, 1, rng), random_layout(shape, 1, rng)
    strategy = ZarrSaveShardedStrategy("zarr", version, target_chunk_bytes=target)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "checkpoint")
        save_parts({"w": whole}, {"w": saved}, 0, place, strategy, rng)
        assert differences({"w": whole}, {"w": wanted}, 0, place, rng) == []
        if version == 2:
            stored: Any = zarr.open_group(place, mode="r")["w"]
            assert stored.shape == shape
            assert stored[...].tobytes() == raw_bytes(whole)


@pytest.mark.parametrize("version", [2, 1])
def test_every_data_type_by_rows_and_back_by_columns(version: int, tmp_path: Path) -> None:
    """Any bits, in both formats, flat ranges read from boxes and boxes from flat ranges."""
    rng = random.Random(7)
    tensors = {}
    for dtype in STORED:
        tensors[f"{dtype}.w"] = random_tensor((8, 12), dtype, rng)
        tensors[f"{dtype}.scalar"] = random_tensor((), dtype, rng)
        tensors[f"{dtype}.empty"] = torch.empty((0, 5), dtype=dtype)
    rows = {k: random_layout(tuple(t.shape), 1, rng, flat=False) for k, t in tensors.items()}
    flat = {k: random_layout(tuple(t.shape), 1, rng, flat=True) for k, t in tensors.items()}
    strategy = ZarrSaveShardedStrategy("zarr", version, target_chunk_bytes=64)
    for number, (saved, wanted) in enumerate([(rows, flat), (flat, rows)]):
        place = tmp_path / str(number)
        save_parts(tensors, saved, 0, place, strategy, rng)
        assert differences(tensors, wanted, 0, place, rng) == []


@pytest.mark.parametrize("version", [2, 1])
def test_flat_ranges_of_shards_that_form_no_grid(version: int, tmp_path: Path) -> None:
    """Then a chunk is no contiguous range of the flattened shard."""
    for seed in range(15):
        rng = random.Random(seed)
        whole = random_tensor((3, 6, 5), torch.int16, rng)
        saved = random_layout((3, 6, 5), 1, rng, flat=True, kind="tree")
        wanted = random_layout((3, 6, 5), 1, rng)
        strategy = ZarrSaveShardedStrategy("zarr", version, target_chunk_bytes=rng.choice(TARGETS))
        place = tmp_path / str(seed)
        save_parts({"w": whole}, {"w": saved}, 0, place, strategy, rng)
        assert differences({"w": whole}, {"w": wanted}, 0, place, rng) == []


KEYS = ("a", "block.1.weight", "block.1/bias", "\N{MICRO SIGN}", "optimizer.state.exp_avg.w")


def _reshard_on_ranks(rank: int, world_size: int, folder: str, seeds: list[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        same = random.Random(seed)
        own = random.Random(seed * 1000 + rank)
        tensors = {}
        saved, wanted = {}, {}
        # As many ranks save as load, more, or fewer; the rest hold nothing.
        savers, loaders = same.randint(1, world_size), same.randint(1, world_size)
        for key in KEYS:
            shape = random_shape(same)
            tensors[key] = random_tensor(shape, same.choice(STORED), same)
            saved[key] = random_layout(shape, savers, same)
            wanted[key] = random_layout(shape, loaders, same)
        version = 1 if seed % 3 == 2 else 2
        strategy = ZarrSaveShardedStrategy("zarr", version, target_chunk_bytes=same.choice(TARGETS))
        place = Path(folder, f"{world_size}-{seed}")
        save_parts(tensors, saved, rank, place, strategy, own)
        found = differences(tensors, wanted, rank, place, own)
        wrong += [f"seed {seed} rank {rank}: {text}" for text in found]
        if rank == 0 and version == 2:
            for key, whole in tensors.items():
                stored: Any = zarr.open_array(place / node_name(key), mode="r")
                if stored[...].tobytes() != raw_bytes(whole):
                    wrong.append(f"seed {seed}: plain zarr reads other bits of {key}")
    return wrong


@pytest.mark.parametrize(("world_size", "share"), [(3, 3), (8, 10)])
def test_any_layout_of_ranks_loads_from_any_other(
    world_size: int, share: int, tmp_path: Path
) -> None:
    """Several real ranks, their shards drawn at random, under both formats."""
    cases = settings.default.max_examples // share
    seeds = list(range(world_size * 100, world_size * 100 + cases))
    for wrong in run_ranks(_reshard_on_ranks, world_size, str(tmp_path), seeds):
        assert wrong == []
