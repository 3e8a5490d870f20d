"""Attempts and commits where there is no rename: who owns a target, who may write, what is seen."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardstore
from shardstore import delete_checkpoint, sweep
from shardstore.errors import CheckpointExistsError, DamagedCheckpointError, StorageError
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.commit.identity import ATTEMPTS, is_committed
from shardstore.storage.commit.inventory import numbers
from shardstore.storage.commit.objects import ObjectAttempt, begin
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore
from tests.helpers.store_suite import EACH_STORE, Target, assert_holds, save_small, small_state

ROOT = "zarr.json"


META = ArrayMeta("w", "w", Grid((4, 8), (2, 8)), "float32")


def write_chunks(attempt: ObjectAttempt, value: float) -> None:
    data = np.full((2, 8), value, np.float32)
    writes = [ChunkWrite(META, (i, 0), data) for i in range(2)]
    Mover.of(attempt.location, check=attempt.check).write(writes, lambda *_: None)


def commit(attempt: ObjectAttempt, content: bytes | None = None) -> None:
    attempt.commit([(ROOT, content or attempt.id.encode())], durable=True)


def chunk(place: Location, index: int = 0) -> float:
    return float(np.frombuffer(place.read(f"w/c.{index}.0")[:-4], np.float32)[0])


def test_the_newest_claim_owns_and_a_late_writer_changes_nothing(target: Target) -> None:
    place = target("two")
    older = begin(place, SaveOptions())
    write_chunks(older, 1.0)
    newer = begin(place, SaveOptions())
    assert place.remote.walk("w") == []
    with pytest.raises(StorageError, match=f"newer attempt {newer.id}"):
        older.check()
    write_chunks(newer, 2.0)
    for late in (lambda: write_chunks(older, 1.0), lambda: commit(older)):
        with pytest.raises(StorageError, match="newer attempt"):
            late()
    assert not is_committed(place)
    commit(newer)
    assert is_committed(place)
    with pytest.raises(StorageError, match="another attempt, which is finished"):
        write_chunks(older, 1.0)
    with pytest.raises(StorageError, match="belongs"):
        commit(older)
    assert (chunk(place), chunk(place, 1)) == (2.0, 2.0)
    assert place.read(ROOT) == newer.id.encode()
    assert place.remote.walk(ATTEMPTS) == []


@EACH_STORE
def test_what_a_late_writer_left_is_overwritten_by_the_owner(target: Target) -> None:
    place = target("leftover")
    older = begin(place, SaveOptions())
    newer = begin(place, SaveOptions())
    write_chunks(older, 1.0)  # after the newer one cleared the place
    older.put_all([("common.pt", b"old")])
    write_chunks(newer, 2.0)
    newer.put_all([("common.pt", b"new")])
    newer.put_all([("a/zarr.json", b"1"), ("common.pt", b"new")])
    commit(newer)
    assert chunk(place) == 2.0
    assert place.read("common.pt") == b"new"


@EACH_STORE
def test_our_own_writes_again_are_no_conflict(target: Target) -> None:
    place = target("again")
    attempt = begin(place, SaveOptions())
    assert ObjectAttempt(place, attempt.id) == attempt
    for _ in range(2):
        write_chunks(attempt, 1.0)
        attempt.put_all([("common.pt", b"x")])
    place.remote.create(ROOT, b"content")  # as after a commit whose answer was lost
    commit(attempt, b"content")
    assert place.remote.walk(ATTEMPTS) == []


@EACH_STORE
def test_a_commit_that_is_there_is_never_replaced(target: Target) -> None:
    place = target("there")
    attempt = begin(place, SaveOptions())
    place.remote.create(ROOT, b"of somebody else")
    with pytest.raises(CheckpointExistsError):
        commit(attempt, b"mine")
    assert place.read(ROOT) == b"of somebody else"


def test_a_claim_waits_for_an_older_attempt_that_is_about_to_commit(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = target("dekker")
    older = begin(place, SaveOptions())
    place.write(f"{ATTEMPTS}/{older.number:06d}.committing", older.id.encode())
    waiting = threading.Event()
    commits = object_commit.is_committed

    def seen(where: Location, names: Any = None) -> bool:
        if names is not None:
            assert object_commit.ObjectAttempt(place, f"{older.number + 1:06d}-").mark("json") in (
                place.remote.walk()
            )
            waiting.set()
        return commits(where, names)

    monkeypatch.setattr(object_commit, "is_committed", seen)
    with ThreadPoolExecutor(1) as pool:
        newer = pool.submit(begin, place, SaveOptions())
        assert waiting.wait(20)
        assert place.remote.create(ROOT, b"of the older one")
        with pytest.raises(CheckpointExistsError):
            newer.result(20)
    assert place.read(ROOT) == b"of the older one"
    assert numbers(place.remote.walk(ATTEMPTS), "json") == [older.number]


def _held_up(place: Location, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An attempt that has looked at the claims for the last time and then does not go on, and a
    newer one that has waited for it in vain and written its own."""
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.5)
    late = begin(place, SaveOptions())
    write_chunks(late, 1.0)
    place.write(f"{ATTEMPTS}/{late.number:06d}.committing", late.id.encode())
    late.check()
    newer = begin(place, SaveOptions())
    assert newer.number > late.number
    assert not place.exists("w/c.0.0")
    write_chunks(newer, 2.0)
    return late, newer


