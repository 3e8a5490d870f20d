"""What in an object store is ours, and what deletions and the sweeper take of it."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor, delete_checkpoint, sweep
from shardstore.errors import AccessPatternError, NotACheckpointError, StorageError
from shardstore.storage.commit import inventory as own_objects
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.commit.identity import ATTEMPTS, is_committed
from shardstore.storage.commit.objects import ObjectAttempt
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore
from testing.s3_proxy import Fault, FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.s3_checkpoints import Run
from tests.helpers.store_suite import EACH_STORE, Target, assert_holds, save_small, unfinished_save


def test_names_of_foreign_objects_are_told_from_ours() -> None:
    names = [
        *("zarr.json", "metadata.json", "common.pt", "notes.txt", "w/zarr.json", "w/c.0.1", "w/c"),
        *("v1/.zarray", "v1/0.1", "o/shard_0.1_2.2.pt", "w/readme.md", ".attempts/000001.json"),
        *("group/zarr.json", "group/a/zarr.json", "group/a/c/0"),
        *("step-1/zarr.json", "step-1/metadata.json", "step-1/w/zarr.json", "step-1/w/c.0"),
        *("deep/step-1/w/c.0", "logs/1", "x/c.0.0/y"),
    ]
    foreign = set(names) - set(own_objects.own_names(names))
    assert foreign == {
        *("notes.txt", "w/readme.md", "group/zarr.json", "group/a/zarr.json", "group/a/c/0"),
        *("step-1/zarr.json", "step-1/metadata.json", "step-1/w/zarr.json", "step-1/w/c.0"),
        *("deep/step-1/w/c.0", "x/c.0.0/y"),
        *("logs/1", "v1/.zarray", "v1/0.1"),
    }
    # Documents of layout 1 are ours where there is no root document, and a checkpoint's or a mark.
    old = ["v1/.zarray", "v1/0.1"]
    assert own_objects.own_names(["metadata.json", *old]) == ["metadata.json", *old]
    assert own_objects.own_names([".attempts/deleting", *old])[1:] == old
    assert own_objects.own_names([".attempts/000001.json", *old])[1:] == []
    told = own_objects.own_names(names, others={"w"})
    assert not {"w/zarr.json", "w/c.0.1", "w/c"} & set(told)
    # With neither claims nor documents, nothing that looks like a chunk is ours.
    assert own_objects.own_names(["w/c", "w/c.0.1", "v1/0.1", "notes/1"]) == []
    objects = ["o/shard_0_1.pt", "o/shard_0_1.json"]
    assert own_objects.own_names(objects) == []
    for evidence in ("zarr.json", ".attempts/000001.json"):
        assert own_objects.own_names([evidence, *objects])[1:] == objects
    dead = [".attempts/000001.json", "w/c", "w/c.0.1", "v1/0.1"]
    assert own_objects.own_names(dead) == dead[:3]
    # Chunks of layout 1 are ours where an attempt said so, as chunks and nothing else.
    said = [*dead, "v1/notes.txt", "v1/a/0", "v2/0.1"]
    assert own_objects.own_names(said, {"v1"}) == dead


FOREIGN = {
    **{"data/metadata.json": b"[1, 2]", "notes/metadata.json": b"not JSON", "a/common.pt": b"?"},
    **{"src/lib/c": b"?", "logs/dir/c.1": b"?", "data/x/0": b"?"},
    **{"run/logs/1": b"?", "run/logs/2": b"?", "run/notes/c": b"?"},
}
"""What others may have, under names that look like ours."""


@EACH_STORE
def test_what_only_looks_like_ours_is_never_taken(target: Target) -> None:
    root, place = target("others"), target("others/run")
    for name, data in FOREIGN.items():
        root.write(name, data)
    assert sweep(root, older_than=timedelta(0), dry_run=False) == []
    save_small(place, 1.0)
    save_small(place, 2.0, overwrite=True)
    assert set(FOREIGN) <= set(root.remote.walk())
    delete_checkpoint(place)
    assert sorted(root.remote.walk()) == sorted(FOREIGN)


def test_what_a_deletion_in_layout_1_that_died_left_is_swept(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third request fails."""
    root, place = target("cut"), target("cut/step-1")
    root.write("step-1/logs/1", b"mine")
    save_small(place, 1.0, sharded_strategy=("zarr", 1))
    assert not any(ATTEMPTS in name for name in root.remote.walk())
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)  # its claim is certainly a dead one's
    delete = RemoteStore.delete
    left = [2]

    def dies(self: RemoteStore, names: Any) -> None:
        if not left[0]:
            raise StorageError("killed")
        left[0] -= 1
        delete(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStore, "delete", dies)
        with pytest.raises(StorageError, match="killed"):
            delete_checkpoint(place)
    assert not is_committed(place)
    assert place.remote.walk() != ["logs/1"]
    (found,) = sweep(root, older_than=timedelta(0), dry_run=False)
    assert found.url == place.url
    assert root.remote.walk() == ["step-1/logs/1"]


