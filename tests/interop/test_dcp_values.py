"""What this package and PyTorch DCP save and load for each other: each tensor, list and object has
its kind and value again, or an error says why not. No value is pickled on disk, unless asked for.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import pickletools
import random
import zipfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from typer.testing import CliRunner

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.cli.app import app
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    DTypeMismatchError,
    KeyNameError,
    UnsafeObjectError,
)
from shardstore.storage import checkpoint
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location
from tests.helpers.nested import same
from tests.helpers.ranks_helper import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

State = dict[str, Any]


class Opaque:
    """A class of somebody's own."""

    def __init__(self) -> None:
        self.held = 5


def stream(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


def values() -> State:
    """What trainers keep beside tensors; two of them are long."""
    return {
        "w": torch.arange(4.0),
        "losses": stream(b"\x80\x02raw bytes of a trainer"),
        "loader": {"dp_rank_0": b"\x80\x04" * 10, "long": bytes(range(256)) * 400},
        "random": {
            "python": random.Random(1).getstate(),
            "numpy": np.random.RandomState(1).get_state(),
            "torch": (torch.arange(5, dtype=torch.uint8), "in a tuple"),
        },
        "seen": np.arange(20_000).reshape(2, -1),
        "arguments": argparse.Namespace(lr=1e-3, layers=[1, 2]),
        "last": deque([1.5, 2.5], maxlen=2),
    }


def common() -> State:
    """Tensors among other values, in every kind of structure."""
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


def sharded() -> State:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}


def blank(state: Any) -> Any:
    """The same structure with other values."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.full_like(state, -1) if isinstance(state, torch.Tensor) else None


def save(state: State, place: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=StorageWriter(place, **options), no_dist=True)


def load(wanted: State, place: Path, **options: Any) -> State:
    dcp.load(wanted, storage_reader=StorageReader(place, **options), no_dist=True)
    return wanted


def cause(call: Callable[[], object]) -> BaseException:
    """The error of the rank in the error of DCP that a call raises."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return next(iter(caught.value.failures.values()))[0]


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, or an archive that has one in it."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    try:
        list(pickletools.genops(path.read_bytes()))
    except Exception:
        return False
    return True


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    save(values(), tmp_path / "c")
    return tmp_path / "c"


def test_no_file_is_a_pickle(place: Path, tmp_path: Path) -> None:
    found = files(place)
    assert not [path for path in found if is_pickle(path) or path.suffix == ".pt"]
    # The long ones are JSON beside the root document, which stays small.
    beside = [path for path in found if path.name == "shard_0_1.json"]
    assert len(beside) == 2
    assert all(json.loads(path.read_text())["$type"] for path in beside)
    assert (place / "zarr.json").stat().st_size < 32 * 1024
    # What this test takes for a pickle is one.
    (tmp_path / "p").write_bytes(b"\x80\x04K\x05.")
    torch.save(5, tmp_path / "t")
    assert is_pickle(tmp_path / "p")
    assert is_pickle(tmp_path / "t")


def test_each_value_comes_back(place: Path) -> None:
    assert same(load(blank(values()), place), values())
    wanted: State = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    loaded = shardstore.load(wanted, place)
    assert isinstance(loaded, dict)
    assert same(loaded, values())


def test_values_stay_when_tensors_are_removed(place: Path) -> None:
    shardstore.remove_sharded_tensors(place, "w")
    expected = values()
    del expected["w"]
    assert same(shardstore.load_common_state_dict(place), expected)


def test_values_are_verified_and_compared(place: Path, tmp_path: Path) -> None:
    run = CliRunner()
    assert run.invoke(app, ["verify", str(place)]).exit_code == 0
    other = {**values(), "seen": np.zeros(20_000)}
    save(other, tmp_path / "other")
    found = json.loads(
        run.invoke(app, ["diff", "--json", str(place), str(tmp_path / "other")]).stdout
    )
    assert found["files"] == {"seen/shard_0_1.json": "differs"}
    document = place / "seen" / "shard_0_1.json"
    text = document.read_text()
    document.write_text(text.replace("AAAA", "AAAB", 1))
    damaged = run.invoke(app, ["verify", str(place)])
    assert damaged.exit_code == 1
    assert "seen/shard_0_1.json" in damaged.output.replace("\n", "")
    with pytest.raises(DamagedCheckpointError, match=r"shard_0_1\.json"):
        shardstore.load_common_state_dict(place)
    document.write_text("{")
    assert run.invoke(app, ["verify", str(place)]).exit_code == 1
    document.unlink()
    assert run.invoke(app, ["verify", str(place)]).exit_code == 1


