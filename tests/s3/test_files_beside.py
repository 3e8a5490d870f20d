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
from shardstore.errors import DamagedCheckpointError, NotACheckpointError, StorageError
from shardstore.inspection.values import compare
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.commit import publish
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.stores import prefix
from shardstore.storage.stores.location import Location
from tests.helpers.verification import verified

OBJECTS = 12
LIMIT_S = 120.0


class WatchedFileSystem(MemoryFileSystem):
    """A store in memory that tells of each document before it is written, or read."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    writes: ClassVar[Callable[[str], None]]
    reads: ClassVar[Callable[[str], None]]

    def cat_file(self, path: str, **kwargs: Any) -> Any:
        type(self).reads(path)
        return super().cat_file(path, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            type(self).writes(path)
        return super()._open(path, mode, **kwargs)


def nothing(_: str) -> None:
    """Watch nothing."""


def watch(
    *, writes: Callable[[str], None] = nothing, reads: Callable[[str], None] = nothing
) -> None:
    """Call these from now on, and no others."""
    WatchedFileSystem.writes, WatchedFileSystem.reads = writes, reads


@pytest.fixture
def place() -> Iterator[str]:
    fsspec.register_implementation("watched", WatchedFileSystem, clobber=True)
    watch()
    yield f"watched://{uuid.uuid4().hex}/step"
    watch()


def state(value: int, nbytes: int = 10) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(value))),
        "objects": [
            ShardedObject("extra", {"step": value, "text": "x" * nbytes}, (OBJECTS,), (i,))
            for i in range(OBJECTS)
        ],
        "step": value,
    }


def assert_holds(place: str, value: int) -> None:
    loaded = shardstore.load(state(0), place)
    assert loaded["step"] == value
    assert [found["step"] for found in loaded["objects"]] == [value] * OBJECTS


def senders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shardstore-io"}


def is_object(path: str) -> bool:
    return "/shard_" in path


class Together:
    """Lets each object wait until four have been asked for: one by one none would end."""

    def __init__(self, most: int = OBJECTS) -> None:
        self._barrier, self._lock = threading.Barrier(4), threading.Lock()
        self.asked, self._most = 0, most

    def __call__(self, path: str) -> None:
        if is_object(path) and "-b/" not in path:
            with self._lock:
                self.asked += 1
                waits = self.asked <= self._most
            if waits:
                self._barrier.wait(LIMIT_S)


def test_objects_do_not_wait_for_each_other(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where they are written, nor where they are read."""
    watch(writes=Together())
    shardstore.save(state(3), place)
    reads = Together()
    watch(reads=reads)
    assert_holds(place, 3)
    assert reads.asked == OBJECTS
    watch()
    monkeypatch.setattr(prefix, "DOCUMENT_THREADS", 5)  # the last group is not a full one
    assert_holds(place, 3)


