"""The golden checkpoints of shardstore 0.1.0: loaded bit for bit, and saved again as they are."""

from __future__ import annotations

import argparse
import io
import json
import types
import zlib
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import shardstore
from shardstore.cli.app import app
from shardstore.dcp import StorageReader
from tests.golden.make_shardstore import (
    CONTENT_METADATA,
    GOLDEN,
    TARGET,
    common,
    sharded,
    whole,
    write_all,
)
from tests.helpers.layouts import raw_bytes
from tests.helpers.ranks_helper import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = [name for name, golden in GOLDEN.items() if golden.how != "dcp"]
SAVED_AGAIN = [name for name in GOLDEN if name != "early"]

State = dict[str, Any]


def exact(value: Any) -> Any:
    """A form of a value that equals another only if types and bits are the same."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return name, value.dtype, tuple(value.shape), value.requires_grad, raw_bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        return name, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        made = value.default_factory if isinstance(value, defaultdict) else None
        return name, made, {repr(key): exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        most = value.maxlen if isinstance(value, deque) else None
        return name, most, [exact(item) for item in value]
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return name, exact(vars(value))
    if isinstance(value, io.BytesIO):
        return name, value.getvalue()
    return name, repr(value) if isinstance(value, float | complex) else value


def expected_state(name: str, rank: int, world_size: int, *, recut: bool) -> State:
    """What a load of :func:`sharded` gives."""
    state = sharded(name, rank, world_size, recut=recut)
    given = {key: value.data for key, value in state.items()}
    return {**given, **common(name), "content_metadata": content_metadata(name)}


def content_metadata(name: str) -> State:
    """What was given, and what a manager added; its time is taken from the checkpoint."""
    if GOLDEN[name].how != "manager":
        return CONTENT_METADATA
    root = json.loads((TARGET / name / "zarr.json").read_bytes())
    mark = dict(root["attributes"]["content_metadata"]["checkpoint_manager"])
    assert mark["step"] == 7
    assert mark["metrics"] == {"loss": 1.5, "accuracy": "nan"}
    return {**CONTENT_METADATA, "checkpoint_manager": mark}


def loaded_exactly(rank: int, world_size: int, name: str, *, recut: bool) -> bool:
    wanted = sharded(name, rank, world_size, recut=recut, empty=True)
    loaded = shardstore.load(wanted, TARGET / name)
    expected = expected_state(name, rank, world_size, recut=recut)
    assert loaded.keys() == expected.keys(), name
    for key, value in expected.items():
        assert exact(loaded[key]) == exact(value), (name, key)
    return True


@pytest.mark.parametrize("recut", [False, True], ids=["as saved", "recut"])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_loads_it(name: str, recut: bool) -> None:
    assert loaded_exactly(0, 1, name, recut=recut)


OF_RANKS = ["ranks", "zarr-v2-ranks"]


def load_each(rank: int, world_size: int) -> list[str]:
    """Names of the checkpoints that this rank loaded in another layout."""
    return [name for name in OF_RANKS if loaded_exactly(rank, world_size, name, recut=True)]


def test_two_ranks_load_what_two_ranks_saved_in_another_layout() -> None:
    assert run_ranks(load_each, 2) == [OF_RANKS] * 2


def dcp_tensors(name: str) -> State:
    tensors = {f"model.{key}": whole(name, key) for key in GOLDEN[name].tensors}
    return {**tensors, "same": tensors["model.rows"] + 1}


def tensors_of(name: str) -> State:
    """Key -> whole tensor."""
    if GOLDEN[name].how == "dcp":
        return dcp_tensors(name)
    return {key: whole(name, key) for key in GOLDEN[name].tensors}


@pytest.mark.parametrize("name", GOLDEN)
def test_its_tensors_are_listed_and_load_by_key(name: str) -> None:
    tensors = tensors_of(name)
    listed = shardstore.load_tensors_metadata(TARGET / name)
    assert {key: (found.dtype, found.global_shape) for key, found in listed.items()} == {
        key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()
    }
    loaded = shardstore.load_plain_tensors(TARGET / name)
    assert exact({key: loaded[key] for key in tensors}) == exact(tensors)
    assert exact({key: loaded[key] for key in common(name)}) == exact(common(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_region_loads(name: str) -> None:
    long = {key: tensor for key, tensor in tensors_of(name).items() if tensor.numel() >= 2000}
    region = [slice(1111, 1600)]
    loaded = shardstore.load_plain_tensors(TARGET / name, keys=list(long), region=region)
    assert exact(loaded) == exact({key: tensor[1111:1600] for key, tensor in long.items()})


@pytest.mark.parametrize("name", GOLDEN)
def test_its_common_state_and_metadata_load(name: str) -> None:
    loaded = shardstore.load_common_state_dict(TARGET / name)
    found = loaded.pop("content_metadata", None)
    assert exact(loaded) == exact(common(name))
    if GOLDEN[name].how != "dcp":
        assert exact(found) == exact(content_metadata(name))
        assert exact(shardstore.load_content_metadata(TARGET / name)) == exact(found)


def test_dcp_loads_the_golden_checkpoint() -> None:
    tensors = dcp_tensors("dcp")
    wanted: State = {
        "model": {key: torch.zeros_like(tensors[f"model.{key}"]) for key in GOLDEN["dcp"].tensors},
        "same": torch.zeros_like(tensors["same"]),
        **{key: _blank(value) for key, value in common("dcp").items()},
    }
    dcp.load(wanted, storage_reader=StorageReader(TARGET / "dcp"), no_dist=True)
    model = {key: tensors[f"model.{key}"] for key in GOLDEN["dcp"].tensors}
    assert exact(wanted) == exact({"model": model, "same": tensors["same"], **common("dcp")})


def _blank(value: Any) -> Any:
    """The dicts and lists of a value, with nothing in them: DCP fills what it finds."""
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    return [_blank(item) for item in value] if isinstance(value, list) else None


def test_a_manager_restores_the_golden_step() -> None:
    with shardstore.CheckpointManager(TARGET / "steps") as manager:
        assert manager.steps() == [7]
        restored = manager.restore(sharded("steps/step-7", empty=True))
    assert restored is not None
    want = expected_state("steps/step-7", 0, 1, recut=False)
    assert exact({key: restored.state[key] for key in want}) == exact(want)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "torch_dist"])
def test_it_verifies(name: str) -> None:
    result = CliRunner().invoke(app, ["verify", str(TARGET / name)])
    assert result.exit_code == 0, result.output


# -- saved again -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every checkpoint, saved by the package of today."""
    folder = tmp_path_factory.mktemp("again")
    write_all(SAVED_AGAIN, folder)
    return folder


