"""PyTorch DCP over shardstore in an object store: saves by two ranks, loads by other numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardstore
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.errors import CheckpointExistsError, NotACheckpointError
from shardstore.storage.stores.location import Location
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers import dtensor_states
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.s3_checkpoints import Run
from tests.helpers.verification import findings

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = 13  # 7 and 6 on two ranks; 5, 5 and 3 on three
VALUES: dict[str, Any] = {"step": 7, "lr": float("nan"), "betas": (0.9, 0.95), "names": ["a", 1]}


def whole(shift: int = 0) -> torch.Tensor:
    return torch.arange(ROWS * 4.0).reshape(ROWS, 4) + shift


def state(world_size: int, full: torch.Tensor) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    local = dtensor_states.part_of(full, mesh, [Shard(0)])
    rows = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return {"m": {"rows": rows, "half": full[:3].bfloat16()}, "v": dict(VALUES)}


def empty(world_size: int) -> dict[str, Any]:
    """To be filled by a load."""
    values = {**dict.fromkeys(VALUES), "betas": (), "names": []}
    return {**state(world_size, whole() * 0 - 1), "v": values}


def differences(found: dict[str, Any], shift: int = 0) -> list[str]:
    full, rows = whole(shift), found["m"]["rows"]
    expected = dtensor_states.part_of(full, rows.device_mesh, rows.placements)
    wrong = [] if torch.equal(rows.to_local(), expected) else ["rows"]
    wrong += [] if torch.equal(found["m"]["half"], full[:3].bfloat16()) else ["half"]
    values = {**found["v"], "lr": str(found["v"]["lr"])}
    return wrong + ([] if values == {**VALUES, "lr": "nan"} else ["values"])


def save(rank: int, world_size: int, server: S3Server, root: str) -> list[list[str]]:
    os.environ.update(server.environment)
    made = state(world_size, whole())
    dcp.save(made, storage_writer=StorageWriter(f"{root}/plain"))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(made, storage_writer=StorageWriter(f"{root}/plain"))
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    dcp.save(state(world_size, whole(5)), storage_writer=StorageWriter(f"{root}/over"))
    dcp.save(made, storage_writer=StorageWriter(f"{root}/over", overwrite=True))
    dcp.save(made, storage_writer=StorageWriter(f"{root}/bare"))
    bare = StorageWriter(f"{root}/bare", overwrite=True, array_documents=False)
    dcp.save(made, storage_writer=bare)
    writer = StorageWriter(storage_options=server.storage_options)
    future = dcp.async_save(made, checkpoint_id=f"{root}/async", storage_writer=writer)
    made["m"]["rows"].to_local().zero_()
    future.result()
    for name in ("plain", "over", "bare", "async"):
        assert load(rank, world_size, server, f"{root}/{name}") == []
    return installed(rank, world_size, server, f"{root}/installed")


def load(rank: int, world_size: int, server: S3Server, place: str) -> list[str]:
    for name in server.environment:
        os.environ.pop(name, None)
    wanted = empty(world_size)
    reader = StorageReader(place, storage_options=server.storage_options)
    dcp.load(wanted, storage_reader=reader)
    os.environ.update(server.environment)
    return differences(wanted)


def installed(rank: int, world_size: int, server: S3Server, place: str) -> list[list[str]]:
    """Save and load by the place alone; what differed."""
    for name in server.environment:
        os.environ.pop(name, None)
    found = []
    with install(storage_options=server.storage_options):
        for shift in (0, 5):
            dcp.save(state(world_size, whole(shift)), checkpoint_id=place)
            wanted = empty(world_size)
            dcp.load(wanted, checkpoint_id=place)
            found.append(differences(wanted, shift))
    return found


@pytest.fixture(scope="module")
def saved(s3_server: S3Server) -> str:
    """What two ranks saved; all that they checked on the way held."""
    root = f"s3://{s3_server.new_bucket()}/run"
    assert run_ranks(save, 2, s3_server, root) == [[[], []]] * 2
    return root


def test_loads_by_more_and_by_fewer_ranks(saved: str, s3_server: S3Server) -> None:
    assert run_ranks(load, 3, s3_server, f"{saved}/async") == [[]] * 3
    wanted = {"m": {"rows": torch.zeros(ROWS, 4)}}
    reader = StorageReader(f"{saved}/plain", storage_options=s3_server.storage_options)
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert torch.equal(wanted["m"]["rows"], whole())
    assert not dist.is_initialized()


def test_without_documents_of_the_arrays(saved: str, s3_server: S3Server) -> None:
    plain, bare = (
        Location.of(f"{saved}/{n}", s3_server.storage_options) for n in ("plain", "bare")
    )
    names = plain.remote.walk()
    assert bare.remote.walk() == [name for name in names if not name.endswith("/zarr.json")]
    assert len(names) == len(bare.remote.walk()) + 2
    assert findings(bare) == []
    group = zarr.open_group(bare.url, mode="r", storage_options=s3_server.storage_options)
    assert (group["m.rows"][...] == whole().numpy()).all()


def test_an_absent_place_is_an_error_of_dcp(s3_server: S3Server) -> None:
    place = f"s3://{s3_server.new_bucket()}/none"
    reader = StorageReader(place, storage_options=s3_server.storage_options)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(1)}, storage_reader=reader, no_dist=True)
    assert f"{place} is not a distributed checkpoint" in str(caught.value.failures[0][0])
    with pytest.raises(NotACheckpointError):
        reader.read_metadata()


@pytest.mark.parametrize("document", ["manifest.npz", "zarr.json"])
def test_a_save_that_failed_does_not_hold_up_the_next(
    own_run: Run, proxy: FaultProxy, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the writer that failed lives on, as a trainer's does."""
    wanted, found = {"w": torch.arange(100.0)}, {"w": torch.zeros(100)}
    given: dict[str, Any] = {"storage_options": own_run.options}
    failed, writer = (StorageWriter(own_run.url(1), **given) for _ in range(2))
    proxy.add(Fault.SLOW_DOWN, methods=("PUT",), path=rf"/step-1/{document}$", count=None)
    with pytest.raises(CheckpointException, match=r"SlowDown|503"):
        dcp.save(wanted, storage_writer=failed, no_dist=True)
    assert own_run.direct.keys(own_run.bucket) == []
    proxy.clear()
    dcp.save(wanted, storage_writer=writer, no_dist=True)
    assert "taken for dead" not in caplog.text
    # What was given up long ago is not given up again, on what is there now.
    failed.reset()
    dcp.load(found, storage_reader=StorageReader(own_run.url(1), **given), no_dist=True)
    assert torch.equal(found["w"], wanted["w"])


def test_places_alone_are_ours_once_installed(saved: str, s3_server: S3Server) -> None:
    location = Location.of(f"{saved}/installed", s3_server.storage_options)
    assert location.read(".metadata").startswith(b"not a file of PyTorch DCP")
    shardstore.delete_checkpoint(location.place)
    assert location.remote.walk() == []
