"""Loads into device tensors: behind the caller's queued work, whatever the current device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardstore
from shardstore import ShardedTensor
from tests.cuda_sim import simulation
from tests.cuda_sim.states import (
    DTYPES,
    differing,
    is_equal,
    on_host,
    queue,
    random_tensor,
    sevens,
    sharded,
    side_streams,
    strategy,
)

SHAPE = (300, 257)


@pytest.fixture(scope="module")
def wanted() -> dict[str, torch.Tensor]:
    return {str(dtype): random_tensor(SHAPE, dtype, i) for i, dtype in enumerate(DTYPES)}


@pytest.fixture(scope="module", params=[1 << 14, 1 << 24])
def stored(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    wanted: dict[str, torch.Tensor],
) -> Path:
    path = tmp_path_factory.mktemp("stored") / "c"
    shardstore.save(sharded(wanted), path, strategy(request.param))
    return path


def empty_like(wanted: dict[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    return {key: torch.zeros(v.shape, dtype=v.dtype).to(device) for key, v in wanted.items()}


@pytest.mark.parametrize("budget", [4096, 1 << 20, 1 << 28])
@pytest.mark.parametrize("delay_us", [0, 300])
def test_tensors_are_filled_in_place(
    stored: Path, wanted: dict[str, torch.Tensor], budget: int, delay_us: int
) -> None:
    if budget == 4096:
        wanted = dict(list(wanted.items())[:3])
    given = empty_like(wanted)
    simulation.delay(delay_us)
    loaded = shardstore.load(sharded(given), stored, exchange_budget_bytes=budget)
    assert not differing(given, wanted)
    assert all(loaded[key].data_ptr() == value.data_ptr() for key, value in given.items())


@pytest.mark.parametrize("current", [0, 1])
def test_what_was_queued_before_a_load_does_not_land_after_it(
    stored: Path, wanted: dict[str, torch.Tensor], current: int
) -> None:
    given = {
        key: torch.zeros(value.shape, dtype=value.dtype).to(f"cuda:{i % 2}")
        for i, (key, value) in enumerate(wanted.items())
    }
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with side_streams(0, 1, current=current):
        queue(given.values(), sevens(given.values()), busy_ms=30)
        shardstore.load(sharded(given), stored)
        assert torch.cuda.current_device() == current
    assert not differing(given, wanted)


@pytest.mark.parametrize("where", ["cuda", "cuda:1", torch.device("cuda", 1)])
def test_map_location_makes_tensors_on_a_device(
    stored: Path, wanted: dict[str, torch.Tensor], where: Any
) -> None:
    state: dict[str, Any] = dict(sharded(wanted))
    for value in state.values():
        value.data = None
    for loaded in (
        shardstore.load(state, stored, map_location=where),
        shardstore.load_plain_tensors(stored, map_location=where, keys=list(wanted)),
    ):
        assert {value.device for value in loaded.values()} == {torch.empty(0, device=where).device}
        assert not differing(loaded, wanted)
    region = [slice(3, 77), slice(5, 99)]
    key = "torch.float32"
    found = shardstore.load_plain_tensors(stored, map_location=where, keys=[key], region=region)
    assert is_equal(found[key], wanted[key][3:77, 5:99])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_values_are_cast_on_the_host(tmp_path: Path, dtype: torch.dtype) -> None:
    host = random_tensor((100, 64), torch.int16).float()
    shardstore.save(sharded({"w": host.to("cuda")}), tmp_path / "c")
    given = torch.zeros(100, 64, dtype=dtype).to("cuda:1")
    shardstore.load(sharded({"w": given}), tmp_path / "c", cast=True)
    assert is_equal(given, host.to(dtype))


def test_strided_flat_padded_and_wrapped_tensors(tmp_path: Path) -> None:
    """Each kind of destination that is not filled from beginning to end by one copy."""
    host = random_tensor((300, 256))
    keys = ("columns", "flat", "padded", "wrapped")
    shardstore.save(sharded(dict.fromkeys(keys, host)), tmp_path / "c", strategy())
    columns, flat = (torch.zeros(256, 300).to("cuda"), torch.zeros(300 * 256).to("cuda"))
    padded = torch.full((310, 256), 5.0).to("cuda")
    wrapped = _Wrapped(torch.zeros(300, 256).to("cuda:1"))
    whole = slice(0, 300 * 256)
    state = {
        "columns": ShardedTensor.from_rank_offsets("columns", columns.t()),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat, (300, 256), flattened_range=whole
        ),
        "padded": ShardedTensor.from_rank_offsets("padded", padded, allow_shape_mismatch=True),
        "wrapped": ShardedTensor.from_rank_offsets("wrapped", wrapped),
    }
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with side_streams(0, 1):
        queue([padded, columns], sevens([padded, columns]), busy_ms=30)
        shardstore.load(state, tmp_path / "c")
    assert is_equal(columns.t(), host)
    assert is_equal(flat.reshape(300, 256), host)
    assert is_equal(padded[:300], host)
    assert not bool(on_host(padded)[300:].any())
    assert is_equal(wrapped.as_subclass(torch.Tensor), host)


class _Wrapped(torch.Tensor):
    """A subclass, which a load does not write in parts."""


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_a_load_without_page_locked_memory_warns_and_goes_on(
    stored: Path, wanted: dict[str, torch.Tensor], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = empty_like(wanted)
    state: dict[str, Any] = dict(sharded(given))
    if kind == "wrapped":
        state = dict(sharded({k: v.as_subclass(_Wrapped) for k, v in given.items()}))
    with (
        simulation.failing("cudaHostAlloc", 2, count=10**6),
        simulation.failing("cudaHostRegister", 2, count=10**6),
        caplog.at_level(logging.WARNING),
    ):
        shardstore.load(state, stored)
    assert not differing(given, wanted)
    if kind == "plain":
        assert "page-locking" in caplog.text
        assert "exchange_budget_bytes" in caplog.text


@pytest.mark.parametrize(
    ("function", "code", "skip"),
    [("cudaMemcpyAsync", 719, 6), ("cudaStreamSynchronize", 719, 0), ("cudaMalloc", 2, 0)],
)
def test_an_error_of_the_device_is_the_loads_error(
    stored: Path, wanted: dict[str, torch.Tensor], function: str, code: int, skip: int
) -> None:
    """The next load is right."""
    given = empty_like(wanted)
    torch.cuda.empty_cache()
    state: dict[str, Any] = dict(sharded(given))
    error: type[Exception] = RuntimeError
    if function == "cudaMalloc":
        error = torch.OutOfMemoryError
        for value in state.values():
            value.data = None
    with simulation.failing(function, code, skip, 10**6), pytest.raises(error):
        shardstore.load(state, stored, map_location="cuda:1")
    shardstore.load(sharded(given), stored)
    assert not differing(given, wanted)


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_a_loaded_tensor_is_complete_on_every_stream(tmp_path: Path, kind: str) -> None:
    """Not only on the stream that it was copied on."""
    host = {"w": random_tensor((1 << 18,))}
    shardstore.save(sharded(host), tmp_path / "c", strategy())
    given = torch.zeros(1 << 18).to("cuda")
    found = torch.zeros(1 << 18).pin_memory()
    other, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    simulation.delay(20_000)
    with torch.cuda.stream(side):
        torch.cuda._sleep(30_000_000)
        target = given.as_subclass(_Wrapped) if kind == "wrapped" else given
        shardstore.load(sharded({"w": target}), tmp_path / "c")
    simulation.delay(0)
    with torch.cuda.stream(other):
        found.copy_(given, non_blocking=True)
        other.synchronize()
    assert is_equal(found, host["w"])


def test_tied_tensors_are_compared(tmp_path: Path) -> None:
    host = {"a": random_tensor((64, 8)), "b": random_tensor((64, 8))}
    shardstore.save(sharded(host), tmp_path / "c")
    shared = torch.zeros(64, 8).to("cuda")
    shardstore.load(sharded({"a": shared, "b": shared}), tmp_path / "c")
    assert is_equal(shared, host["a"])


def test_dtensors_on_a_device(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        host = random_tensor(SHAPE)
        mesh = init_device_mesh("cuda", (1,))
        made = DTensor.from_local(host.to("cuda"), mesh, [Shard(0)], run_check=False)
        handle = shardstore.async_save({"d": made}, tmp_path / "c", strategy())
        made.to_local().copy_(sevens([host])[0], non_blocking=True)
        handle.result()
        shardstore.load({"d": made}, tmp_path / "c")
        assert is_equal(made.to_local(), host)
    finally:
        dist.destroy_process_group()
