"""Sharded objects and the common part go to an object store beside each other, and beside what the
save does meanwhile; what goes wrong with one of them is met as if they had gone one by one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint.api import CheckpointException

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import (
    DamagedCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardstore.inspection.values import compare
from shardstore.inspection.verify import Finding, verify
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit import publish
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.stores import prefix
from shardstore.storage.stores.location import Location

OBJECTS = 12
LIMIT_S = 120.0


class WatchedFileSystem(MemoryFileSystem):
    """A store in memory that tells of each document before it is written, or read."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    watch: ClassVar[Callable[[str], None] | None] = None
    watch_reads: ClassVar[Callable[[str], None] | None] = None
    watch_listings: ClassVar[Callable[[str], None] | None] = None

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if type(self).watch_listings is not None:
            type(self).watch_listings(path)  # type: ignore[misc]
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        if type(self).watch_reads is not None:
            type(self).watch_reads(path)  # type: ignore[misc]
        return super().cat_file(path, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb" and type(self).watch is not None:
            type(self).watch(path)  # type: ignore[misc]
        return super()._open(path, mode, **kwargs)


@pytest.fixture
def place() -> Iterator[str]:
    fsspec.register_implementation("watched", WatchedFileSystem, clobber=True)
    yield f"watched://{uuid.uuid4().hex}/step"
    WatchedFileSystem.watch = WatchedFileSystem.watch_reads = None
    WatchedFileSystem.watch_listings = None


def state(value: int, nbytes: int = 10) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(value))),
        "objects": [
            ShardedObject("extra", {"step": value, "text": "x" * nbytes}, (OBJECTS,), (i,))
            for i in range(OBJECTS)
        ],
        "step": value,
    }


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shardstore-io"}


def is_object(path: str) -> bool:
    return "/shard_" in path


def test_objects_do_not_wait_for_each_other(place: str) -> None:
    """Each of four waits until the others have been asked for too: one by one none would end."""
    together = threading.Barrier(4)

    def watch(path: str) -> None:
        if is_object(path):
            together.wait(LIMIT_S)

    WatchedFileSystem.watch = watch
    shardstore.save(state(3), place)
    WatchedFileSystem.watch = None
    loaded = shardstore.load(state(0), place)
    assert [found["step"] for found in loaded["objects"]] == [3] * OBJECTS