def test_long_values_are_deleted_and_replaced(place: Path) -> None:
    save({"w": torch.ones(2)}, place, overwrite=True)
    assert not (place / "seen").exists()
    save(values(), place, overwrite=True)
    shardstore.delete_checkpoint(place)
    assert not place.exists()


def test_long_values_are_converted(place: Path, tmp_path: Path) -> None:
    convert(place, tmp_path / "again", target_format="shardstore")
    assert same(shardstore.load_common_state_dict(tmp_path / "again")["seen"], values()["seen"])
    assert not [path for path in files(tmp_path / "again") if is_pickle(path)]
    convert(place, tmp_path / "dcp", target_format="dcp")
    wanted = blank(values())
    dcp.load(wanted, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert same(wanted, values())
    convert(tmp_path / "dcp", tmp_path / "back", target_format="shardstore")
    assert not [path for path in files(tmp_path / "back") if is_pickle(path)]
    assert (tmp_path / "back" / "zarr.json").stat().st_size < 32 * 1024
    assert same(load(blank(values()), tmp_path / "back"), values())


# -- what has no JSON form -------------------------------------------------------------------------


def test_a_class_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "mine": {"deep": [1, Opaque()]}}
    error = cause(lambda: save(state, tmp_path / "c"))
    assert isinstance(error, CheckpointingException)
    assert error.key == "mine.deep"
    for part in ("'mine.deep'", "test_dcp_values.Opaque", "state_dict()", "allow_pickle=True"):
        assert part in str(error)
    assert not is_checkpoint(Location.of(tmp_path / "c"))
    with install(), pytest.raises(CheckpointException, match="allow_pickle"):
        dcp.save(state, checkpoint_id=str(tmp_path / "c"), no_dist=True)


UNUSUAL = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "meta": lambda: torch.ones(2, device="meta"),
    "conjugate": lambda: torch.view_as_complex(torch.ones(3, 2)).conj(),
    "uint4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
}


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_tensor_in_a_value_is_refused_or_comes_back(
    tmp_path: Path, kind: str, allow_pickle: bool
) -> None:
    """A checkpoint that is committed can be loaded."""
    tensor = UNUSUAL[kind]()
    state = {"w": torch.ones(2), "pair": (1, tensor)}
    try:
        save(state, tmp_path / "c", allow_pickle=allow_pickle)
    except CheckpointException:
        assert not is_checkpoint(Location.of(tmp_path / "c"))
        assert kind != "conjugate"
        return
    nested = [torch._utils._rebuild_nested_tensor]
    with torch.serialization.safe_globals(nested if kind == "nested" else []):
        found = load({"w": torch.zeros(2), "pair": None}, tmp_path / "c")["pair"][1]
    assert (found.dtype, found.layout) == (tensor.dtype, tensor.layout)
    if tensor.is_meta:
        assert found.is_meta
        assert found.shape == tensor.shape
        return
    parts = (one.unbind() if one.is_nested else [one.to_dense()] for one in (found, tensor))
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one, other)


def test_a_class_is_saved_and_loaded_where_pickle_is_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(2), "mine": Opaque()}
    with caplog.at_level(logging.WARNING):
        save(state, tmp_path / "c", allow_pickle=True)
    assert "1 value(s) have no JSON form and are pickled: 'mine'" in caplog.text
    assert [path.name for path in files(tmp_path / "c") if is_pickle(path)] == ["shard_0_1.pt"]
    wanted = {"w": torch.zeros(2), "mine": None}
    error = cause(lambda: load(wanted, tmp_path / "c"))
    assert isinstance(error, UnsafeObjectError)
    assert "add_safe_globals" in str(error)
    with pytest.raises(UnsafeObjectError, match="add_safe_globals"):
        shardstore.load({"w": torch.zeros(2)}, tmp_path / "c")
    with torch.serialization.safe_globals([Opaque]):
        assert load(wanted, tmp_path / "c")["mine"].held == 5
        assert shardstore.load({"w": torch.zeros(2)}, tmp_path / "c")["mine"].held == 5
    with install(allow_pickle=True):
        dcp.save(state, checkpoint_id=str(tmp_path / "i"), no_dist=True)
    assert [path.name for path in files(tmp_path / "i") if is_pickle(path)] == ["shard_0_1.pt"]


