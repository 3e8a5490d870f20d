"""Saves of device tensors: behind the caller's queued work, before the work that it queues next."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from tests.cuda_sim import simulation
from tests.cuda_sim.states import (
    DTYPES,
    differing,
    is_equal,
    queue,
    random_tensor,
    set_streams,
    sevens,
    sharded,
    side_streams,
    strategy,
)

SEEDS = range(300)
SHAPES = [(300, 257), (1024,), (7, 513, 9), (2048, 128)]


def flat(key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> ShardedTensor:
    whole = slice(0, tensor.numel())
    return ShardedTensor.from_rank_offsets_flat(
        key, tensor.reshape(-1), shape, flattened_range=whole
    )


@pytest.mark.parametrize("chunk_bytes", [1 << 14, 1 << 24])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_data_type_and_layout(tmp_path: Path, chunk_bytes: int, asynchronous: bool) -> None:
    wanted = {str(dtype): random_tensor((300, 257), dtype, i) for i, dtype in enumerate(DTYPES)}
    device = {key: value.to("cuda") for key, value in wanted.items()}
    rows = device["torch.float32"]
    state: dict[str, Any] = dict(sharded(device))
    state["transposed"] = ShardedTensor.from_rank_offsets("transposed", rows.t())
    state["steps"] = ShardedTensor.from_rank_offsets("steps", rows[::3, 1::2])
    state["prepended"] = ShardedTensor.from_rank_offsets(
        "prepended", rows, (0, 0, 1), prepend_axis_num=1
    )
    state["flat"] = flat("flat", device["torch.int32"], (300, 257))
    state["common"] = {"step": 3, "on the device": device["torch.int64"]}
    if asynchronous:
        shardstore.async_save(state, tmp_path / "c", strategy(chunk_bytes)).result()
    else:
        shardstore.save(state, tmp_path / "c", strategy(chunk_bytes))
    found = shardstore.load_plain_tensors(tmp_path / "c")
    host = wanted["torch.float32"]
    wanted |= {"transposed": host.t(), "steps": host[::3, 1::2], "prepended": host[None]}
    wanted["flat"] = wanted["torch.int32"]
    assert not differing(found, wanted)
    common = shardstore.load_common_state_dict(tmp_path / "c")["common"]
    assert is_equal(common["on the device"], wanted["torch.int64"])


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "transposed", "flat"])
def test_a_save_reads_behind_the_streams_of_both_devices(
    tmp_path: Path, current: int, layout: str
) -> None:
    """Its threads, which share 32 MiB, have streams of their own that wait for no other stream."""
    wanted = {f"w{i}": random_tensor((2048, 1024), seed=i) for i in range(4)}
    device = {
        key: torch.zeros(value.shape, device=f"cuda:{i % 2}")
        for i, (key, value) in enumerate(wanted.items())
    }
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with side_streams(0, 1, current=current):
        queue(device.values(), wanted.values(), busy_ms=200)
        state: dict[str, Any] = dict(sharded(device))
        if layout == "transposed":
            state = dict(sharded({key: value.t() for key, value in device.items()}))
            wanted = {key: value.t() for key, value in wanted.items()}
        elif layout == "flat":
            state = {key: flat(key, value, (2048, 1024)) for key, value in device.items()}
        shardstore.save(state, tmp_path / "c", strategy(1 << 20))
        assert torch.cuda.current_device() == current
    assert not differing(shardstore.load_plain_tensors(tmp_path / "c"), wanted)


@pytest.mark.parametrize("begin", range(0, len(SEEDS), 50))
def test_the_state_is_overwritten_right_after_the_call(tmp_path: Path, begin: int) -> None:
    """Whatever the devices, streams, budget, chunks and order: the save has the state's bits of
    the time of the call."""
    wrong = [seed for seed in SEEDS[begin : begin + 50] if not _holds(tmp_path / "c", seed)]
    assert not wrong


def _holds(path: Path, seed: int) -> bool:
    """Save a state whose values are queued, overwrite it, and compare."""
    chosen = random.Random(seed)
    simulation.delay(chosen.choice([0, 1000, 5000]))
    devices = chosen.choice([(0,), (0, 1), (1,)])
    overlap, strided, freed = (chosen.random() < 0.4 for _ in range(3))
    budget = chosen.choice([None, None, 1 << 17, 1 << 20])
    wanted = {f"w{i}": random_tensor(s, seed=seed * 10 + i) for i, s in enumerate(SHAPES)}
    device = {
        key: torch.empty(value.shape, device=f"cuda:{devices[i % len(devices)]}")
        for i, (key, value) in enumerate(wanted.items())
    }
    shapes = {key: (value.shape, value.device) for key, value in device.items()}
    others = sevens(wanted.values())
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with side_streams(*chosen.choice([(), devices]), current=chosen.choice([0, 1])):
        queue(device.values(), wanted.values(), busy_ms=chosen.choice([0, 0, 10]))
        if strided:
            saved = {k: v.t() if v.dim() == 2 else v for k, v in device.items()}
            wanted = {k: v.t() if v.dim() == 2 else v for k, v in wanted.items()}
        else:
            saved = dict(device)
        handle = shardstore.async_save(
            sharded(saved),
            path,
            strategy(chosen.choice([1 << 14, 1 << 17, 1 << 22]), chosen.choice([1, 4])),
            overlap_staging=overlap,
            overwrite=True,
            durable=False,  # half of the time would be the disk's
            staging_budget_bytes=budget,
        )
        saved.clear()
        if freed:  # the allocator may give the memory to the next tensors, without wait_staged()
            device.clear()
            device = {key: torch.empty(s, device=d) for key, (s, d) in shapes.items()}
        elif overlap:
            handle.wait_staged()
        if chosen.random() < 0.5 and not freed:
            later = [torch.cuda.Stream(number) for number in devices]
            if overlap:  # wait_staged() is about the current streams
                for stream in later:
                    stream.wait_stream(torch.cuda.current_stream(stream.device))
            with side_streams():
                set_streams(later)
                queue(device.values(), others, busy_ms=0)
                for key, value in device.items():
                    value.record_stream(torch.cuda.current_stream(shapes[key][1]))
        else:
            queue(device.values(), others, busy_ms=0)
        handle.result()
    set_streams(torch.cuda.default_stream(number) for number in range(2))
    return not differing(shardstore.load_plain_tensors(path), wanted)


def test_page_locked_memory_is_reused_and_its_errors_are_not_about_it(tmp_path: Path) -> None:
    """A state that already is in page-locked memory, and saves one after the other."""
    wanted = {"host": random_tensor((512, 256), seed=1), "device": random_tensor((512, 256))}
    state = {"host": wanted["host"].clone().pin_memory(), "device": wanted["device"].to("cuda")}
    for step in range(3):
        handle = shardstore.async_save(sharded(state), tmp_path / str(step), strategy())
        for value, other in zip(state.values(), sevens(state.values()), strict=True):
            value.copy_(other)
        handle.result()
        assert not differing(shardstore.load_plain_tensors(tmp_path / str(step)), wanted)
        for key, value in state.items():
            value.copy_(wanted[key])
    assert simulation.registered() == 1


def test_a_larger_state_takes_new_memory_and_frees_the_old(tmp_path: Path) -> None:
    for size in (1 << 18, 1 << 20, 1 << 16):
        state = {"w": torch.full((size,), 3.0, device="cuda")}
        shardstore.async_save(sharded(state), tmp_path / str(size), strategy(1 << 18)).result()
        assert simulation.registered() == 1
