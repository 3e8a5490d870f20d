"""Nothing but the objects of a checkpoint is written or deleted, whatever keys others have."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore.errors import ArgumentError, CheckpointExistsError
from shardstore.storage.commit.checkpoints import sweep
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import state
from tests.helpers.store_suite import Target

MINE = b"of somebody else"


def everything(server: S3Server, bucket: str) -> dict[str, bytes]:
    client = server.client()
    return {
        key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in server.keys(bucket)
    }


PARTS = (
    "a",
    "b",
    "?",
    "?versionId=",
    "versionId=3",
    "#",
    "%2F",
    "%",
    " ",
    "+",
    "&x=1",
    ":",
    "é",
    ".",
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        shardstore.save(state(1), url, storage_options=options)
        shardstore.save(state(2), url, storage_options=options, overwrite=True)
        loaded = shardstore.load(state(0), url, storage_options=options)
    except ArgumentError:
        refused = ("?versionId=", "&versionId=", "::")  # a version, a chain of URLs
        assert any(part in name for part in refused) or set(name) == {"."}
    else:
        assert loaded["b"].tolist() == [2.0] * 7
        shardstore.delete_checkpoint(url, storage_options=options)
    assert everything(s3_server, bucket) == dict.fromkeys(others, MINE)


def foreign_keys() -> Iterator[tuple[str, ...]]:
    """Objects that another program keeps at a place, which no save there accounts for."""
    for name in ("__0_0.distcp", "common.pt", "integrity.json", "manifest.npz", "zarr.json.new-1"):
        yield (name,)
    yield "y/zarr.json", "y/c/0"
    yield "group/.zgroup", "group/.zattrs"
    yield "x", "x?versionId=1.distcp"
    yield "x", ".attempts", "x?versionId=1/.attempts/000001.json"


@pytest.mark.parametrize("names", list(foreign_keys()), ids=" ".join)
def test_what_no_save_accounts_for_stays(target: Target, names: tuple[str, ...]) -> None:
    place = target("run")
    if not place.is_s3 and ".attempts" in names:
        pytest.skip("a folder has that name there")
    for name in names:
        place.write(name, MINE)
    arguments = {"storage_options": place.options}
    shardstore.save(state(1), place.url, **arguments)  # type: ignore[arg-type]
    written = {"common.pt", "manifest.npz"}
    assert {name for name in names if place.read(name) != MINE} <= written
    shardstore.delete_checkpoint(place.url, **arguments)  # type: ignore[arg-type]
    sweep(place.url, older_than=timedelta(), dry_run=False, **arguments)  # type: ignore[arg-type]
    # Beside a commit, these names count as its own.
    own = {*written, "integrity.json", "zarr.json.new-1", "y/zarr.json", "y/c/0"}
    own |= {name for name in names if name.endswith("/000001.json")}  # the claim of a dead save
    assert {name for name in names if not place.exists(name)} <= own


def test_a_checkpoint_of_dcp_is_replaced_only_if_asked(target: Target) -> None:
    place = target("run")
    place.write("__0_0.distcp", MINE)
    place.write(".metadata", b"\x80\x04N.")
    for _ in range(2):
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            shardstore.save(state(1), place.url, storage_options=place.options)
        assert sorted(place.walk()) == [".metadata", "__0_0.distcp"]
    shardstore.save(state(1), place.url, storage_options=place.options, overwrite=True)
    assert not {".metadata", "__0_0.distcp"} & set(place.walk())
    assert shardstore.load(state(0), place.url, storage_options=place.options)["step"] == 1


def test_a_checkpoint_of_dcp_in_a_folder_is_replaced_only_if_asked(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step", no_dist=True)
    names = sorted(Location.of(tmp_path / "step").walk())
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        shardstore.save(state(1), tmp_path / "step")
    assert sorted(Location.of(tmp_path / "step").walk()) == names
    shardstore.save(state(1), tmp_path / "step", overwrite=True)
    assert not set(names) & set(Location.of(tmp_path / "step").walk())