def save_by_ranks(rank: int, world_size: int, place: str) -> str:
    try:
        dcp.save({"w": torch.ones(2), "mine": Opaque()}, storage_writer=StorageWriter(place))
    except CheckpointException as error:
        told = str(error)
    else:
        told = ""
    # All have left the save, and the next one is not held up by it.
    dist.barrier()
    # One row: rank 1 holds none of it, and has no item at all.
    mesh, shape = init_device_mesh("cpu", (world_size,)), torch.Size([1, 2])
    local = torch.ones(1 - rank, 2)
    row = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1))
    dcp.save({"w": row}, storage_writer=StorageWriter(place))
    return told


def test_every_rank_is_told_and_the_next_commit_says_what_each_did(tmp_path: Path) -> None:
    for told in run_ranks(save_by_ranks, 2, str(tmp_path / "c")):
        assert "'mine'" in told
        assert "allow_pickle=True" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    root = StoredCheckpoint(Location.of(tmp_path / "c")).root
    assert root is not None
    commit = root.attributes["shardstore"]["commit"]
    ranks = commit["ranks"]
    assert ranks["bytes"] == [commit["stored_bytes"], 0]
    assert ranks["chunks"] == [commit["chunks"], 0]
    assert len(ranks["write_s"]) == len(ranks["plan_s"]) == 2
    assert all(seconds > 0 for seconds in ranks["plan_s"])


def test_the_root_is_not_parsed_for_each_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {str(i): ShardedObject(f"o{i}", i, (1,), (0,)) for i in range(9)}
    shardstore.save(saved, tmp_path / "a")
    reader = StorageReader(tmp_path / "a")
    reader.read_metadata()
    calls: list[str] = []
    parse = checkpoint.parse_root

    def counted(text: bytes, url: str) -> Any:
        calls.append(url)
        return parse(text, url)

    monkeypatch.setattr(checkpoint, "parse_root", counted)
    state: State = {f"o{i}": None for i in range(9)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state == {f"o{i}": i for i in range(9)}
    assert len(calls) < len(state)


# -- what this package saved -----------------------------------------------------------------------


@pytest.mark.parametrize("shard", [False, True])
def test_common_values_through_dcp(tmp_path: Path, shard: bool) -> None:
    expected = {"w": torch.arange(4.0), **common()}
    state = shardstore.shard(common()) if shard else common()
    shardstore.save({**sharded(), **state}, tmp_path / "c")
    wanted = blank(expected)
    memory = wanted["x"].data_ptr()
    load(wanted, tmp_path / "c")
    assert wanted["x"].data_ptr() == memory
    assert same(wanted, expected)


def test_what_dcp_saved_by_shardstore(tmp_path: Path) -> None:
    state = common()
    save(copy.deepcopy(state), tmp_path / "c")
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


def test_neither_arrays_nor_common_tensors_are_cast_silently(tmp_path: Path) -> None:
    shardstore.save({**sharded(), "x": torch.arange(4)}, tmp_path / "c")
    for key in ("w", "x"):
        wanted = {key: torch.zeros(4, dtype=torch.float64)}
        error = cause(partial(load, wanted, tmp_path / "c"))
        assert isinstance(error, DTypeMismatchError)
        assert f"'{key}'" in str(error)
        assert "cast=True" in str(error)
        load(wanted, tmp_path / "c", cast=True)
        assert wanted[key].tolist() == [0, 1, 2, 3]
    lossy = {"x": torch.zeros(4, dtype=torch.bool)}
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