def test_a_save_waits_for_a_deletion_that_is_under_way(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is on the way, and takes the names that the save is going to write."""
    place = target("deleting")
    save_small(place, 1.0)
    waits = threading.Event()
    saving: list[Any] = []
    delete = RemoteStore.delete

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(object_commit, "time", clock)
    with ThreadPoolExecutor(1) as pool:

        def held(self: RemoteStore, names: Any) -> None:
            """Between the deletion of the commit and that of its data."""
            if not saving and any("/c." in name for name in names) and not is_committed(place):
                saving.append(pool.submit(save_small, place, 2.0))
                saving[0].add_done_callback(lambda _: waits.set())
                assert waits.wait(60)
                assert not saving[0].done()
            delete(self, names)

        monkeypatch.setattr(RemoteStore, "delete", held)
        delete_checkpoint(place)
        saving[0].result(60)
    assert_holds(place, 2.0)
    assert place.remote.walk(ATTEMPTS) == []


def test_a_deletion_that_was_held_up_takes_nothing_of_a_newer_save(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save waited for it in vain and took it for dead."""
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.5)
    place = target("held-up-deleting")
    save_small(place, 1.0)
    outbid = ObjectAttempt.outbid_by
    deleting = threading.get_ident()
    saved = []

    def looks(self: ObjectAttempt) -> str | None:
        # Before a look that follows the deletion of the commit.
        mine = threading.get_ident() == deleting
        if mine and not saved and not is_committed(place):
            saved.append(True)
            save_small(place, 2.0)
        return outbid(self)

    monkeypatch.setattr(ObjectAttempt, "outbid_by", looks)
    delete_checkpoint(place)
    assert saved
    assert_holds(place, 2.0)
    assert place.remote.walk(ATTEMPTS) == []


def test_a_deletion_that_was_outbid_before_it_began_deletes_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = target("outbid")
    save_small(place, 1.0)
    write = RemoteStore.write
    newer: list[ObjectAttempt] = []

    def writes(self: RemoteStore, name: str, data: bytes) -> None:
        write(self, name, data)
        if name.endswith(".clearing") and not newer:
            newer.append(object_commit.claimed(place))

    monkeypatch.setattr(RemoteStore, "write", writes)
    with pytest.raises(StorageError, match=r"was not deleted.*newer attempt") as caught:
        delete_checkpoint(place)
    assert place.url in str(caught.value)
    assert newer[0].id in str(caught.value)
    assert_holds(place, 1.0)
    assert own_objects.numbers(place.remote.listing(ATTEMPTS), "clearing") == []
    newer[0].withdraw_all()
    delete_checkpoint(place)
    assert place.remote.walk() == []


@EACH_STORE
def test_simultaneous_deletions_delete_everything(target: Target) -> None:
    place = target("deletions")
    save_small(place, 1.0)
    start = threading.Barrier(4)

    def delete(_: int) -> None:
        start.wait()
        with contextlib.suppress(StorageError, NotACheckpointError):
            delete_checkpoint(place)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(delete, range(4)))
    assert not is_committed(place)
    sweep(place, older_than=timedelta(0), dry_run=False)
    assert place.remote.walk() == []


def test_in_which_order_objects_are_deleted() -> None:
    names = ["common.pt", "manifest.npz", "metadata.json", "zarr.json", "w/zarr.json", "v/.zarray"]
    chunks = [f"w/c.{i}" for i in range(5)]
    rounds = own_objects.deletion_rounds([*names, *chunks], 3)
    assert rounds == [
        *(["zarr.json"], ["metadata.json"], chunks[:3], chunks[3:]),
        *(["common.pt", "manifest.npz", "v/.zarray"], ["w/zarr.json"]),
    ]
    assert own_objects.deletion_rounds([], 3) == []


def test_the_sweeper_takes_what_no_commit_covers(target: Target) -> None:
    root = target("runs")
    kept, dead = target("runs/step-1"), target("runs/step-2")
    save_small(kept, 1.0)
    root.write("step-3/notes.txt", b"mine")
    root.write("alone/zarr.json", b'{"zarr_format": 3, "node_type": "array"}')
    root.write("alone/c.0", b"a foreign array")
    session = unfinished_save(dead)
    before = root.remote.walk()
    assert sweep(root) == []  # too young
    (found,) = sweep(root, older_than=timedelta(0))
    assert (found.url, found.kind) == (dead.url, "attempt")
    assert found.objects == 3  # claim, chunk, document
    assert root.remote.walk() == before
    assert sweep(root, older_than=timedelta(0), dry_run=False) == [found]
    assert root.remote.walk() == [name for name in before if not name.startswith("step-2/")]
    assert_holds(kept, 1.0)
    with pytest.raises(StorageError, match="belongs"):
        session.finish()
    assert not is_committed(dead)