def test_an_asynchronous_save_writes_nothing_before_it_returns(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one file takes more memory than files that wait may take."""
    monkeypatch.setattr(publish, "BUDGET_PART", DEFAULT_BUDGET_BYTES // 1000)
    returned, early = threading.Event(), list[str]()

    def watch(path: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not returned.is_set() and "/.attempts/" not in path:
            early.append(path)

    WatchedFileSystem.watch = watch
    handle = shardstore.async_save({"w": state(5)["w"], "text": "x" * 5000}, place)
    returned.set()
    handle.result()
    assert early == []
    assert {"common.pt", "w/zarr.json"} <= set(Location.of(place).remote.walk())


def test_objects_are_read_beside_each_other(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shardstore.save(state(4), place)
    together, lock, asked = threading.Barrier(4), threading.Lock(), [0]

    def watch(path: str) -> None:
        if is_object(path):
            with lock:
                asked[0] += 1
            together.wait(LIMIT_S)

    WatchedFileSystem.watch_reads = watch
    loaded = shardstore.load(state(0), place)
    assert [found["step"] for found in loaded["objects"]] == [4] * OBJECTS
    assert asked == [OBJECTS]
    WatchedFileSystem.watch_reads = None
    monkeypatch.setattr(prefix, "DOCUMENT_THREADS", 5)  # the last group is not a full one
    loaded = shardstore.load(state(0), place)
    assert [found["step"] for found in loaded["objects"]] == [4] * OBJECTS


def test_a_missing_object_is_named_and_a_damaged_one_too(place: str) -> None:
    shardstore.save(state(4), place)
    store = Location.of(place).remote
    name = f"extra/shard_3_{OBJECTS}.pt"
    good = Location.of(place).read(name)
    store.write(name, good[:-1])
    with pytest.raises(DamagedCheckpointError, match=name):
        shardstore.load(state(0), place)
    store.delete([name])
    with pytest.raises(
        DamagedCheckpointError, match=rf"{name} is missing, and the commit names it"
    ):
        shardstore.load(state(0), place)


def test_verification_looks_at_objects_beside_each_other(place: str) -> None:
    shardstore.save(state(4), place)
    store = Location.of(place).remote
    damaged, missing = f"extra/shard_3_{OBJECTS}.pt", f"extra/shard_5_{OBJECTS}.pt"
    store.write(damaged, Location.of(place).read(damaged)[:-1])
    store.delete([missing])
    store.write("extra/stranger.txt", b"?")
    store.write("alone.txt", b"?")
    together = threading.Barrier(4)
    left = [OBJECTS // 4 * 4 - 4]  # the rest may be read alone

    def watch(path: str) -> None:
        if is_object(path):
            with lock:
                left[0] -= 1
                waits = left[0] >= 0
            if waits:
                together.wait(LIMIT_S)

    lock = threading.Lock()
    WatchedFileSystem.watch_reads = watch
    found: list[Finding] = []
    result = verify(StoredCheckpoint(Location.of(place)), found.append)
    root = Location.of(place).url
    assert sorted((finding.kind, finding.path) for finding in found) == [
        ("foreign", f"{root}/alone.txt"),
        ("foreign", f"{root}/extra/stranger.txt"),
        ("object-damaged", f"{root}/{damaged}"),
        ("object-missing", f"{root}/{missing}"),
    ]
    assert left[0] < 0
    assert (result.objects, result.damage, result.notes) == (OBJECTS - 1, 2, 2)


def test_an_asynchronous_save_returns_before_they_are_written(place: str) -> None:
    opened, asked = threading.Event(), threading.Event()

    def watch(path: str) -> None:
        if is_object(path) or path.endswith("common.pt"):
            asked.set()
            assert opened.wait(LIMIT_S), "the call waited for the files"

    WatchedFileSystem.watch = watch
    handle = shardstore.async_save(state(5), place)
    try:
        assert asked.wait(LIMIT_S)
        assert not handle.done()
        with pytest.raises(NotACheckpointError):
            shardstore.open(place)  # a load would wait for the save
    finally:
        opened.set()
    handle.result(LIMIT_S)
    assert shardstore.load(state(0), place)["step"] == 5


@pytest.mark.parametrize("save", ["at once", "in the background"])
def test_an_object_that_cannot_be_written_ends_the_save(place: str, save: str) -> None:
    bad = f"/shard_{OBJECTS // 2}_{OBJECTS}.pt"

    def watch(path: str) -> None:
        if path.endswith(bad):
            raise PermissionError(13, "denied", path)

    WatchedFileSystem.watch = watch
    saves: dict[str, Callable[[], object]] = {
        "at once": lambda: shardstore.save(state(1), place),
        "in the background": lambda: shardstore.async_save(state(1), place).result(LIMIT_S),
    }
    with pytest.raises(StorageError, match=bad):
        saves[save]()
    WatchedFileSystem.watch = None
    assert Location.of(place).remote.walk() == []
    shardstore.save(state(2), place)
    assert shardstore.load(state(0), place)["step"] == 2


def test_an_error_elsewhere_waits_for_those_under_way(place: str) -> None:
    """A file that is still on its way when a chunk fails does not come after what is cleared."""
    sent, chunk_failed = threading.Event(), threading.Event()

    def watch(path: str) -> None:
        if "/w/c" in path:
            assert sent.wait(LIMIT_S)
            chunk_failed.set()
            raise PermissionError(13, "denied", path)
        if is_object(path):
            sent.set()
            assert chunk_failed.wait(LIMIT_S)

    before = senders()
    WatchedFileSystem.watch = watch
    with pytest.raises(StorageError, match="w/c"):
        shardstore.save(state(1), place)
    assert Location.of(place).remote.walk() == []
    assert not senders() - before


def test_an_interrupt_ends_the_sending(place: str) -> None:
    """Who interrupts a save gets the control back at once; what was to be sent is not any more."""
    interrupted = threading.Event()

    def watch(path: str) -> None:
        if "/w/c" in path:
            interrupted.set()
            raise KeyboardInterrupt
        if is_object(path):
            assert interrupted.wait(LIMIT_S)

    before = senders()
    WatchedFileSystem.watch = watch
    with pytest.raises(KeyboardInterrupt):
        shardstore.save(state(1), place)
    for thread in senders() - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    WatchedFileSystem.watch = None
    shardstore.save(state(2), place)
    assert shardstore.load(state(0), place)["step"] == 2


def test_files_that_are_kept_are_bounded(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files of 1,000 bytes and more, with room for 2,500, two are kept at a time."""
    monkeypatch.setattr(publish, "BUDGET_PART", DEFAULT_BUDGET_BYTES // 2_500)
    sizes: list[int] = []
    taken = publish.Files.taken

    def counted(self: publish.Files) -> list[tuple[str, bytes]]:
        files = taken(self)
        sizes.append(sum(len(data) for _, data in files))
        return files

    monkeypatch.setattr(publish.Files, "taken", counted)
    shardstore.save(state(7, nbytes=600), place)
    assert 0 < max(sizes) <= 2_500
    shardstore.save(state(8, nbytes=5_000), place, overwrite=True)  # each alone is more
    assert shardstore.load(state(0), place)["step"] == 8


def test_long_values_of_dcp_do_not_wait_for_each_other(place: str) -> None:
    long = {f"seen{i}": list(range(i, 30_000)) for i in range(4)}
    state_dict = {"w": torch.arange(4.0), **long}
    together = threading.Barrier(4)

    def watch(path: str) -> None:
        if is_object(path):
            together.wait(LIMIT_S)

    WatchedFileSystem.watch = watch
    dcp.save(state_dict, storage_writer=StorageWriter(place), no_dist=True)
    WatchedFileSystem.watch = None
    loaded = {"w": torch.zeros(4), **{key: [] for key in long}}
    dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
    assert {key: loaded[key] for key in long} == long
    assert not senders()


def test_a_long_value_of_dcp_that_can_not_be_written_is_the_error(place: str) -> None:
    def watch(path: str) -> None:
        if is_object(path):
            raise OSError("no room")

    WatchedFileSystem.watch = watch
    with pytest.raises(CheckpointException, match="no room"):
        dcp.save(
            {"w": torch.arange(4.0), "seen": list(range(30_000))},
            storage_writer=StorageWriter(place),
            no_dist=True,
        )
    WatchedFileSystem.watch = None
    assert not senders()
    with pytest.raises(NotACheckpointError):
        shardstore.load_plain_tensors(place)


def test_a_comparison_reads_objects_at_the_same_time(place: str) -> None:
    """Objects of eight keys: four objects are read together or never."""
    keys = [f"key{i}" for i in range(8)]

    def saved(value: int) -> dict[str, Any]:
        return {key: ShardedObject(key, {"v": value}, (1,), (0,)) for key in keys}

    shardstore.save(saved(1), place)
    changed = {**saved(1), "key3": ShardedObject("key3", {"v": 2}, (1,), (0,))}
    del changed["key5"]
    shardstore.save(changed, f"{place}-b")
    read = threading.Barrier(4)

    def watch_reads(path: str) -> None:
        if is_object(path) and "-b/" not in path:
            read.wait(LIMIT_S)

    WatchedFileSystem.watch_reads = watch_reads
    found = compare(shardstore.open(place), shardstore.open(f"{place}-b"))
    assert found.files == {"key3/shard_0_1.pt": "differs", "key5/shard_0_1.pt": "only in A"}


def test_files_are_written_where_no_thread_can_be_started(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than is kept, and no thread but the caller's to write it."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "shardstore-io":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(publish, "BUDGET_PART", DEFAULT_BUDGET_BYTES // 2_500)
    shardstore.save(state(6, nbytes=600), place)
    assert shardstore.load(state(0), place)["step"] == 6
