"""Saves and loads through DCP by the plans of all ranks: planners that look at them or change
them, and plans that do not fit together."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import StorageError
from shardstore.storage.commit.folder import SEEN_S

KEYS = ("a", "b", "c")
WORLD = 3


def truth(key: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(6, 2) + 100 * KEYS.index(key)


def state(fill: float | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: distribute_tensor(
            truth(key) if fill is None else torch.full((6, 2), fill), mesh, [Shard(0)]
        )
        for key in KEYS
    }


class Looks(DefaultLoadPlanner):
    """The coordinator notes the keys and lengths of each rank's items."""

    seen: list[list[tuple[str, tuple[int, ...]]]]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.seen = [
            [(item.dest_index.fqn, tuple(item.dest_index.offset or ())) for item in plan.items]
            for plan in global_plan
        ]
        return global_plan


class Replaces(DefaultLoadPlanner):
    """The coordinator leaves "b" out of all plans but the first."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        kept = [replace(p, items=[i for i in p.items if not _is_b(i)]) for p in global_plan[1:]]
        return [global_plan[0], *kept]


class ChangesInPlace(DefaultLoadPlanner):
    """The same, in the very lists."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        for plan in global_plan[1:]:
            for item in [item for item in plan.items if _is_b(item)]:
                plan.items.remove(item)
        return global_plan


class ChangesItsOwn(DefaultLoadPlanner):
    """Each rank but the first leaves "b" out of its plan when that has come back."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        if dist.get_rank() != 0:
            central_plan.items[:] = [item for item in central_plan.items if not _is_b(item)]
        return central_plan


def _is_b(item: Any) -> bool:
    return bool(item.dest_index.fqn == "b")


def a_load_follows_its_planner_and_the_coordinator_sees_all_items(rank: int, folder: Path) -> None:
    dcp.save(state(None), storage_writer=StorageWriter(folder / "saved"))
    planner = Looks()
    found = state(-1.0)
    dcp.load(found, storage_reader=StorageReader(folder / "saved"), planner=planner)
    for key in KEYS:
        assert torch.equal(found[key].full_tensor(), truth(key)), key
    if rank == 0:
        assert planner.seen == [[(key, (2 * r, 0)) for key in KEYS] for r in range(WORLD)]
    reader = StorageReader(folder / "saved")  # a reader may be used again
    for planner in (Replaces, ChangesInPlace, ChangesItsOwn):
        found = state(-1.0)
        dcp.load(found, storage_reader=reader, planner=planner())
        for key in KEYS:
            whole = found[key]
            assert isinstance(whole, DTensor)
            mine = truth(key).chunk(WORLD)[rank]
            expected = torch.full_like(mine, -1.0) if key == "b" and rank else mine
            assert torch.equal(whole.to_local(), expected), (key, rank, planner)


def ranks_that_give_a_tensor_two_types_are_all_told(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    part = torch.ones(2, 3, dtype=torch.float16 if rank == 1 else torch.float32)
    state = {"w": DTensor.from_local(part, mesh, [Shard(0)])}
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=StorageWriter(folder / "checkpoint"))
    for part in ("'w'", "rank 1 has", "float16", "rank 0 has", "float32"):
        assert part in str(caught.value)
    dist.barrier()
    assert not any(folder.iterdir())


def a_folder_for_each_node_is_told_soon(rank: int, folder: Path) -> None:
    """Each rank sees a folder of its own at the same path, as nodes with disks of their own do."""
    own = folder / f"node-{rank}"
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        began = time.monotonic()
        with pytest.raises(CheckpointException, match="not on a file system that all ranks share"):
            dcp.save(state(None), storage_writer=StorageWriter("run/step-1"))
        assert time.monotonic() - began < SEEN_S / 2
    assert not (own / "run/step-1").exists()


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


def test_disks_of_several_machines_are_told_before_anything_is_written(tmp_path: Path) -> None:
    """The coordinator learns of them from the plans, the first meeting of a save by DCP."""
    writer = StorageWriter(tmp_path / "run")
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan([]))
    assert plan.storage_data
    other = replace(plan, storage_data="boot of another machine")
    with pytest.raises(StorageError, match=r"several machines \(those of ranks \[1, 2\]\)"):
        writer.prepare_global_plan([plan, plan, other])
    assert list(tmp_path.iterdir()) == []
    # A disk that one machine exports, or a network's file system, may be the same for all.
    writer.prepare_global_plan([plan, plan, replace(plan, storage_data="")])
