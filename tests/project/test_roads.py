"""The road of a save and of a load: the steps on its page, in their order, and few walks; and the
functions of Megatron-Core's Zarr strategy on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardstore
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import latest_save
from shardstore.strategies import zarr
from testing.roads import Road, roads
from tests.helpers.ranks_helper import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "life-of-a-save.md"
MOST = {"save": (99, 28), "load": (110, 29)}
"""Functions of the package, and files that they are in, until the first byte of a chunk moves."""
DEEPEST = 14


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_call_takes_the_steps_of_its_page(tmp_path: Path, name: str) -> None:
    latest_save.clear()  # of tests before this one; to look whether it has ended takes a function
    for work in (roads(f"{tmp_path}/first"), roads(f"{tmp_path}/second")):
        if name == "load":
            work["save"]()
        road = Road(work[name])  # the first call imports and fills caches
    _, part = PAGE.read_text(encoding="utf-8").split(f"## A {name}\n", 1)
    rows = [line for line in part.split("\n## ")[0].splitlines() if line.startswith("|")]
    steps = re.findall(r"\(#(shardstore\.[\w.]+)\)", "\n".join(rows))
    assert [step for step in road.names if step in steps] == steps
    assert road.walks.total() <= 3, road.walks
    functions, files = MOST[name]
    assert len(road.calls) <= functions, road
    assert road.files <= files, road
    assert road.depth <= DEEPEST, road


def walks_of_dtensors(rank: int, world_size: int, folder: str) -> list[int]:
    """The walks of a save, and of loads from it and from what one process saved."""
    mesh = init_device_mesh("cpu", (world_size,))

    def state() -> dict[str, Any]:
        parts = [distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for _ in range(2)]
        return {"model": {"w": parts[0], "b": torch.ones(3)}, "opt": [{"m": parts[1]}], "n": 1}

    plain = {"model": {"w": torch.ones(4, 4), "b": torch.ones(3)}, "opt": [{"m": torch.ones(4, 4)}]}
    shardstore.save(plain, f"{folder}/plain")
    roads = [Road(lambda: shardstore.save(state(), f"{folder}/parts"))]
    for place in ("parts", "plain"):
        for mode in ("assume_ok_unexpected", "return_all"):
            roads.append(Road(partial(shardstore.load, state(), f"{folder}/{place}", strict=mode)))
    return [road.walks.total() for road in roads]


def test_states_of_dtensors_are_walked_few_times(tmp_path: Path) -> None:
    """A load walks the state anew once it knows which of its tensors are arrays."""
    for save, *loads in run_ranks(walks_of_dtensors, 2, str(tmp_path)):
        assert save <= 3
        assert max(loads) <= 4


def test_functions_of_single_arrays_are_on_the_road(tmp_path: Path) -> None:
    """Saves and loads call them, or they call what saves and loads call."""
    flat = {
        f"f{n}": ShardedTensor.from_rank_offsets_flat(
            "flat", torch.ones(8), (4, 4), flattened_range=slice(8 * n, 8 * n + 8)
        )
        for n in range(2)
    }
    small = ShardedTensor.from_rank_offsets("w", torch.ones(4, 4))
    large = ShardedTensor.from_rank_offsets("w", torch.ones(6, 6), allow_shape_mismatch=True)
    place, part, one = tmp_path / "s", f"{zarr.__name__}.", tmp_path / "one"
    of_save = Road(lambda: shardstore.save({"w": small, **flat}, place)).names
    of_load = Road(lambda: shardstore.load({"w": large, **flat}, place)).names
    metadata = Road(lambda: shardstore.load_tensors_metadata(place)).names

    def called_by(work: Callable[[], object]) -> set[str]:
        return set(Road(work).names)

    for name in ("_create_or_open_zarr_arrays", "_should_create_array", "_create_zarr_array"):
        assert f"{part}{name}" in of_save
    (array,) = zarr._create_or_open_zarr_arrays([small], one)
    write = called_by(lambda: zarr._save_to_existing_array(flat["f1"], array))
    assert "shardstore.loading.plan.held_regions" in write & set(of_load)
    read = called_by(lambda: zarr._load_from_array(small, one))
    for name in ("plan.plan_reads", "read.read_chunks", "plan.assemble"):
        assert f"shardstore.loading.{name}" in read & set(of_load)
    whole = torch.ones(4, 4).numpy()
    padded = called_by(lambda: zarr.postprocess_numpy_array(whole, large))
    assert f"{part}pad_to_expected_shape" in padded
    assert "shardstore.loading.plan.stored_part" in padded & set(of_load)
    cut = called_by(lambda: zarr.postprocess_numpy_array(whole, flat["f1"]))
    assert f"{part}flatten_range" in cut
    assert "shardstore.mapping.flat_bounds" in cut & set(of_load)
    listed = called_by(lambda: zarr.load_zarr_based_sharded_metadata(place, lambda _: ((), "f4")))
    assert "shardstore.loading.plan.whole_tensors" in listed & set(metadata)