STRANGERS = ("step-2/logs/1", "step-2/logs/0.0", "step-2/notes.txt")


def _dead_before_its_documents(target: Target) -> tuple[Location, Location]:
    """A save in Megatron-Core's old layout, whose chunks have the names that anything can have."""
    root, dead = target("runs"), target("runs/step-2")
    unfinished_save(dead, version=1)
    dead.remote.delete([name for name in dead.remote.walk() if name.endswith(".zarray")])
    assert any(name.endswith("/0.0") for name in dead.remote.walk())
    for name in STRANGERS:
        root.write(name, b"mine")
    return root, dead


def test_the_sweeper_takes_chunks_of_layout_1_that_have_no_document(target: Target) -> None:
    root, dead = _dead_before_its_documents(target)
    (found,) = sweep(root, older_than=timedelta(0))
    assert (found.url, found.objects) == (dead.url, 3)  # claim, mark, chunk
    assert sweep(root, older_than=timedelta(0), dry_run=False) == [found]
    assert sorted(root.remote.walk()) == sorted(STRANGERS)


def test_the_next_save_clears_them_and_leaves_no_mark(target: Target) -> None:
    root, dead = _dead_before_its_documents(target)
    save_small(dead, 1.0)
    names = set(root.remote.walk())
    assert set(STRANGERS) <= names
    assert not any(ATTEMPTS in name for name in names)
    assert not any(name.endswith("/0.0") for name in names - set(STRANGERS))


def test_a_save_in_layout_1_that_is_refused_leaves_nothing(target: Target) -> None:
    root = target("old")
    root.write("step-1/logs/1", b"mine")
    holes = {
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(2, 3), (0, 0, 2)),
        "no chunk": ShardedTensor.from_rank_offsets("no chunk", torch.ones(0, 3)),
    }
    with pytest.raises(AccessPatternError):
        shardstore.save(holes, target("old/step-1").place, ("zarr", 1))
    assert root.remote.walk() == ["step-1/logs/1"]


def test_what_a_store_refused_to_delete_of_layout_1_is_known(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the deletion, which has given up; its mark says whose the rest is."""
    place = target("refused")
    save_small(place, 1.0, sharded_strategy=("zarr", 1))
    delete = RemoteStore.delete

    def refuses(self: RemoteStore, names: Any) -> None:
        if any(name.endswith(".zarray") for name in names):
            raise StorageError("refused")
        delete(self, names)

    monkeypatch.setattr(RemoteStore, "delete", refuses)
    with pytest.raises(StorageError, match="refused"):
        delete_checkpoint(place)
    monkeypatch.setattr(RemoteStore, "delete", delete)
    assert place.remote.walk(ATTEMPTS) == [own_objects.DELETING]
    sweep(place, older_than=timedelta(0), dry_run=False)
    assert place.remote.walk() == []


@pytest.mark.parametrize("fault", [Fault.LOCKED, Fault.UNKNOWN])
def test_a_store_without_bulk_deletions(
    own_run: Run, proxied: S3Server, proxy: FaultProxy, fault: Fault
) -> None:
    """Many demand a Content-MD5, which botocore does not send since 1.36."""
    rule = proxy.add(fault, methods=("POST",), path=r"\?delete", count=None)
    place = Location.of(own_run.url(1), proxied.storage_options)
    for overwrite in (False, True):
        save_small(place, 1.0, overwrite=overwrite)
    delete_checkpoint(place)
    assert rule.hits
    assert own_run.direct.keys(own_run.bucket) == []
    with pytest.raises(StorageError, match="NoSuchBucket"):
        Location.of("s3://shardstore-nowhere-0815", place.options).remote.delete(["x"])


def test_uploads_that_were_never_completed_are_swept(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    client = s3_server.client()
    client.create_multipart_upload(Bucket=bucket, Key="runs/step-1/common.pt")
    client.create_multipart_upload(Bucket=bucket, Key="elsewhere/x")
    client.create_multipart_upload(Bucket=bucket, Key="runs-of-others/x")
    options = s3_server.storage_options
    root = f"s3://{bucket}/runs"
    old = timedelta(seconds=-60)  # the server's clock may be a moment ahead
    (found,) = sweep(root, older_than=old, storage_options=options)
    assert (found.kind, found.url) == ("upload", f"{root}/step-1/common.pt")
    assert sweep(root, older_than=old, storage_options=options, dry_run=False) == [found]
    assert sweep(root, older_than=old, storage_options=options) == []
    left = client.list_multipart_uploads(Bucket=bucket).get("Uploads") or []
    assert sorted(upload["Key"] for upload in left) == ["elsewhere/x", "runs-of-others/x"]
