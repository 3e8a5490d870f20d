"""Nothing but the objects of a checkpoint is written or deleted, whatever keys others have."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore.errors import ArgumentError, CheckpointExistsError
from shardstore.mapping import ShardedTensor
from shardstore.storage.commit.checkpoints import sweep
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.store_suite import Target

MINE = b"of somebody else"


def everything(server: S3Server, bucket: str) -> dict[str, bytes]:
    client = server.client()
    return {
        key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in server.keys(bucket)
    }


PARTS = [
    *("a", "b", "?", "?versionId=", "versionId=3", "#", "%2F", "%"),
    *(" ", "+", "&x=1", ":", "é", "."),
]


def small_state(value: float) -> dict[str, ShardedTensor]:
    return {"b": ShardedTensor.from_rank_offsets("b", torch.full((7,), value))}


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join))
def test_a_place_of_any_name_is_that_place(s3_server: S3Server, name: str) -> None:
    """Objects whose keys a client could take for the same stay as they are."""
    bucket, options = s3_server.new_bucket(), s3_server.storage_options
    key, others = f"run/{name}", {f"run/{name[:n]}".rstrip("/") for n in range(len(name) + 1)}
    others |= {f"{other}/zarr.json" for other in others - {key}}
    for other in others:
        s3_server.client().put_object(Bucket=bucket, Key=other, Body=MINE)
    url = f"s3://{bucket}/{key}"
    try:
        shardstore.save(small_state(1), url, storage_options=options)
        shardstore.save(small_state(2), url, storage_options=options, overwrite=True)
        loaded = shardstore.load(small_state(0), url, storage_options=options)
    except ArgumentError:
        refused = ("?versionId=", "&versionId=", "::")  # a version, a chain of URLs
        assert any(part in name for part in refused) or set(name) == {"."}
    else:
        assert loaded["b"].tolist() == [2.0] * 7
        shardstore.delete_checkpoint(url, storage_options=options)
    assert everything(s3_server, bucket) == dict.fromkeys(others, MINE)


FOREIGN = [
    *("__0_0.distcp", "common.pt", "integrity.json", "manifest.npz", "zarr.json.new-1"),
    *("y/zarr.json", "y/c/0", "group/.zgroup", "group/.zattrs", "x", "x?versionId=1.distcp"),
]
"""Objects that another program keeps at a place, which no save there accounts for."""
MARKS = ["x", ".attempts", "x?versionId=1/.attempts/000001.json"]


@pytest.mark.parametrize(
    ("target", "names"),
    [*((kind, FOREIGN) for kind in ("s3", "gs", "memory", "local")), ("s3", MARKS)],
    indirect=["target"],
)
def test_what_no_save_accounts_for_stays(target: Target, names: list[str]) -> None:
    place = target("run")
    for name in names:
        place.write(name, MINE)
    shardstore.save(small_state(1), place.place)
    written = {"common.pt", "manifest.npz"}
    assert {name for name in names if place.read(name) != MINE} <= written
    shardstore.delete_checkpoint(place.place)
    sweep(place, older_than=timedelta(), dry_run=False)
    # Beside a commit, these names count as its own.
    own = {*written, "integrity.json", "zarr.json.new-1", "y/zarr.json", "y/c/0"}
    own |= {name for name in names if name.endswith("/000001.json")}  # the claim of a dead save
    assert {name for name in names if not place.exists(name)} <= own


@pytest.mark.parametrize("kind", ["folder", "s3", "memory"])
def test_a_checkpoint_of_dcp_is_replaced_only_if_asked(
    tmp_path: Path, s3_server: S3Server, kind: str
) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    place = {
        "folder": Location.of(tmp_path / "step"),
        "s3": Location.of(f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options),
        "memory": Location.of(f"memory://{tmp_path}/run"),
    }[kind]
    names = {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()}
    for name, data in names.items():
        place.write(name, data)
    for _ in range(2):
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            shardstore.save(small_state(1), place.place)
        assert sorted(place.walk()) == sorted(names) == [".metadata", "__0_0.distcp"]
    shardstore.save(small_state(1), place.place, overwrite=True)
    assert not set(names) & set(place.walk())
    assert shardstore.load(small_state(0), place.place)["b"][0] == 1
