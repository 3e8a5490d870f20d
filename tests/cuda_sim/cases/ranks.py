"""Two ranks with a device each, or with the device of the other: groups of replicas, and errors of
one rank, which every rank learns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import RanksError
from tests.cuda_sim import simulation
from tests.cuda_sim.states import (
    differing,
    queue,
    random_tensor,
    sevens,
    sharded,
    side_streams,
    strategy,
)
from tests.helpers.ranks_helper import run_ranks

WORLD = 2
ROWS = 400


def wanted_tensors() -> dict[str, torch.Tensor]:
    return {f"w{i}": random_tensor((WORLD * ROWS, 256), seed=i) for i in range(4)}


def rows_of(rank: int, tensors: dict[str, torch.Tensor], device: int) -> dict[str, torch.Tensor]:
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    return {key: value[rows].to(f"cuda:{device}") for key, value in tensors.items()}


def by_rows(rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {
        key: ShardedTensor.from_rank_offsets(key, value, (0, rank, WORLD))
        for key, value in tensors.items()
    }


def _saves(rank: int, _: int, path: str, layout: str) -> list[str]:
    """Save asynchronously while the state changes, on the device that is not the current one."""
    torch.cuda.set_device(rank)
    other, wanted = 1 - rank, wanted_tensors()
    group = dist.new_group([0, 1])
    wrong: list[str] = []
    for step in range(6):
        simulation.delay(step * 500)
        options: dict[str, Any] = {"overlap_staging": bool(step % 2)}
        if layout == "rows":
            given = rows_of(rank, wanted, other)
            state = by_rows(rank, given)
        elif layout == "replicas":
            given = {key: value.to(f"cuda:{other}") for key, value in wanted.items()}
            state = sharded(given, replica_id=rank)
            options["replica_group"] = group
        else:  # "ranges": chunks that both ranks have a part of
            given, state = {}, {}
            cut = WORLD * ROWS * 256 // 2 + 1000
            for key, value in wanted.items():
                bounds = slice(0, cut) if rank == 0 else slice(cut, value.numel())
                given[key] = value.reshape(-1)[bounds].to(f"cuda:{other}")
                state[key] = ShardedTensor.from_rank_offsets_flat(
                    key, given[key], value.shape, flattened_range=bounds
                )
        values = [value.cpu().pin_memory() for value in given.values()]
        others = sevens(given.values())
        torch.cuda.synchronize(other)
        with side_streams(other, current=rank):
            queue(given.values(), others, busy_ms=0)
            queue(given.values(), values, busy_ms=10)
            handle = shardstore.async_save(state, f"{path}/{step}", strategy(), **options)
            handle.wait_staged()
            queue(given.values(), others, busy_ms=0)
            handle.result()
        torch.cuda.set_device(rank)
        found = shardstore.load_plain_tensors(f"{path}/{step}")
        wrong += [f"{step}: {key}" for key in differing(found, wanted)]
        dist.barrier()
    return wrong + [f"{simulation.faults()} faults"] * bool(simulation.faults())


@pytest.mark.parametrize("layout", ["rows", "replicas", "ranges"])
def test_ranks_save_while_their_states_change(tmp_path: Path, layout: str) -> None:
    assert run_ranks(_saves, WORLD, str(tmp_path), layout) == [[], []]


def _loads(rank: int, _: int, path: str) -> list[str]:
    """Load with a group into tensors of each device, behind work on a side stream."""
    wanted = wanted_tensors()
    torch.cuda.set_device(rank)
    shardstore.save(sharded(wanted, replica_id=rank), path, strategy())
    group = dist.new_group([0, 1])
    wrong: list[str] = []
    for step in range(4):
        device = (rank + step) % 2
        given = {
            key: torch.zeros(value.shape).to(f"cuda:{device}") for key, value in wanted.items()
        }
        if step >= 2 and rank == 1:
            del given["w3"]  # rank 0 alone reads it, in a thread
        torch.cuda.synchronize(device)
        with side_streams(device, current=rank):
            queue(given.values(), sevens(given.values()), busy_ms=1000)
            shardstore.load(
                sharded(given, replica_id=rank),
                path,
                replica_group=group,
                share_replicas="always",
                validate_access_integrity=False,
            )
        torch.cuda.set_device(rank)
        wrong += [f"{step}: {key}" for key in given if differing(given, {key: wanted[key]})]
    return wrong + [f"{simulation.faults()} faults"] * bool(simulation.faults())


def test_a_shared_load_is_behind_the_callers_streams_of_all_devices(tmp_path: Path) -> None:
    assert run_ranks(_loads, WORLD, str(tmp_path / "c")) == [[], []]


def _errors(rank: int, _: int, path: str, function: str, code: int) -> list[Any]:
    """One rank has an error; both learn of it, and the next save is right."""
    torch.cuda.set_device(rank)
    wanted = wanted_tensors()
    given = rows_of(rank, wanted, rank)
    shardstore.async_save(by_rows(rank, given), f"{path}/before", strategy()).result()
    if rank == 1:
        simulation.fail(function, code)
    handle = shardstore.async_save(by_rows(rank, given), f"{path}/failed", strategy())
    error = handle.exception()
    simulation.fail(function, 0, 0, 0)
    shardstore.async_save(by_rows(rank, given), f"{path}/after", strategy()).result()
    wrong = differing(shardstore.load_plain_tensors(f"{path}/after"), wanted)
    return [type(error).__name__, "rank 1" in str(error), wrong]


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventSynchronize"])
def test_an_error_of_one_ranks_device_is_an_error_on_every_rank(
    tmp_path: Path, function: str
) -> None:
    found = run_ranks(_errors, WORLD, str(tmp_path), function, 719)
    assert found == [[RanksError.__name__, True, []], ["AcceleratorError", False, []]]
    assert not (tmp_path / "failed" / "zarr.json").exists()


def _contexts(rank: int, _: int, path: str) -> list[bool]:
    """Which devices a rank has used after saves and loads."""
    torch.cuda.set_device(1)
    given = {"w": torch.ones(1 << 16, device="cuda")}
    state = sharded(given, replica_id=rank)
    for overlap in (False, True):
        handle = shardstore.async_save(state, f"{path}/{overlap}", overlap_staging=overlap)
        handle.wait_staged()
        handle.result()
    shardstore.load(state, f"{path}/True")
    return [simulation.has_context(number) for number in range(2)]


def test_a_rank_uses_no_device_but_its_own(tmp_path: Path) -> None:
    """A thread that looks at device 0 takes some hundred megabytes there, for every rank."""
    assert run_ranks(_contexts, WORLD, str(tmp_path)) == [[False, True]] * 2
