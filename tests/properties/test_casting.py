"""Loads that convert: what arrives is what ``copy_`` makes of what is stored, whatever the layout,
the format, the store and the memory; and nothing is converted that nobody asked for."""

from __future__ import annotations

import random
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore.errors import ArgumentError, ChunkCorruptError, DTypeMismatchError
from shardstore.loading import plan as read_plan
from shardstore.loading.read import _split
from shardstore.mapping import ShardedTensor
from shardstore.storage.format.grid import Box
from shardstore.storage.runtime.counters import counters
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.cli_checkpoints import flip
from tests.helpers.layouts import DTYPES, Shape, random_layout, random_shape, random_tensor
from tests.properties.test_resharding import TARGETS, differences, save_parts

FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values; which of the many NaNs it is depends on how many are converted at a time."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (t.detach().resolve_conj().contiguous() for t in (one, other))
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.dtype.is_floating_point:
        a, b = a.double(), b.double()
    return np.array_equal(a.numpy(), b.numpy(), equal_nan=a.dtype.is_floating_point)


def is_allowed(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """torch's rule, and no integer that lacks some of the stored values."""
    if wanted.is_floating_point or wanted.is_complex or torch.bool in (stored, wanted):
        return torch.can_cast(stored, wanted)
    return torch.can_cast(stored, wanted) and all(
        torch.iinfo(wanted).min <= bound <= torch.iinfo(wanted).max
        for bound in (torch.iinfo(stored).min, torch.iinfo(stored).max)
    )


def whole(key: str, tensor: torch.Tensor, **about: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, **about)


def values(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(torch.arange(-9, 9.0), torch.arange(18.0)).to(dtype)
    if dtype == torch.bool:
        return torch.arange(18) % 3 == 0
    low = -9 if dtype.is_signed else 0
    return (torch.arange(18) + low).to(dtype)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("every") / "c"
    shardstore.save({short(d): whole(short(d), values(d)) for d in DTYPES}, place, durable=False)
    return place


@pytest.mark.parametrize("wanted", DTYPES, ids=short)
def test_each_pair_of_data_types(every: Path, wanted: torch.dtype) -> None:
    possible = [dtype for dtype in DTYPES if is_allowed(dtype, wanted)]
    given_ = {short(d): torch.zeros(18, dtype=wanted) for d in possible}
    loaded = shardstore.load({k: whole(k, t) for k, t in given_.items()}, every, cast=True)
    assert isinstance(loaded, dict)
    for dtype in possible:
        assert same(given_[short(dtype)], cast(values(dtype), wanted)), dtype
        assert loaded[short(dtype)].data_ptr() == given_[short(dtype)].data_ptr()
    for dtype in set(DTYPES) - set(possible):
        state = {"t": whole(short(dtype), torch.zeros(18, dtype=wanted))}
        text = rf"stored as {short(dtype)} in .* as {short(wanted)}; .* loses more than precis"
        with pytest.raises(DTypeMismatchError, match=text):
            shardstore.load(state, every, cast=True)


def test_what_loses_more_than_precision_is_an_error(every: Path) -> None:
    """The rule behind the pairs, said once without torch's own word for it."""
    for stored, wanted in (
        (torch.float64, torch.int64),
        (torch.complex64, torch.float32),
        (torch.int8, torch.bool),
        (torch.float8_e5m2, torch.uint8),
        (torch.int64, torch.int8),
        (torch.int8, torch.uint8),
    ):
        state = {"t": whole(short(stored), torch.zeros(18, dtype=wanted))}
        with pytest.raises(DTypeMismatchError):
            shardstore.load(state, every, cast=True)


def test_nothing_is_cast_unless_asked_and_the_error_says_how(every: Path) -> None:
    given_ = torch.full((18,), 7.0)
    for options in ({}, {"cast": False}):
        with pytest.raises(DTypeMismatchError, match=r"'float64'.*float32.*cast=True.*torch\.fl"):
            shardstore.load({"t": whole("float64", given_)}, every, **options)
    assert torch.equal(given_, torch.full((18,), 7.0))


Case = tuple[
    Shape, tuple[torch.dtype, torch.dtype], bool, int, str | None, tuple[int, int], random.Random
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = draw(st.randoms(use_true_random=False))
    stored = draw(st.sampled_from(DTYPES))
    wanted = draw(st.sampled_from([d for d in FLOATS if torch.can_cast(stored, d)] or DTYPES[-2:]))
    version = draw(st.sampled_from([2, 2, 1]))
    packed = draw(st.sampled_from([None, "zstd", "blosc"])) if version == 2 else None
    target, budget = draw(st.sampled_from(TARGETS)), draw(st.sampled_from([1, 300, 5000, 1 << 28]))
    if far := draw(st.booleans()):
        wanted = draw(st.sampled_from([wanted, stored, stored]))
    return random_shape(rng), (stored, wanted), far, version, packed, (target, budget), rng


@settings(
    derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(cases())
def test_any_layout_from_any_layout_within_any_memory(case: Case) -> None:
    shape, (stored, wanted), far, version, packed, (target, budget), rng = case
    tensor = random_tensor(shape, stored, rng)
    target_tensor = cast(tensor, wanted)
    saved, asked = random_layout(shape, 1, rng), random_layout(shape, 1, rng)
    strategy = ZarrSaveShardedStrategy("zarr", version, target_chunk_bytes=target)
    options: dict[str, Any] = {"same": same, "cast": True, "exchange_budget_bytes": budget}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "c")
        if packed is None:
            save_parts({"w": tensor}, {"w": saved}, 0, place, strategy, rng)
        else:
            shardstore.save(
                {"w": whole("w", tensor)}, place, strategy, compression=packed, durable=False
            )
        with pytest.MonkeyPatch.context() as patch:
            if far:  # there is no device: host memory is filled as if it were one's
                patch.setattr(read_plan, "goes_through_host", lambda _: True)
            wrong = differences({"w": target_tensor}, {"w": asked}, 0, place, rng, **options)
    assert wrong == []


@pytest.mark.parametrize("place", ["files", "objects"])
@pytest.mark.parametrize("backend", [("zarr", 2), ("zarr", 1), ("torch_dist", 1)])
def test_each_format_and_store(place: str, backend: tuple[str, int], tmp_path: Path) -> None:
    if place == "objects" and backend[0] == "torch_dist":
        pytest.skip("that format is written to files only")
    url = str(tmp_path / "c") if place == "files" else f"memory://{uuid.uuid4().hex}/c"
    tensor = torch.randn(40, 30)
    shardstore.save(
        {"w": whole("w", tensor), "i": whole("i", torch.arange(9))}, url, backend, durable=False
    )
    state = {
        "part": ShardedTensor("w", None, torch.bfloat16, (7, 30), (40, 30), (3, 0), None),
        "w": whole("w", torch.zeros(40, 30, dtype=torch.float64)),
        "i": whole("i", torch.zeros(9, dtype=torch.int64)),
    }
    loaded = shardstore.load(
        state, url, cast=True, validate_access_integrity=False, exchange_budget_bytes=700
    )
    assert same(loaded["part"], tensor[3:10].bfloat16())
    assert same(state["w"].data, tensor.double())
    assert same(state["i"].data, torch.arange(9))


@pytest.mark.parametrize("rows", [3, 40, 50])
def test_a_cast_tensor_may_be_cut_or_padded(rows: int, tmp_path: Path) -> None:
    tensor = torch.randn(40, 3)
    shardstore.save({"w": whole("w", tensor)}, tmp_path / "c", durable=False)
    given_ = torch.full((rows, 3), 7, dtype=torch.float16)
    state = {"w": whole("w", given_, allow_shape_mismatch=True)}
    shardstore.load(state, tmp_path / "c", cast=True)
    want = torch.zeros(rows, 3, dtype=torch.float16)
    want[: min(rows, 40)] = tensor[:rows].half()
    assert same(given_, want)


def test_destinations_of_every_kind(tmp_path: Path) -> None:
    tensor = torch.complex(torch.randn(6, 8), torch.randn(6, 8))
    real = torch.randn(6, 8)
    shardstore.save({"z": whole("z", tensor), "r": whole("r", real)}, tmp_path / "c", durable=False)
    conjugated = torch.zeros(6, 8, dtype=torch.complex128).conj()
    negated = torch.zeros(6, 8, dtype=torch.complex128).conj().imag
    parameter = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16))
    state = {
        "conjugated": whole("z", conjugated),
        "negated": whole("r", negated),
        "parameter": whole("r", parameter),
        "as stored": whole("r", torch.zeros(6, 8)),
    }
    loaded = shardstore.load(state, tmp_path / "c", cast=True, validate_access_integrity=False)
    assert isinstance(loaded, dict)
    assert same(conjugated, tensor.to(torch.complex128))
    assert same(negated.resolve_neg(), real.double())
    assert same(parameter, real.bfloat16())
    assert same(loaded["as stored"], real)
    expanded = whole("r", torch.zeros(1, 8, dtype=torch.float64).expand(6, 8))
    with pytest.raises(ArgumentError, match="share memory"):
        shardstore.load({"r": expanded}, tmp_path / "c", cast=True)


def test_plain_tensors_and_a_device_for_new_ones(tmp_path: Path) -> None:
    state = {"a": torch.randn(5, 4), "b": [torch.arange(6), torch.tensor(2.5)]}
    shardstore.save(shardstore.shard(state), tmp_path / "c", durable=False)
    wanted = {
        "a": torch.zeros(5, 4, dtype=torch.float16),
        "b": [torch.zeros(6), torch.tensor(0, dtype=torch.float64)],
    }
    shardstore.load(wanted, tmp_path / "c", cast=True)
    assert same(wanted["a"], state["a"].half())
    assert same(wanted["b"][0], torch.arange(6.0))
    assert same(wanted["b"][1], torch.tensor(2.5, dtype=torch.float64))
    new = ShardedTensor("a", None, torch.float64, (5, 4), (5, 4), (0, 0), (1, 1))
    loaded = shardstore.load({"a": new}, tmp_path / "c", cast=True, map_location="cpu")
    assert same(loaded["a"], state["a"].double())


def test_a_manager_passes_cast_on(tmp_path: Path) -> None:
    tensor = torch.randn(9)
    with shardstore.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": whole("w", tensor)}, durable=False)
        given_ = torch.zeros(9, dtype=torch.bfloat16)
        restored = manager.restore({"w": whole("w", given_)}, cast=True)
    assert restored is not None
    assert same(given_, tensor.bfloat16())


def test_each_byte_is_read_once_verified_and_reported(tmp_path: Path) -> None:
    tensor = torch.randn(64, 256)
    small = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=4096)
    shardstore.save({"w": whole("w", tensor)}, tmp_path / "c", small, durable=False)
    seen: list[Any] = []
    given_ = torch.zeros(64, 256, dtype=torch.float16)
    counters.clear()
    shardstore.load(
        {"w": whole("w", given_)},
        tmp_path / "c",
        cast=True,
        exchange_budget_bytes=3 * 4096,
        progress=seen.append,
    )
    assert tensor.nbytes <= counters["bytes_read"] <= 1.01 * tensor.nbytes
    assert (seen[-1].bytes_done, seen[-1].bytes_total) == (given_.nbytes, given_.nbytes)
    assert (seen[-1].chunks_done, seen[-1].chunks_total) == (16, 16)
    flip(next((tmp_path / "c" / "w").glob("c.5*")), 100)
    with pytest.raises(ChunkCorruptError, match=r"chunk \(5, 0\) of key 'w'"):
        shardstore.load({"w": whole("w", given_)}, tmp_path / "c", cast=True)


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(1, 60))
def test_boxes_are_cut_in_order_and_within_the_limit(shape: list[int], most: int) -> None:
    numbers = np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)
    found = [numbers[box.slices] for box in _split(Box((0,) * len(shape), tuple(shape)), most)]
    assert all(part.size <= most for part in found)
    assert np.concatenate([part.reshape(-1) for part in found]).tolist() == list(
        range(numbers.size)
    )