@pytest.mark.parametrize("looks", [False, True])
def test_a_writer_that_was_held_up_loses_its_commit_to_the_owner(
    target: Target, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """The late writer takes it back if it looks once more; else the owner replaces it."""
    place = target("held-up")
    late, newer = _held_up(place, monkeypatch)
    assert late._publish(ROOT, late.id.encode())  # there is no telling it by then
    if looks:
        # The newer attempt says nothing: it may be writing for long yet, or be dead.
        with pytest.raises(StorageError, match=f"newer attempt {newer.id}"):
            late._look_once_more(ROOT, late.id.encode())
        assert not is_committed(place)
    commit(newer)
    assert place.read(ROOT) == newer.id.encode()
    assert (chunk(place), chunk(place, 1)) == (2.0, 2.0)
    assert place.remote.walk(ATTEMPTS) == []
    names = place.remote.walk()
    with pytest.raises(StorageError, match="belongs to"):
        late._publish(ROOT, late.id.encode())
    assert place.remote.walk() == names


class Unanswered(BaseException):
    """As a signal raises it, whatever a thread is doing."""


def _given_up(
    place: Location, monkeypatch: pytest.MonkeyPatch, error: BaseException, **options: bool
) -> Callable[[], bool]:
    """A save of 1.0 whose deciding PUT is given up; what carries it out afterwards, and whether the
    store then took it."""
    pipe = RemoteStore._pipe
    held: list[tuple[Any, ...]] = []

    def holds(self: RemoteStore, path: str, data: bytes, *, create: bool) -> None:
        if path.endswith(f"{place.url.rpartition('/')[2]}/{ROOT}"):
            held.append((self, path, data))
            raise error
        pipe(self, path, data, create=create)

    monkeypatch.setattr(RemoteStore, "_pipe", holds)
    kind = StorageError if isinstance(error, Exception) else type(error)
    with pytest.raises(kind) as caught:
        save_small(place, 1.0, **options)
    monkeypatch.setattr(RemoteStore, "_pipe", pipe)
    if isinstance(error, Exception):
        assert place.url in str(caught.value)
        assert "whether" in str(caught.value)
        assert "is not known" in str(caught.value)

    def carry_out() -> bool:
        store, _, data = held[0]
        return bool(store.create(ROOT, data))

    return carry_out


@pytest.mark.parametrize("error", [TimeoutError("no answer"), Unanswered()], ids=["silent", "cut"])
def test_a_commit_that_was_given_up_is_whole_if_it_comes(
    target: Target, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    place = target("given-up")
    carry_out = _given_up(place, monkeypatch, error)
    assert not is_committed(place)
    assert sweep(place, dry_run=False) == []  # too young
    assert carry_out()
    assert_holds(place, 1.0)
    sweep(place, older_than=timedelta(0), dry_run=False)
    assert_holds(place, 1.0)
    with pytest.raises(CheckpointExistsError):
        save_small(place, 2.0)
    delete_checkpoint(place)
    assert place.remote.walk() == []


def test_a_save_waits_for_a_commit_that_was_given_up(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = target("given-up")
    carry_out = _given_up(place, monkeypatch, TimeoutError())

    def sleep(_: float) -> None:
        assert carry_out()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(object_commit, "time", clock)
    with pytest.raises(CheckpointExistsError):
        save_small(place, 2.0)
    assert_holds(place, 1.0)


@pytest.mark.parametrize("comes", ["before the commit", "after it"])
def test_a_commit_that_was_given_up_takes_no_newer_save(
    target: Target, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)
    place = target("given-up")
    carry_out = _given_up(place, monkeypatch, TimeoutError())
    if comes == "before the commit":
        publish = ObjectAttempt._publish

        def late(self: ObjectAttempt, name: str, data: bytes) -> bool:
            monkeypatch.setattr(ObjectAttempt, "_publish", publish)
            assert carry_out()
            return publish(self, name, data)

        monkeypatch.setattr(ObjectAttempt, "_publish", late)
    save_small(place, 2.0)
    assert not carry_out()
    assert_holds(place, 2.0)
    assert place.remote.walk(ATTEMPTS) == []


def test_a_commit_that_the_store_refused_leaves_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = target("refused")
    pipe = RemoteStore._pipe

    def refuses(self: RemoteStore, path: str, data: bytes, *, create: bool) -> None:
        if path.endswith(f"refused/{ROOT}"):
            raise PermissionError(path)
        pipe(self, path, data, create=create)

    monkeypatch.setattr(RemoteStore, "_pipe", refuses)
    with pytest.raises(StorageError) as caught:
        save_small(place, 1.0)
    assert "is not known" not in str(caught.value)
    assert place.remote.walk() == []


@EACH_STORE
def test_simultaneous_claims_have_different_numbers(target: Target) -> None:
    place = target("many")
    with ThreadPoolExecutor(12) as pool:
        attempts = list(pool.map(lambda _: object_commit.claimed(place), range(12)))
    assert sorted(attempt.number for attempt in attempts) == list(range(1, 13))
    for attempt in attempts:
        if attempt.number < 12:
            with pytest.raises(StorageError):
                attempt.check()
        else:
            attempt.check()


def test_a_late_writer_does_not_write_into_a_newer_file(tmp_path: Path) -> None:
    """On files an object is made and filled in two steps, with time between them."""
    place = Location.of(f"local://{tmp_path}/late")
    assert place.remote.create("w/other", b"")
    late = place.remote.fs.open(f"{tmp_path}/late/w/c.0.0", "xb")
    assert not place.remote.create("w/c.0.0", b"owner's")
    place.remote.write("w/c.0.0", b"owner's")
    with late:
        late.write(b"late")
    assert place.read("w/c.0.0") == b"owner's"
    assert sorted(place.remote.walk("w")) == ["w/c.0.0", "w/other"]


@EACH_STORE
def test_of_racing_saves_at_most_one_wins_and_it_is_whole(target: Target) -> None:
    place = target("race")
    start = threading.Barrier(6)

    def save(number: int) -> int | None:
        start.wait()
        try:
            attempt = begin(place, SaveOptions())
            write_chunks(attempt, float(number))
            commit(attempt, b"%d" % number)
        except (StorageError, CheckpointExistsError):
            return None
        return number

    with ThreadPoolExecutor(6) as pool:
        winners = [number for number in pool.map(save, range(6)) if number is not None]
    assert len(winners) <= 1
    if winners:
        assert place.read(ROOT) == b"%d" % winners[0]
        assert (chunk(place), chunk(place, 1)) == (float(winners[0]),) * 2
    else:
        assert not is_committed(place)


class ForgetfulFileSystem(MemoryFileSystem):
    """A store that takes a creation of what exists, as those do that ignore If-None-Match."""

    protocol = "forgetful"
    store: ClassVar[dict[str, Any]] = {}

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return super()._open(path, mode.replace("x", "w"), **kwargs)


def test_a_store_that_ignores_conditions_is_refused_unless_allowed() -> None:
    fsspec.register_implementation("forgetful", ForgetfulFileSystem, clobber=True)
    place = Location.of(f"forgetful://{uuid.uuid4().hex}/step")
    with pytest.raises(StorageError, match="allow_unconditional=True") as caught:
        save_small(place, 1.0)
    assert "If-None-Match" not in str(caught.value)  # what S3 calls it
    assert place.remote.walk() == []
    save_small(place, 2.0, allow_unconditional=True)
    assert_holds(place, 2.0)


def test_a_commit_that_was_given_up_where_conditions_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is whole if it comes; after a newer save it takes that one's place, and is found out."""
    fsspec.register_implementation("forgetful", ForgetfulFileSystem, clobber=True)
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)
    place = Location.of(f"forgetful://{uuid.uuid4().hex}/step")
    carry_out = _given_up(place, monkeypatch, TimeoutError(), allow_unconditional=True)
    carry_out()
    assert_holds(place, 1.0)
    save_small(place, 2.0, overwrite=True, allow_unconditional=True)
    assert_holds(place, 2.0)
    carry_out()
    with pytest.raises(DamagedCheckpointError):
        shardstore.load(small_state(), place.place)


class BlindFileSystem(MemoryFileSystem):
    """A store whose listings never show what was written."""

    protocol = "blind"
    store: ClassVar[dict[str, Any]] = {}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return []


def test_a_claim_that_is_there_and_never_listed_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.2)
    fsspec.register_implementation("blind", BlindFileSystem, clobber=True)
    place = Location.of(f"blind://{uuid.uuid4().hex}/step")
    place.write(f"{ATTEMPTS}/000001.json", b"{}")
    with pytest.raises(StorageError, match=r"not list it.*that never had versioning"):
        begin(place, SaveOptions())