def test_an_asynchronous_save_writes_nothing_before_it_returns(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if one file takes more memory than files that wait may take."""
    monkeypatch.setattr(publish, "BUDGET_PART", DEFAULT_BUDGET_BYTES // 1000)
    returned, early = threading.Event(), list[str]()

    def writes(path: str) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not returned.is_set() and "/.attempts/" not in path:
            early.append(path)

    watch(writes=writes)
    handle = shardstore.async_save({"w": state(5)["w"], "text": "x" * 5000}, place)
    returned.set()
    handle.result()
    assert early == []
    assert {"common.pt", "w/zarr.json"} <= set(Location.of(place).remote.walk())


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
    reads = Together(OBJECTS // 4 * 4 - 4)  # the rest may be read alone
    watch(reads=reads)
    result, found = verified(place)
    root = Location.of(place).url
    assert sorted((finding.kind, finding.path) for finding in found) == [
        ("foreign", f"{root}/alone.txt"),
        ("foreign", f"{root}/extra/stranger.txt"),
        ("object-damaged", f"{root}/{damaged}"),
        ("object-missing", f"{root}/{missing}"),
    ]
    assert reads.asked > OBJECTS // 4 * 4 - 4
    assert (result.objects, result.damage, result.notes) == (OBJECTS - 1, 2, 2)


def test_an_asynchronous_save_returns_before_they_are_written(place: str) -> None:
    opened, asked = threading.Event(), threading.Event()

    def writes(path: str) -> None:
        if is_object(path) or path.endswith("common.pt"):
            asked.set()
            assert opened.wait(LIMIT_S), "the call waited for the files"

    watch(writes=writes)
    handle = shardstore.async_save(state(5), place)
    try:
        assert asked.wait(LIMIT_S)
        assert not handle.done()
        assert not shardstore.check_is_distributed_checkpoint(place)  # which does not wait for it
    finally:
        opened.set()
    handle.result(LIMIT_S)
    assert_holds(place, 5)


@pytest.mark.parametrize("save", ["at once", "in the background"])
def test_an_object_that_cannot_be_written_ends_the_save(place: str, save: str) -> None:
    bad = f"/shard_{OBJECTS // 2}_{OBJECTS}.pt"

    def writes(path: str) -> None:
        if path.endswith(bad):
            raise PermissionError(13, "denied", path)

    watch(writes=writes)
    saves: dict[str, Callable[[], object]] = {
        "at once": lambda: shardstore.save(state(1), place),
        "in the background": lambda: shardstore.async_save(state(1), place).result(LIMIT_S),
    }
    with pytest.raises(StorageError, match=bad):
        saves[save]()
    watch()
    assert Location.of(place).remote.walk() == []
    shardstore.save(state(2), place)
    assert_holds(place, 2)


def test_an_error_elsewhere_waits_for_those_under_way(place: str) -> None:
    """A file that is still on its way when a chunk fails does not come after what is cleared."""
    sent, chunk_failed = threading.Event(), threading.Event()

    def writes(path: str) -> None:
        if "/w/c" in path:
            assert sent.wait(LIMIT_S)
            chunk_failed.set()
            raise PermissionError(13, "denied", path)
        if is_object(path):
            sent.set()
            assert chunk_failed.wait(LIMIT_S)

    before = senders()
    watch(writes=writes)
    with pytest.raises(StorageError, match="w/c"):
        shardstore.save(state(1), place)
    assert Location.of(place).remote.walk() == []
    assert not senders() - before


def test_an_interrupt_ends_the_sending(place: str) -> None:
    """Who interrupts a save gets the control back at once; what was to be sent is not any more."""
    interrupted = threading.Event()

    def writes(path: str) -> None:
        if "/w/c" in path:
            interrupted.set()
            raise KeyboardInterrupt
        if is_object(path):
            assert interrupted.wait(LIMIT_S)

    before = senders()
    watch(writes=writes)
    with pytest.raises(KeyboardInterrupt):
        shardstore.save(state(1), place)
    for thread in senders() - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    watch()
    shardstore.save(state(2), place)
    assert_holds(place, 2)


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
    assert_holds(place, 8)


def test_long_values_of_dcp_do_not_wait_for_each_other(place: str) -> None:
    long = {f"seen{i}": list(range(i, 30_000)) for i in range(4)}
    watch(writes=Together())
    dcp.save({"w": torch.arange(4.0), **long}, storage_writer=StorageWriter(place), no_dist=True)
    watch()
    loaded = {"w": torch.zeros(4), **{key: [] for key in long}}
    dcp.load(loaded, storage_reader=StorageReader(place), no_dist=True)
    assert {key: loaded[key] for key in long} == long
    assert not senders()


def test_a_long_value_of_dcp_that_can_not_be_written_is_the_error(place: str) -> None:
    def writes(path: str) -> None:
        if is_object(path):
            raise OSError("no room")

    watch(writes=writes)
    with pytest.raises(CheckpointException, match="no room"):
        dcp.save(
            {"w": torch.arange(4.0), "seen": list(range(30_000))},
            storage_writer=StorageWriter(place),
            no_dist=True,
        )
    watch()
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
    watch(reads=Together())
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
    assert_holds(place, 6)
