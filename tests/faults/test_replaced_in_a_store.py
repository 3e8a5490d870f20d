"""A checkpoint in an object store that is replaced while it is read is not called damaged.

An object store has no rename: between two checkpoints a place holds none. The store in memory is
exchanged for its state at each request of an overwrite, before each request of a reader.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFile

import shardstore
from shardstore import CheckpointManager
from shardstore.dcp import StorageWriter
from shardstore.errors import NotACheckpointError
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.storage.checkpoint import ReplacedError, UnfinishedError
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.faults.test_crash_at_every_request import MortalFileSystem, deaths, put_back
from tests.helpers.verification import verified

PLACE, RUN = "watched://runs/c", "watched://runs/m"
ARRAYS = 2
EACH = 1 if os.environ.get("SHARDSTORE_TESTS") == "all" else 5
"""Step between the moments that are tried; the next request of a reader meets others."""
Objects = dict[str, Any]
Place = str | Path
Reader = Callable[[Place], int]


class WatchedFileSystem(MortalFileSystem):
    """A store in memory that calls a function before each request."""

    protocol = "watched"
    before: Callable[[], None] | None = None

    @classmethod
    def request(cls) -> None:
        if cls.before is not None:
            cls.before()
        MortalFileSystem.request()

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self.request()
        return super().cat_file(*args, **kwargs)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)
    fsspec.register_implementation("watched", WatchedFileSystem, clobber=True)
    yield
    WatchedFileSystem.before = None
    put_back({})


def state(version: int) -> dict[str, Any]:
    grows = "x" * 100 * version
    found: dict[str, Any] = {
        "step": version,
        "grows": grows,
        "o": ShardedObject("o", [version], (1,), (0,)),
    }
    for i in range(ARRAYS):
        value = torch.full((6, 8), float(10 * version + i))
        found[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", value)
    only = torch.full((version,), float(version))
    found["only"] = ShardedTensor.from_rank_offsets(f"only-{version}", only)
    return found


def save(version: int) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=128)
    shardstore.save(state(version), PLACE, strategy, overwrite=True)


# -- the readers: each returns the version that it read --------------------------------------------


def load(place: Place) -> int:
    asked = {key: value for key, value in state(0).items() if key != "only"}
    return version_of(shardstore.load(asked, place))


def load_keys(place: Place) -> int:
    names = [f"w{i}" for i in range(ARRAYS)]
    loaded = shardstore.load_plain_tensors(place, keys=names)
    return version_of({**loaded, "step": int(loaded["w0"][0, 0]) // 10}, objects=False)


def load_common(place: Place) -> int:
    version: int = shardstore.load_common_state_dict(place)["step"]
    return version


def load_names(place: Place) -> int:
    (only,) = (key for key in shardstore.load_tensors_metadata(place) if key.startswith("only"))
    return int(only[-1])


def verification(place: Place) -> int:
    result, findings = verified(place, threads=1)
    assert result.ok, findings
    return 0


def open_and_read(place: Place) -> int:
    opened = shardstore.open(place)
    values: Any = {key: torch.from_numpy(opened[key][:]) for key in opened if key[0] == "w"}
    return version_of({**values, **opened.common, "o": opened.objects["o/shard_0_1"]})


def version_of(loaded: Any, objects: bool = True) -> int:
    version: int = loaded["step"]
    assert not objects or loaded["o"] == [version]
    for i in range(ARRAYS):
        assert torch.equal(loaded[f"w{i}"], torch.full((6, 8), float(10 * version + i)))
    return version


READERS = [load, load_keys, load_common, load_names, verification, open_and_read]
RETRIED = [load, verification]


# -- what is at the place during an overwrite ------------------------------------------------------


def states_of(
    work: Callable[[], None], before: Callable[[], None] = lambda: save(1)
) -> list[Objects]:
    """The objects of version 1, and after each request of an operation that changed them."""
    found: list[Objects] = []
    seen = None
    for _ in deaths(before, work):
        if contents() != seen:
            found.append(dict(WatchedFileSystem.store))
            seen = contents()
    return [*found, dict(WatchedFileSystem.store)]


def contents() -> dict[str, bytes]:
    return {name: file.getvalue() for name, file in WatchedFileSystem.store.items()}


def outcome(read: Reader, place: Place = PLACE) -> int | None:
    """The version that a reader returns; ``None``: it says that there is none now."""
    try:
        return read(place)
    except (ReplacedError, NotACheckpointError) as error:
        text = f"{place} was replaced while it was read"
        if isinstance(error, UnfinishedError):
            text = f"{place} is being replaced or deleted"
        elif not isinstance(error, ReplacedError):
            text = str(place)
            assert not any("/.attempts/" in name for name in WatchedFileSystem.store)
        assert text in str(error)  # noqa: PT017 (one of several right answers)
        return None


def committed() -> bool:
    return any(name.endswith("/c/zarr.json") for name in WatchedFileSystem.store)


def requests_of(read: Reader) -> int:
    calls = []
    WatchedFileSystem.before = lambda: calls.append(0)  # type: ignore[assignment]
    outcome(read)
    WatchedFileSystem.before = None
    return len(calls)


def exchanges(
    read: Reader, moments: Sequence[Objects], begun: int
) -> Iterator[tuple[int | None, bool]]:
    """Exchange the objects before each request of a reader that began at a moment."""
    put_back(moments[begun])
    for number in range(requests_of(read)):
        for later in moments[begun + 1 + number % EACH :: EACH]:
            left = iter(range(number))

            def exchange(left: Iterator[int] = left, later: Objects = later) -> None:
                if next(left, None) is None:
                    WatchedFileSystem.before = None
                    put_back(later)

            put_back(moments[begun])
            WatchedFileSystem.before = exchange  # type: ignore[assignment]
            found = outcome(read)
            WatchedFileSystem.before = None
            yield found, committed()


@pytest.mark.parametrize("read", READERS)
def test_a_reader_during_an_overwrite_gets_one_checkpoint(read: Reader) -> None:
    moments = states_of(lambda: save(2))
    assert len(moments) > 20
    for begun in (0, len(moments) // 3, len(moments) - 4):
        for found, is_committed in exchanges(read, moments, begun):
            reads_again = begun == 0 and is_committed and read in RETRIED
            assert found in ((0, 1, 2) if reads_again else (0, 1, 2, None))


@pytest.mark.parametrize("read", READERS)
def test_a_reader_during_a_deletion_gets_all_or_an_error(read: Reader) -> None:
    moments = states_of(lambda: shardstore.delete_checkpoint(PLACE))
    assert len(moments) > 5
    for begun in (0, len(moments) // 2):
        for found, _ in exchanges(read, moments, begun):
            assert found in (0, 1, None)
    put_back(moments[-1])
    with pytest.raises(NotACheckpointError):
        read(PLACE)


def save_steps() -> None:
    with CheckpointManager(RUN) as manager:
        for step in (1, 2):
            manager.save(step, state(step))


def restored_step(_: Place) -> int:
    found = CheckpointManager(RUN).restore({"w0": torch.zeros(6, 8)})
    assert found is not None
    return found.step


def latest_step(_: Place) -> int:
    return CheckpointManager(RUN).latest() or 0


@pytest.mark.parametrize("read", [restored_step, latest_step])
def test_a_step_is_found_while_an_older_one_is_deleted(read: Reader) -> None:
    """A manager deletes old steps in the background, and another process at any time."""
    moments = states_of(lambda: shardstore.delete_checkpoint(f"{RUN}/step-1"), save_steps)
    assert len(moments) > 5
    for begun in range(0, len(moments) - 1, 3):
        assert {found for found, _ in exchanges(read, moments, begun)} == {2}


@pytest.mark.parametrize("read", [restored_step, latest_step])
def test_a_newer_step_is_found_when_the_listed_ones_are_gone(read: Reader) -> None:
    """As a run that keeps one step leaves it to another process. None would begin the run anew."""

    def next_step() -> None:
        CheckpointManager(RUN).save(3, state(3))
        for step in (1, 2):
            shardstore.delete_checkpoint(f"{RUN}/step-{step}")

    moments = states_of(next_step, save_steps)
    for begun in (0, len(moments) // 2, len(moments) - 6):
        found = {found for found, _ in exchanges(read, moments, begun)}
        assert 3 in found <= {2, 3}


def save_by_dcp(version: int) -> None:
    shardstore.delete_checkpoint(PLACE)
    saved = {"step": version, "w0": torch.full((6, 8), 10.0 * version)}
    dcp.save(saved, storage_writer=StorageWriter(PLACE), no_dist=True)


def save_in_layout_1(version: int) -> None:
    shardstore.save(state(version), PLACE, ("zarr", 1), overwrite=True)


def without_sums(objects: Objects) -> Objects:
    """The objects with a root document as older versions wrote it."""
    found = dict(objects)
    root = next(name for name in found if name.endswith("/c/zarr.json"))
    document = json.loads(found[root].getvalue())
    document["attributes"] = {"shardstore": {"config": _config(document), "format_version": 1}}
    found[root] = MemoryFile(None, root, json.dumps(document).encode())
    return found


def _config(document: Any) -> Any:
    return document["attributes"]["shardstore"]["config"]


SAVES: dict[str, tuple[Callable[[int], None], Callable[[Objects], Objects]]] = {
    "save": (save, dict),
    "dcp": (save_by_dcp, dict),
    "layout-1": (save_in_layout_1, dict),
    "no-sums": (save, without_sums),
}


@pytest.mark.parametrize("last", SAVES)
@pytest.mark.parametrize("first", SAVES)
def test_documents_that_are_older_than_the_root(
    first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load asks for all documents at once. The root's answer comes last, after an overwrite."""
    moments = []
    save(0)
    for version, (work, change) in enumerate((SAVES[first], SAVES[last]), 1):
        work(version)
        moments.append(change(WatchedFileSystem.store))
    put_back(moments[0])
    others, read, new = threading.Semaphore(0), WatchedFileSystem.cat_file, threading.Event()

    def cat_file(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith("/c/zarr.json") and not new.is_set():
            for _ in range(2):
                assert others.acquire(timeout=60)
            put_back(moments[1])
            new.set()
        try:
            return read(self, path, *args, **kwargs)
        finally:
            others.release()

    monkeypatch.setattr(WatchedFileSystem, "cat_file", cat_file)
    w0 = ShardedTensor.from_rank_offsets("w0", torch.zeros(6, 8))
    loaded = shardstore.load({"w0": w0}, PLACE)
    assert new.is_set()
    assert loaded["step"] == 2
    assert (loaded["w0"] == 20).all()


@pytest.mark.parametrize("each", [16, pytest.param(4, marks=pytest.mark.long)])
def test_a_reader_on_s3_gets_one_checkpoint(s3_server: S3Server, each: int) -> None:
    """The same bytes in a bucket: readers that begin at a moment of an overwrite, and one that has
    opened the old checkpoint."""
    target = Location.of(f"s3://{s3_server.new_bucket()}/c", s3_server.storage_options)
    place, there = target.place, dict[str, bytes]()

    def put(objects: Objects) -> None:
        put_back(objects)  # what outcome() compares with
        new = {name.partition("/c/")[2]: data for name, data in contents().items()}
        target.remote.delete(sorted(set(there) - set(new)))
        for name in new:
            if there.get(name) != new[name]:
                target.write(name, new[name])
        there.clear()
        there.update(new)

    moments = states_of(lambda: save(2))
    for moment in [*moments[1:-1:each], moments[-1]]:
        put(moments[0])
        opened = shardstore.open(place)
        put(moment)
        for read in READERS:
            found = outcome(read, place)
            assert found in (0, 1, 2) if committed() else found is None, read
        with suppress(ReplacedError):
            assert (opened["w1"][:] == 11).all()
            assert opened.objects["o/shard_0_1"] == [1]
    assert found == 2
    with pytest.raises(ReplacedError):
        opened["w1"][:]
