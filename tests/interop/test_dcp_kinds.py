"""What ``shardstore.save`` saves and PyTorch DCP loads, and the other way round: each tensor, list
and object keeps its kind and value, or an error says why not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import DTypeMismatchError, KeyNameError, UnsafeObjectError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.nested import same
from tests.helpers.ranks_helper import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Any]


class Opaque:
    """A class that no checkpoint may load unasked."""


def common() -> State:
    return {
        "x": torch.arange(6).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "list": [torch.ones(2), 5, {"t": torch.zeros(1), "n": "x"}],
        "last": [1, 2, torch.ones(1)],
        "values": [1, [2, "x"], {"a": None}],
        "tuple": (1, torch.full((2,), 4.0), "x"),
        "size": torch.Size([2, 3]),
        "deep": {"a": {"b": 0.5}},
    }


def blank(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.full_like(state, -1) if isinstance(state, torch.Tensor) else None


def sharded() -> State:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


def load(wanted: State, place: Path, **options: Any) -> None:
    dcp.load(wanted, storage_reader=StorageReader(place, **options), no_dist=True)


def cause(call: Callable[[], object]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call()
    return next(iter(caught.value.failures.values()))[0]


def test_common_values_through_dcp(tmp_path: Path) -> None:
    shardstore.save({**sharded(), **common()}, tmp_path / "c")
    wanted = {"w": torch.zeros(4), **blank(common())}
    memory = wanted["x"].data_ptr()
    load(wanted, tmp_path / "c")
    assert torch.equal(wanted.pop("w"), torch.arange(4.0))
    assert wanted["x"].data_ptr() == memory
    assert same(wanted, common())


def test_states_of_torch_through_dcp(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard(common()), tmp_path / "c")
    wanted = blank(common())
    load(wanted, tmp_path / "c")
    assert same(wanted, common())


def test_what_dcp_saved_by_shardstore(tmp_path: Path) -> None:
    state = common()
    dcp.save(copy.deepcopy(state), storage_writer=StorageWriter(tmp_path / "c"), no_dist=True)
    loaded = shardstore.load(blank(state), tmp_path / "c")
    assert isinstance(loaded, dict)
    assert same(loaded, state)
    # Without its tensors, a list holds the other values.
    alone = shardstore.load_common_state_dict(tmp_path / "c")
    assert alone["list"] == [5, {"n": "x"}]
    assert alone["last"] == [1, 2]
    assert alone["values"] == state["values"]
    assert same(alone["tuple"], state["tuple"])


def test_sharded_objects_through_dcp(tmp_path: Path) -> None:
    state: State = {
        **sharded(),
        "one": ShardedObject("rng/one", {"a": [1, 2]}, (1,), (0,)),
        "two": [ShardedObject("rng/two", i, (2,), (i,)) for i in range(2)],
    }
    shardstore.save(state, tmp_path / "c")
    wanted: State = {"rng/one": None, "rng/two/shard_0_2": None, "rng/two/shard_1_2": None}
    load(wanted, tmp_path / "c")
    assert wanted == {"rng/one": {"a": [1, 2]}, "rng/two/shard_0_2": 0, "rng/two/shard_1_2": 1}


def test_common_tensors_are_not_cast_silently(tmp_path: Path) -> None:
    shardstore.save({**sharded(), "x": torch.arange(3)}, tmp_path / "c")
    wanted = {"x": torch.zeros(3)}
    error = cause(lambda: load(wanted, tmp_path / "c"))
    assert isinstance(error, DTypeMismatchError)
    assert "'x'" in str(error)
    load(wanted, tmp_path / "c", cast=True)
    assert wanted["x"].tolist() == [0, 1, 2]
    lossy = {"x": torch.zeros(3, dtype=torch.bool)}
    assert isinstance(cause(lambda: load(lossy, tmp_path / "c", cast=True)), DTypeMismatchError)


def test_a_value_of_another_kind_is_an_error(tmp_path: Path) -> None:
    shardstore.save({**sharded(), "x": torch.arange(3)}, tmp_path / "c")
    assert "x" in str(cause(lambda: load({"x": 5}, tmp_path / "c")))
    assert "Size mismatch" in str(cause(lambda: load({"x": torch.zeros(4).long()}, tmp_path / "c")))
    assert "Missing key" in str(cause(lambda: load({"y": None}, tmp_path / "c")))


def test_values_whose_keys_meet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shardstore.save({**sharded(), "a": {"b.c": 1}, "a.b": {"c": 2}}, tmp_path / "two")
    error = cause(lambda: load({"w": torch.zeros(4)}, tmp_path / "two"))
    # DCP raises one of its own with the text of ours.
    assert "two common values have the same flat key" in str(error)
    assert "a.b.c" in str(error)
    with pytest.raises(KeyNameError, match=r"a\.b\.c"):
        StorageReader(tmp_path / "two").read_metadata()
    shardstore.save({"m": sharded(), "w": 3}, tmp_path / "one")
    wanted = {"w": torch.zeros(4)}
    with caplog.at_level(logging.WARNING):
        load(wanted, tmp_path / "one")
    assert wanted["w"].tolist() == [0, 1, 2, 3]
    assert "same key" in caplog.text


def test_objects_of_unknown_classes(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "o": Opaque()}
    writer = StorageWriter(tmp_path / "c", allow_pickle=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    wanted = sharded()
    with pytest.raises(UnsafeObjectError, match="add_safe_globals"):
        shardstore.load(wanted, tmp_path / "c")
    with torch.serialization.safe_globals([Opaque]):
        loaded = shardstore.load(wanted, tmp_path / "c")
    assert isinstance(loaded, dict)
    assert isinstance(loaded["o"], Opaque)


# -- what each rank did ----------------------------------------------------------------------------


def save_by_ranks(rank: int, world_size: int, place: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    # One row: rank 1 holds none of it, and has no item at all.
    mesh = init_device_mesh("cpu", (world_size,))
    local = torch.ones(1 - rank, 2)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size([1, 2]), stride=(2, 1)
    )
    dcp.save({"w": tensor}, storage_writer=StorageWriter(place))


def test_the_commit_tells_what_each_rank_did(tmp_path: Path) -> None:
    run_ranks(save_by_ranks, 2, str(tmp_path / "c"))
    stored = StoredCheckpoint(Location.of(tmp_path / "c"))
    assert stored.root is not None
    commit = stored.root.attributes["shardstore"]["commit"]
    ranks = commit["ranks"]
    assert ranks["bytes"] == [commit["stored_bytes"], 0]
    assert ranks["chunks"] == [commit["chunks"], 0]
    assert len(ranks["write_s"]) == len(ranks["plan_s"]) == 2
    assert all(seconds > 0 for seconds in ranks["plan_s"])
