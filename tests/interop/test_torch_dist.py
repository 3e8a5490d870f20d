"""The ``torch_dist`` backend against Megatron-Core's files, and hostile or damaged metadata."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import ShardedTensor
from shardstore.dcp.files import DcpFiles
from shardstore.errors import (
    ChunkMissingError,
    DamagedCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardstore.serialization import load_sharded_metadata
from shardstore.storage.stores.location import Location
from tests.golden import states
from tests.helpers.golden_ranks import WHOLE, save, wrong

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "megatron-core-0.15.3-torch_dist"
pytestmark = pytest.mark.filterwarnings("ignore")
LAYOUTS = ("tp2dp1", "tp1dp2")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch-dist") / "ours"
    save(states.Layout(2, 2), "torch_dist", path)
    return path


def test_a_world_of_one_reads_what_megatron_wrote() -> None:
    assert wrong(WHOLE, *(GOLDEN / written for written in LAYOUTS)) == []


def test_other_layouts_read_what_megatron_and_we_wrote(ours: Path) -> None:
    places = [GOLDEN / written for written in LAYOUTS] + [ours]
    assert wrong(states.Layout(2, 2), *places) == []


def test_what_we_wrote_is_dcp_files_and_nothing_else(ours: Path) -> None:
    names = {path.name for path in ours.iterdir()}
    assert {".metadata", "common.pt", "metadata.json", "__0_0.distcp"} <= names
    assert all(n.endswith((".distcp", ".metadata", ".pt", ".json")) for n in names)
    assert wrong(WHOLE, ours) == []


def test_metadata_lists_tensors_in_their_own_shape_and_objects(ours: Path) -> None:
    for place in (ours, GOLDEN / "tp2dp1"):
        found = load_sharded_metadata(place)
        assert found["optimizer.exp_avg.embedding.weight"].global_shape == (12, 6)
        assert "objects.rng/shard_1_2" in found


# -- what must not happen --------------------------------------------------------------------------


def simple(path: Path) -> Path:
    state: dict[str, Any] = {"w": torch.arange(12.0).reshape(3, 4), "n": {"step": 3}}
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return path


class Attack:
    """Runs a command where it is unpickled by ordinary means."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_nothing_in_the_metadata_runs(tmp_path: Path) -> None:
    place, proof = simple(tmp_path / "c"), tmp_path / "proof"
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.planner_data["attack"] = Attack(proof)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    with contextlib.suppress(DamagedCheckpointError):
        DcpFiles.open(place)
    assert not proof.exists()
    pickle.loads((place / ".metadata").read_bytes())
    assert proof.exists()  # the attack would have worked


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_truncated_metadata_is_damage(tmp_path: Path, keep: int) -> None:
    place = simple(tmp_path / "c")
    (place / ".metadata").write_bytes((place / ".metadata").read_bytes()[:keep])
    with pytest.raises(DamagedCheckpointError, match="metadata"):
        DcpFiles.open(place)


def test_other_pickles_and_no_metadata(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(NotACheckpointError):
        DcpFiles.open(tmp_path)
    with pytest.raises(NotACheckpointError):
        DcpFiles.open(tmp_path / "nothing")


def golden_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tp2dp1", tmp_path / "c"))


def test_missing_and_truncated_files(tmp_path: Path) -> None:
    place = golden_copy(tmp_path)
    data = (place / "__1_0.distcp").read_bytes()
    (place / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedCheckpointError, match="__1_0"):
        shardstore.load_plain_tensors(place)
    (place / "__1_0.distcp").unlink()
    with pytest.raises(ChunkMissingError, match="__1_0"):
        shardstore.load_plain_tensors(place)


def test_an_object_store_is_read_but_not_written(tmp_path: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0)), "n": 3}
    with pytest.raises(StorageError, match="torch_dist"):
        shardstore.save(state, "memory://written", ("torch_dist", 1))
    assert not Path("memory:").exists()
    shardstore.save(state, tmp_path / "c", ("torch_dist", 1))
    for path in (tmp_path / "c").iterdir():
        Location.of("memory://read").write(path.name, path.read_bytes())
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    loaded = shardstore.load(wanted, "memory://read")
    assert isinstance(loaded, dict)
    assert loaded["n"] == 3
    assert loaded["w"].tolist() == [0, 1, 2, 3]
