"""Loads through PyTorch DCP of states whose keys are not those of the checkpoint: what is there is
loaded, the rest stays, and both sides are told, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardstore
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.errors import CheckpointingException, MissingKeyError
from tests.helpers.scenarios import logged

WORLD = 2


def rows(value: float) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((4, 3), value), mesh, [Shard(0)])


def saved() -> dict[str, Any]:
    return {
        "model": {"rows": rows(2), "old": rows(3), "bias": torch.full((2,), 4.0)},
        "step": 7,
        "schedule": {"last": [1, 2]},
    }


def wanted(rank: int) -> dict[str, Any]:
    """Without ``old`` and ``schedule``; rank 0 has no bias, and rank 1 has a value of its own."""
    state: dict[str, Any] = {
        "model": {"rows": rows(-1), "new": rows(-2)},
        "step": -1,
        "extra": {"seen": -3, "none": torch.full((2,), -4.0)},
    }
    if rank == 1:
        state["model"]["bias"] = torch.full((2,), -1.0)
        state["own"] = -5
    return state


def check_values(rank: int, state: dict[str, Any]) -> None:
    """What the checkpoint has is loaded; the rest is as it was."""
    model = state["model"]
    assert model["rows"].to_local().eq(2).all()
    assert model["new"].to_local().eq(-2).all()
    assert (state["step"], state["extra"]["seen"]) == (7, -3)
    assert state["extra"]["none"].eq(-4).all()
    if rank == 1:
        assert model["bias"].eq(4).all()
        assert state["own"] == -5


def unexpected(rank: int) -> set[str]:
    return {"model.new", "extra.seen", "extra.none", *(["own"] if rank else [])}


def a_reader_loads_what_is_there_and_tells_the_rest(rank: int, folder: Path) -> None:
    dcp.save(saved(), storage_writer=StorageWriter(folder / "by-dcp"))
    _loose_loads(rank, folder / "by-dcp")
    shardstore.save(saved(), folder / "ours")
    _loose_loads(rank, folder / "ours")


def _loose_loads(rank: int, place: Path) -> None:
    for mode in ("return_all", "log_all", "ignore_all", "return_unexpected", "log_unexpected"):
        reader = StorageReader(place, strict=mode)
        for _ in range(2):  # a reader serves several loads
            state = wanted(rank)
            with logged() as texts:
                dcp.load(state, storage_reader=reader)
            check_values(rank, state)
            assert reader.unexpected_keys == unexpected(rank)
            gone = {key for key in reader.missing_keys if not key.startswith("schedule")}
            assert gone == ({"model.old"} if mode.endswith("all") else set())
            assert (len(texts) == 1) == mode.startswith("log")
            assert all("'extra.none'" in text for text in texts)
    for mode in ("raise_all", "raise_unexpected"):
        state = wanted(rank)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(state, storage_reader=StorageReader(place, strict=mode))
        errors = [error for error, _ in caught.value.failures.values()]
        assert [type(error) for error in errors] == [MissingKeyError] * WORLD
        assert "'own'" in str(errors[1])
        assert ("model.old" in str(errors[0])) == (mode == "raise_all")
        assert state["model"]["rows"].to_local().eq(-1).all()  # raised before anything was read
    state = {"model": {"rows": rows(-1)}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=StorageReader(place, strict="raise_all"))
    assert all(type(e) is CheckpointingException for e, _ in caught.value.failures.values())
    with pytest.raises(CheckpointException, match="Missing key"):  # as before, without a mode
        dcp.load(wanted(rank), storage_reader=StorageReader(place))


def installed_programs_load_loosely(rank: int, folder: Path) -> None:
    place = str(folder / "c")
    with install(strict="log_all"):
        dcp.save(saved(), checkpoint_id=place)
        state = wanted(rank)
        with logged() as texts:
            dcp.load(state, checkpoint_id=place)
        check_values(rank, state)
        (text,) = texts
        assert "'model.old'" in text
        assert "'model.new'" in text


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
