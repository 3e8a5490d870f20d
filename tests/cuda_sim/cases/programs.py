"""Other ways to save and load device tensors: DCP's storage classes, Megatron-Core's present
format, objects and common values, background functions, and the manager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import ShardedObject
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.manager import CheckpointManager
from shardstore.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from tests.cuda_sim import simulation
from tests.cuda_sim.states import (
    DTYPES,
    differing,
    is_equal,
    queue,
    random_tensor,
    sevens,
    sharded,
    side_streams,
    strategy,
)

SHAPE = (300, 257)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    """DCP's asynchronous saves need a process group for tensors on the host."""
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    dist.destroy_process_group()


@pytest.fixture
def wanted() -> dict[str, torch.Tensor]:
    return {str(dtype): random_tensor(SHAPE, dtype, i) for i, dtype in enumerate(DTYPES)}


def on_devices(wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of zeros, in turn on the two devices."""
    return {
        key: torch.zeros(value.shape, dtype=value.dtype).to(f"cuda:{i % 2}")
        for i, (key, value) in enumerate(wanted.items())
    }


def synchronize() -> None:
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_dcp_saves_and_loads_behind_the_callers_streams(
    tmp_path: Path, wanted: dict[str, torch.Tensor], current: int, asynchronous: bool
) -> None:
    device = on_devices(wanted)
    synchronize()
    writer = StorageWriter(tmp_path / "c", target_chunk_bytes=1 << 15)
    with side_streams(0, 1, current=current):
        queue(device.values(), wanted.values(), busy_ms=30)
        if asynchronous:
            future = dcp.async_save({**device, "step": 3}, storage_writer=writer)
            queue(device.values(), sevens(device.values()), busy_ms=0)
            future.result()
        else:
            dcp.save({**device, "step": 3}, storage_writer=writer)
        queue(device.values(), sevens(device.values()), busy_ms=30)
        state = {**device, "step": 0}
        dcp.load(state, storage_reader=StorageReader(tmp_path / "c"))
    assert state["step"] == 3
    assert not differing(device, wanted)


@pytest.mark.parametrize("how", ["at once", "asynchronous", "overlapping"])
def test_megatrons_present_format(
    tmp_path: Path, wanted: dict[str, torch.Tensor], how: str
) -> None:
    """Its files are written by threads, each from the tensors or from a copy."""
    wanted = {f"{key}.{i}": value for key, value in wanted.items() for i in range(3)}
    device = on_devices(wanted)
    synchronize()
    with side_streams(0, 1):
        queue(device.values(), wanted.values(), busy_ms=200)
        place, kind = tmp_path / "c", ("torch_dist", 1)
        if how == "at once":
            shardstore.save(dict(sharded(device)), place, kind)
        else:
            overlaps = how == "overlapping"
            handle = shardstore.async_save(
                dict(sharded(device)), place, kind, overlap_staging=overlaps
            )
            handle.wait_staged()
            queue(device.values(), sevens(device.values()), busy_ms=0)
            handle.result()
        queue(device.values(), sevens(device.values()), busy_ms=200)
        shardstore.load(dict(sharded(device)), place)
    assert not differing(device, wanted)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_objects_and_common_values_hold_device_tensors(
    tmp_path: Path, wanted: dict[str, torch.Tensor], asynchronous: bool
) -> None:
    wanted = {key: value for key, value in wanted.items() if "float8" not in key}
    common, object_ = on_devices(wanted), on_devices(wanted)
    synchronize()
    with side_streams(0, 1):
        queue(common.values(), wanted.values(), busy_ms=30)
        queue(object_.values(), wanted.values(), busy_ms=0)
        state: dict[str, Any] = {
            "common": {"deep": [common]},
            "object": ShardedObject("object", object_, (1,), (0,)),
            **sharded({"w": torch.ones(4)}),
        }
        if asynchronous:
            handle = shardstore.async_save(state, tmp_path / "c", strategy())
            queue(common.values(), sevens(common.values()), busy_ms=0)
            queue(object_.values(), sevens(object_.values()), busy_ms=0)
            handle.result()
        else:
            shardstore.save(state, tmp_path / "c", strategy())
    loaded = shardstore.load(
        {"object": ShardedObject("object", None, (1,), (0,)), **sharded({"w": torch.ones(4)})},
        tmp_path / "c",
    )
    assert not differing(loaded["common"]["deep"][0], wanted)
    assert not differing(loaded["object"], wanted)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_manager_saves_a_training_loop(tmp_path: Path, overlap: bool) -> None:
    """Each step overwrites the state as soon as it may."""
    steps = [random_tensor((512, 256), seed=step) for step in range(6)]
    weights = torch.empty(512, 256, device="cuda:1")
    with CheckpointManager(tmp_path / "run") as manager, side_streams(1):
        for step, values in enumerate(steps):
            simulation.delay(1000 * (step % 3))
            queue([weights], [values], busy_ms=5)
            handle = manager.async_save(
                step,
                dict(sharded({"w": weights})),
                overlap_staging=overlap,
                staging_budget_bytes=1 << 17,
                sharded_strategy=strategy(),
            )
            if overlap:
                handle.wait_staged()
        queue([weights], sevens([weights]), busy_ms=0)
        manager.wait()
        for step, values in enumerate(steps):
            found = shardstore.load_plain_tensors(manager.url(step), map_location="cuda")
            assert is_equal(found["w"], values)
        queue([weights], sevens([weights]), busy_ms=20)
        restored = manager.restore(dict(sharded({"w": weights})))
        assert restored is not None
        assert is_equal(weights, steps[-1])


def test_a_background_function_has_the_callers_device() -> None:
    """A new thread would begin with device 0."""
    found: list[int] = []
    calls = AsyncCallsQueue()
    with torch.cuda.device(1):
        calls.schedule_async_request(
            AsyncRequest(lambda: found.append(torch.cuda.current_device()), (), [])
        )
    calls.maybe_finalize_async_calls(blocking=True)
    assert found == [1]
