"""Zarr arrays and groups of other programs in a checkpoint's folder stay, come what may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import AccessPatternError, CheckpointExistsError, StorageError
from shardstore.storage.checkpoint import StoredCheckpoint, create_array, read_array_meta
from shardstore.storage.commit import folder as commit
from shardstore.storage.commit.checkpoints import CheckpointStorage, delete_checkpoint
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore
from shardstore.strategies.zarr import ZarrSaveShardedStrategy, load_zarr_based_sharded_metadata
from testing.s3_servers import S3Server
from tests.helpers.verification import findings

Place = tuple[str, dict[str, Any]]


def state_of(value: float) -> dict[str, Any]:
    data = {key: torch.full((4, 3), value) for key in ("w", "layers/0.b")}
    return {key: ShardedTensor.from_rank_offsets(key, data[key]) for key in data}


def put_others(place: Place) -> None:
    """Arrays of both formats, a group, and files that look like chunks."""
    options = place[1] or None
    for name, zarr_format in (("train.zarr", 3), ("old.zarr", 2), ("val/x", 3)):
        array = zarr.create_array(
            f"{place[0]}/{name}",
            shape=(8,),
            chunks=(4,),
            dtype="i4",
            zarr_format=zarr_format,  # type: ignore[arg-type]
            storage_options=options,
        )
        array[:] = np.arange(8)
    zarr.open_group(f"{place[0]}/val", mode="a", storage_options=options)
    Location.of(place[0], place[1] or None).write("logs/1", b"log")


def assert_others(place: Place) -> None:
    options = place[1] or None
    for name in ("train.zarr", "old.zarr", "val/x"):
        found = zarr.open_array(f"{place[0]}/{name}", mode="r", storage_options=options)
        assert np.array_equal(found[:], np.arange(8)), name
    assert Location.of(place[0], place[1] or None).read("logs/1") == b"log"


def damage_of(place: Location) -> list[str]:
    """Kinds of the damage that a verification finds."""
    return [finding.kind for finding in findings(place) if finding.severity == "damage"]


@pytest.mark.parametrize("array_documents", [True, False])
def test_foreign_arrays_stay(place: Place, array_documents: bool) -> None:
    url, options = place[0], place[1] or None
    more: dict[str, Any] = {"storage_options": options, "array_documents": array_documents}
    put_others(place)
    shardstore.save(state_of(1), url, **more)
    assert_others(place)
    with pytest.raises(CheckpointExistsError):
        shardstore.save(state_of(2), url, **more)
    assert_others(place)
    shardstore.save(state_of(2), url, overwrite=True, **more)
    assert_others(place)
    assert shardstore.load_plain_tensors(url, storage_options=options)["w"].eq(2).all()
    delete_checkpoint(url, storage_options=options)
    assert_others(place)
    left = Location.of(url, options)
    assert sorted(left.listing()) == ["logs", "old.zarr", "train.zarr", "val"]


def test_foreign_arrays_stay_where_a_save_fails(place: Place) -> None:
    url, options = place[0], place[1] or None
    put_others(place)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))}
    with pytest.raises(AccessPatternError):
        shardstore.save(state, url, storage_options=options)
    assert_others(place)
    assert "w" not in Location.of(url, options).listing()


def test_a_checkpoint_of_arrays_alone_below_stays(place: Place) -> None:
    """What a strategy called by itself commits has no metadata.json to be known by."""
    url, options = place[0], place[1] or None
    shardstore.save(state_of(1), url, storage_options=options)
    inner = Location.of(url, options).child("inner")
    alone = ZarrSaveShardedStrategy("zarr", 2, array_documents=False)
    alone.save(state_of(5), inner.place)
    before = damage_of(inner)
    shardstore.save(state_of(2), url, overwrite=True, storage_options=options)
    assert damage_of(inner) == before
    delete_checkpoint(url, storage_options=options)
    assert damage_of(inner) == before
    assert set(StoredCheckpoint(inner).arrays) == {"w", "layers/0.b"}


def test_a_deletion_without_a_rename_leaves_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    shardstore.save(state_of(1), tmp_path / "step-1")
    monkeypatch.setattr(commit.os, "rename", refused)
    delete_checkpoint(tmp_path / "step-1")
    assert list(tmp_path.iterdir()) == []


def test_a_deletion_that_the_store_refuses_for_one_key_is_an_error(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    shardstore.save(state_of(1), url, storage_options=options)
    call = RemoteStore.call

    def locked(self: RemoteStore, method: str, *args: Any, **kwargs: Any) -> Any:
        """As S3 answers for a key that the role may not delete: the request succeeds."""
        if args[:1] != ("delete_objects",):
            return call(self, method, *args, **kwargs)
        keys = [entry["Key"] for entry in kwargs["Delete"]["Objects"]]
        kept = [key for key in keys if key.endswith("run/zarr.json")]
        wanted = {"Objects": [{"Key": key} for key in keys if key not in kept], "Quiet": True}
        if wanted["Objects"]:
            call(self, method, *args, **{**kwargs, "Delete": wanted})
        denied = {"Code": "AccessDenied", "Message": "Access Denied"}
        return {"Errors": [{"Key": key, **denied} for key in kept]}

    monkeypatch.setattr(RemoteStore, "call", locked)
    for attempt in (
        lambda: delete_checkpoint(url, storage_options=options),
        lambda: shardstore.save(state_of(2), url, overwrite=True, storage_options=options),
    ):
        with pytest.raises(StorageError, match=r"run/zarr\.json was refused: AccessDenied.*allow"):
            attempt()
    monkeypatch.undo()
    found = shardstore.load_plain_tensors(url, storage_options=options)
    assert all(tensor.eq(1).all() for tensor in found.values())
    assert damage_of(Location.of(url, options)) == []


def test_verify_finds_arrays_that_another_program_took_out_of_the_root(tmp_path: Path) -> None:
    for name, array_documents in (("all", True), ("root", False)):
        place = tmp_path / name
        shardstore.save(state_of(1), place, array_documents=array_documents)
        zarr.consolidate_metadata(str(place))
        found = damage_of(Location.of(place))
        assert ("arrays-undescribed" in found) is (not array_documents)


def test_an_array_that_the_root_alone_describes_is_not_created_again(tmp_path: Path) -> None:
    shardstore.save(state_of(1), tmp_path / "c", array_documents=False)
    place = Location.of(tmp_path / "c")
    meta = read_array_meta(place, "w")
    with pytest.raises(CheckpointExistsError):
        create_array(place, meta)
    assert not (tmp_path / "c" / "w" / "zarr.json").exists()


def test_metadata_of_a_group_of_another_program_is_read_by_the_callers_function(
    tmp_path: Path,
) -> None:
    """Also where it is consolidated and holds arrays that are not read here."""
    for name, keys in (("a", "v2"), ("b", "default")):
        zarr.create_array(
            str(tmp_path / "g" / name),
            shape=(6,),
            chunks=(3,),
            dtype="f4",
            chunk_key_encoding={"name": keys, "separator": "."},  # type: ignore[typeddict-item]
        )
    zarr.open_group(str(tmp_path / "g"), mode="a")
    zarr.consolidate_metadata(str(tmp_path / "g"))
    found = load_zarr_based_sharded_metadata(
        tmp_path / "g", lambda path: ((6,), np.dtype(np.float32))
    )
    assert {key: value.global_shape for key, value in found.items()} == {"a": (6,), "b": (6,)}


def test_path_operations_of_a_trainer(place: Place) -> None:
    """On a checkpoint, one that is damaged, and an attempt that was never committed."""
    url, options = place
    storage = CheckpointStorage(options)
    assert not storage.isdir(url)
    assert storage.listdir(url) == []
    root = Location.of(url, options)
    for name in ("step-1", "step-2"):
        shardstore.save(state_of(1), f"{url}/{name}", storage_options=options)
    root.delete("step-2/zarr.json")
    root.write("step-3/w/c/0/0", b"no commit")
    root.write("notes.txt", b"")
    assert storage.listdir(url) == ["notes.txt", "step-1", "step-2", "step-3"]
    for name in ("step-1", "step-2", "step-3"):
        assert storage.isdir(f"{url}/{name}")
        assert not storage.isfile(f"{url}/{name}")
    for name in ("notes.txt", "step-1/zarr.json"):
        assert storage.isfile(f"{url}/{name}")
        assert not storage.isdir(f"{url}/{name}")
    for name in ("step-4", "step-1/none"):
        assert not storage.isfile(f"{url}/{name}")
        assert not storage.isdir(f"{url}/{name}")
    for name in ("step-1", "step-2", "step-3"):
        storage.remove(f"{url}/{name}")
        assert not root.walk(name)
        assert not storage.isdir(f"{url}/{name}")
    assert storage.listdir(url) == ["notes.txt"]


def test_a_checkpoint_is_removed_with_its_commit_first(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal that ends in between leaves nothing that opens."""
    url, options = place
    storage, target = CheckpointStorage(options), f"{url}/step-1"
    shardstore.save(state_of(1), target, storage_options=options)
    Location.of(target, options).write("logs/1", b"of another program")
    monkeypatch.setattr(type(Location.of(target, options)), "delete", _fails)
    with pytest.raises(StorageError):
        storage.remove(target)
    assert not is_checkpoint(Location.of(target, options))


def _fails(self: Location, name: str = "") -> None:
    raise StorageError("refused")