@pytest.mark.parametrize("name", SAVED_AGAIN)
def test_a_save_writes_the_same_files(name: str, again: Path) -> None:
    saved, golden = contents(again / name, name), contents(TARGET / name, name)
    assert saved.keys() == golden.keys()
    for file, content in golden.items():
        assert saved[file] == content, file


def contents(place: Path, name: str) -> dict[str, Any]:
    """What a save of the same state always writes: relative name -> content of each file.

    Chunks, documents of arrays, ``metadata.json`` and objects as JSON are compared by their bytes.
    These are not:

    - the root's ``zarr.json``: as JSON, without the commit's id, times and version, the time of a
      manager's step, and checksums of files whose bytes torch decides;
    - ``manifest.npz``: by the arrays in it, as NumPy and zlib decide on its bytes;
    - ``.pt``: by the values in it, without the time of a manager's step; DCP's ``.metadata`` and
      ``.distcp``: by their names alone. Torch decides on their bytes;
    - chunks compressed by zstd: by what is in them, as the library decides on their bytes.
    """
    compressed = "compression" in GOLDEN[name].options
    files = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): _content(path, place, compressed) for path in files}


def _content(path: Path, place: Path, compressed: bool) -> Any:
    data = path.read_bytes()
    if path == place / "zarr.json":
        return _root(json.loads(data), compressed)
    if path.name == "manifest.npz":
        return _manifest(path, compressed)
    if path.suffix == ".pt":
        value = torch.load(path, weights_only=False)
        if path == place / "common.pt":
            value.get("content_metadata", {}).get("checkpoint_manager", {}).pop("saved_ns", None)
        return exact(value)
    if path.suffix == ".distcp" or path.name == ".metadata":
        return None
    if compressed and path.name.startswith("c"):
        return numcodecs.Zstd().decode(data[:-4])  # behind it, the crc32c of the compressed bytes
    return data


def _root(document: Any, compressed: bool) -> Any:
    attributes = document["attributes"]
    about = attributes["shardstore"]
    for member in ("root_crc32c", "file_bytes", "chunk_bytes"):  # version 0.1.0 wrote none
        about.pop(member, None)
    commit = about["commit"]
    for member in ("attempt", "created", "seconds", "shardstore"):
        assert commit.pop(member) is not None
    ranks = commit["ranks"]
    commit["ranks"] = {member: ranks[member] for member in ("bytes", "chunks")}
    if compressed:
        del commit["stored_bytes"], commit["ranks"]["bytes"], about["chunk_crc32c"]
    about["file_crc32c"] = {
        file: None if file.endswith(".pt") else crc
        for file, crc in about.get("file_crc32c", {}).items()
    }
    if "checkpoint_manager" in attributes.get("content_metadata", {}):
        del attributes["content_metadata"]["checkpoint_manager"]["saved_ns"]
    return document


def _manifest(path: Path, compressed: bool) -> Any:
    with np.load(path) as archive:
        members = dict(archive)
    if compressed:
        del members["stored_bytes"]
    rows = json.loads(zlib.decompress(members.pop("arrays").tobytes()))
    return rows, {name: exact(member) for name, member in members.items()}
