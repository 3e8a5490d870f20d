"""Ranks, also those that hold only copies, describe a tensor or object alike, or a save is an error
on all of them that names key, ranks and both sides, before a byte is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardstore
from shardstore import CheckpointManager, ShardedObject, ShardedTensor, validation
from shardstore.errors import AccessPatternError, RanksError, ShapeMismatchError
from shardstore.mapping import ShardedTensorFactory
from tests.helpers.dtensor_states import cut
from tests.helpers.scenarios import gathered, raised, remains

WORLD = 4
Sides = tuple[tuple[int, ...], torch.dtype]
LEFT: Sides = ((4, 2), torch.float32)
SHAPE: Sides = ((4, 3), torch.float32)
DTYPE: Sides = ((4, 2), torch.int32)


def zeros(side: Sides) -> torch.Tensor:
    return torch.zeros(side[0], dtype=side[1])


def copy(rank: int, side: Sides) -> Any:
    return ShardedTensor.from_rank_offsets("k", zeros(side), replica_id=rank)


def built(rank: int, side: Sides) -> Any:
    def build(key: str, tensor: Any, *_: Any) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)}

    return ShardedTensorFactory("k", zeros(side), build, lambda parts: parts["w"])


def flat(rank: int, side: Sides) -> Any:
    """Halves, each with a copy."""
    values = zeros(side).reshape(-1).chunk(2)[rank % 2]
    mine = slice(rank % 2 * len(values), (rank % 2 + 1) * len(values))
    return ShardedTensor.from_rank_offsets_flat(
        "k", values, side[0], flattened_range=mine, replica_id=rank // 2
    )


def of_stage(rank: int, side: Sides) -> Any:
    """A DTensor of each of two meshes, which both stages hold whole."""
    stage = rank // 2 * 2
    mesh = DeviceMesh("cpu", [stage, stage + 1], _init_backend=False)
    return cut(zeros(side), mesh, [Shard(0)])


def plain(rank: int, side: Sides) -> Any:
    return zeros(side)


def thing(rank: int, side: Sides) -> Any:
    return ShardedObject("k", rank, side[0][1:], (0,), replica_id=rank)


def irregular(rank: int, side: Sides) -> Any:
    found = copy(rank, side)
    found.axis_fragmentations = None
    return found


Make = Callable[[int, Sides], Any]
TENSORS: tuple[Make, ...] = (copy, built, flat, of_stage, plain)
CASES: tuple[tuple[Make, Make, Sides, tuple[str, str]], ...] = (
    *((make, make, SHAPE, ("(4, 2)", "(4, 3)")) for make in TENSORS),
    *((make, make, DTYPE, ("float32", "int32")) for make in TENSORS),
    (thing, thing, SHAPE, ("(2,)", "(3,)")),
    (copy, irregular, LEFT, ("(1, 1)", "None")),
    (copy, thing, SHAPE, ("ShardedTensor", "ShardedObject")),
)


def ways(state: dict[str, Any], place: Path) -> dict[str, Callable[[], object]]:
    everyone = dist.group.WORLD
    return {
        "save": lambda: shardstore.save(state, place),
        "v2": lambda: shardstore.save(state, place, ("zarr", 1)),
        "torch_dist": lambda: shardstore.save(state, place, ("torch_dist", 1)),
        "async": lambda: shardstore.async_save(state, place),
        "manager": lambda: CheckpointManager(place).save(1, state),
        "group": lambda: shardstore.save(state, place, process_group=everyone),
    }


def copies_are_described_alike(rank: int, world_size: int, folder: Path) -> None:
    for number, (make, other, side, words) in enumerate(CASES):
        there = rank >= 2
        values = {"k": other(rank, side) if there else make(rank, LEFT)}
        values["same"] = copy(rank, LEFT)
        values["same"].key = "same"
        state = shardstore.shard(values) if make in (of_stage, plain) else values
        saves = ways(state, folder / str(number) / "c")
        for way in saves if make in (copy, thing) else ["save"]:
            error = raised(saves[way])
            told = gathered((type(error), str(error)))
            assert told == [(AccessPatternError, str(error))] * world_size, (number, way, told)
            for word in ("'k'", "on rank 0", "on rank 2", *words):
                assert word in str(error), (way, error)
        assert remains(folder) == [], number
        dist.barrier()


def a_load_says_the_same(rank: int, folder: Path) -> None:
    shardstore.save({"k": copy(rank, LEFT)}, folder / "c")
    wanted = {"k": copy(rank, LEFT if rank < 2 else SHAPE)}
    said = "has global_shape (4, 2) on rank 0 and (4, 3) on rank 2"
    raised(lambda: shardstore.load(wanted, folder / "c"), said, kind=ShapeMismatchError)


def the_check_can_be_turned_off(rank: int, folder: Path) -> None:
    state = {"k": copy(rank, LEFT if rank < 2 else SHAPE)}
    shardstore.save(state, folder / "c", validate_access_integrity=False)
    assert shardstore.load_plain_tensors(folder / "c")["k"].shape == (4, 2)


def _cell(index: int, parts: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("grid", torch.zeros(2), (0, index, parts))


def metadata_of_all_ranks_is_checked_on_rank_0(rank: int, world_size: int, folder: Path) -> None:
    state = {"a": _cell(rank, world_size), "o": [ShardedObject("o", 5, (world_size,), (rank,))]}
    local, everywhere = validation.determine_global_metadata(state)
    assert len(local) == 2
    found = [[(item.key, item.global_offset) for item in one] for one in everywhere]
    assert found == [[("grid", (2 * r,)), ("o", (r,))] for r in range(world_size)]
    validation.validate_sharding_integrity(everywhere)
    _, bad = validation.determine_global_metadata({"a": _cell(0, world_size)})
    error = pytest.raises(AccessPatternError, match=r"ranks \[0, 1, 2, 3\]")
    with nullcontext() if rank else error:
        validation.validate_sharding_integrity(bad)


def common_state_that_cannot_be_sent_is_an_error_on_all(rank: int, folder: Path) -> None:
    common = {"f": (lambda: 1) if rank == 0 else None}
    with pytest.raises(RanksError if rank else Exception, match="rank 0" if rank else "lambda"):
        validation.validate_sharding_integrity([[]], common)


def copies_of_what_another_rank_writes_are_fine(rank: int, folder: Path) -> None:
    """Ranks have copies of what another one writes, and ranks 2 and 3 hold copies alone."""
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(2), replica_id=(0, int(rank != main)))
        for main, key in enumerate("ab")
    }
    state["o"] = ShardedObject("o", 1, (1,), (0,), replica_id=3 - rank)
    shardstore.save(state, folder / "step")
    assert sorted(shardstore.load_tensors_metadata(folder / "step")) == ["a", "b"]


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
