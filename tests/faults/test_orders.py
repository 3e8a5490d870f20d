"""Several writers and readers of one place, in every order of their requests.

Each actor is a thread; before each request to the store it waits for its turn, which a scheduler
gives. An order is a text: the actors, and either the moments at which the turn passes from one to
another although it could go on, or a seed. A failure names its order, and ``SHARDSTORE_ORDER=...``
runs that one alone.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from shardstore.errors import CheckpointingException, DamagedCheckpointError, NotACheckpointError
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint
from shardstore.storage.commit import checkpoints, folder
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.commit.publish import RootContent, publish, put_chunks
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.movers import files
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.files import read_chunk_files
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime import parallel
from shardstore.storage.stores.location import Location
from tests.faults.test_crash_at_every_request import MortalFileSystem

PAIRS = [
    ("save2", "save3"),
    ("save2", "delete"),
    ("save2", "sweep"),
    ("delete", "sweep"),
    ("save2", "read"),
    ("delete", "read"),
]
ALL = ("save2", "save3", "delete", "sweep", "read")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "open")
_now: list[Scheduler] = []


class Scheduler:
    """Gives one actor at a time its turn.

    Args:
        order: the actors, and who goes on when, as the module says.
    """

    def __init__(self, order: str) -> None:
        names, kind, rest = order.split("|")
        self.actors = names.split(",")
        self.chance = random.Random(int(rest)) if kind == "seed" else None
        switches = [s.split(":") for s in rest.split(",")] if kind == "at" and rest else []
        self.switches = {int(moment): int(number) for moment, number in switches}
        self.clock = 0.0
        self.moment = 0
        self.waiting = list(self.actors)
        self.turn: str | None = None
        self.changed = threading.Condition()

    def run(self, works: dict[str, Callable[[], object]]) -> dict[str, object]:
        """What each actor returned, or raised."""
        outcomes: dict[str, object] = {}

        def act(name: str) -> None:
            try:
                self._wait(name)
                outcomes[name] = works[name]()
            except BaseException as error:
                outcomes[name] = error
            finally:
                with self.changed:
                    self.waiting.remove(name)
                    self._next(None)

        threads = [threading.Thread(target=act, args=(n,), name=n) for n in self.actors]
        _now[:] = [self]
        for thread in threads:
            thread.start()
        with self.changed:
            self._next(None)
        for thread in threads:
            thread.join(60)
        _now.clear()
        assert not any(thread.is_alive() for thread in threads), "an actor waits for ever"
        return outcomes

    def step(self, *, asleep: bool = False) -> None:
        """Called by an actor before each request; ``asleep``: it waits for another one."""
        name = threading.current_thread().name
        if name in self.waiting:
            with self.changed:
                self._next(name, asleep=asleep)
            self._wait(name)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.step(asleep=True)

    def _next(self, name: str | None, *, asleep: bool = False) -> None:
        others = [actor for actor in self.waiting if actor != name]
        if self.chance is not None:
            goes_on = self.chance.random() < 0.7 and not asleep
            stays = name is not None and (not others or goes_on)
            self.turn = name if stays else self.chance.choice(others or [None])
        elif self.moment in self.switches and others:
            self.turn = others[self.switches[self.moment] % len(others)]
        else:
            self.turn = name if name is not None and not (asleep and others) else None
            if self.turn is None and others:
                after = [a for a in others if name and others.index(a) >= self._place(name)]
                self.turn = (after or others)[0]
        self.moment += 1
        self.changed.notify_all()

    def _place(self, name: str) -> int:
        return sum(actor in self.waiting for actor in self.actors[: self.actors.index(name)])

    def _wait(self, name: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == name, 60)


def step() -> None:
    if _now:
        _now[0].step()


class OrderedFileSystem(MortalFileSystem):
    """A store in memory each of whose requests is done as a whole, in its turn."""

    protocol = "orders"
    store: ClassVar[dict[str, Any]] = {}
    request = staticmethod(step)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    # Elsewhere nobody waits: a module's import would hold up the others, with its lock.
    if _now and event in CHANGES and "/run" in str(arguments[0]):
        step()


@pytest.fixture(autouse=True)
def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of an actor's requests come from its own thread, and nobody sleeps."""

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    exchange = folder._exchange

    def exchanged(*paths: str) -> None:
        step()
        exchange(*paths)

    def read(requests: list[Any]) -> list[Any]:
        found = []
        for request in requests:
            step()
            found += read_chunk_files([request])
        return found

    def clock() -> float:
        return _now[0].clock if _now else 0.0

    def sleep(seconds: float) -> None:
        if _now:
            _now[0].sleep(seconds)

    monkeypatch.setattr(parallel, "threading", SimpleNamespace(Thread=NoThread))
    monkeypatch.setattr(object_commit, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    # Nobody is held up for longer: what comes then no store can prevent, see PROTOCOL.md.
    monkeypatch.setattr(object_commit, "SETTLE_S", 100.0)
    monkeypatch.setattr(folder, "_exchange", exchanged)
    monkeypatch.setattr(files, "read_chunk_files", read)
    fsspec.register_implementation("orders", OrderedFileSystem, clobber=True)
    global _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True


_hooked = False


def save(place: Location, version: int) -> int:
    """A small checkpoint, written as every save writes it."""
    options = SaveOptions(overwrite=True, durable=False, threads=1)
    attempt = checkpoints.begin(place, options)
    try:
        manifest, writes = RankManifest(0), []
        rows = {"w": 2, f"only{version}": 1}
        metas = [ArrayMeta(n, n, Grid((rows[n], 8), (1, 8)), "float32") for n in rows]
        for meta in metas:
            row = np.full((1, 8), version, np.float32)
            writes += [ChunkWrite(meta, (i, 0), row) for i in range(rows[meta.key])]
        put_chunks(attempt, options, manifest, [(meta, True) for meta in metas], writes)
        publish(attempt, options, [manifest], RootContent(common_backend=("json", 1)))
    except BaseException:
        attempt.abandon()
        raise
    return version


def read(place: Location) -> int | None:
    """The version that is there, whole; ``None``: there is none, or it was replaced meanwhile."""
    stored = StoredCheckpoint(place)
    try:
        with stored.unless_replaced():
            stored.require()
            if stored.root is None:
                return None
            meta = stored.arrays["w"]
            out = np.zeros((2, 8), np.float32)
            stored.read([RegionRead(meta, Box((0, 0), (2, 8)), out)])
    except (NotACheckpointError, ReplacedError):
        return None
    except DamagedCheckpointError as error:
        # A save in an object store puts metadata.json first, and a sweep may have taken its claim.
        if place.is_local or "that was interrupted or still runs" not in error.message:
            raise
        return None
    version = int(out[0, 0])
    assert (out == version).all(), out
    assert set(stored.arrays) == {"w", f"only{version}"}
    return version


def run(order: str, place: Location) -> int:
    """Run an order and check what comes of it; the number of its moments."""
    save(place, 1)
    parent = Location.of(place.url.rpartition("/")[0], place.options)
    works: dict[str, Callable[[], object]] = {
        "save2": lambda: save(place, 2),
        "save3": lambda: save(place, 3),
        "delete": lambda: checkpoints.delete_checkpoint(place),
        "sweep": lambda: checkpoints.sweep(parent, dry_run=False, older_than=timedelta(0)),
        "read": lambda: read(place),
    }
    scheduler = Scheduler(order)
    outcomes = scheduler.run(works)
    for name, outcome in outcomes.items():
        if isinstance(outcome, BaseException) and not isinstance(outcome, CheckpointingException):
            raise outcome
        assert name not in ("read", "sweep") or not isinstance(outcome, BaseException), outcome
    there = read(place)
    won = {outcomes[name] for name in ("save2", "save3") if name in outcomes} & {2, 3}
    deleted = "delete" in outcomes and not isinstance(outcomes["delete"], BaseException)
    assert there in won or (there is None and (deleted or not won)) or (there == 1 and not won), (
        there,
        outcomes,
    )
    if there is None and not deleted:
        assert {"sweep", "delete"} & outcomes.keys(), outcomes
    if {"sweep", "delete"}.isdisjoint(outcomes) and {"save2", "save3"} & outcomes.keys():
        assert won, outcomes  # of several saves the newest goes on
    save(place, 9)
    assert read(place) == 9
    if place.is_local:
        assert os.listdir(parent.url) == [place.name]
        found = (path for path in place.path.rglob("*") if path.is_file())
        names = sorted(str(path.relative_to(place.url)) for path in found)
    else:
        names = place.remote.walk()
    arrays = ["only9/c.0.0", "only9/zarr.json", "w/c.0.0", "w/c.1.0", "w/zarr.json"]
    assert names == sorted([*arrays, "manifest.npz", "metadata.json", "zarr.json"]), names
    return scheduler.moment


def checked(order: str, store: str, tmp_path: Path) -> int:
    try:
        if store == "local":
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            (tmp_path / "run").mkdir()
            return run(order, Location.of(tmp_path / "run" / "c"))
        OrderedFileSystem.store.clear()
        OrderedFileSystem.pseudo_dirs[:] = [""]
        return run(order, Location.of("orders://run/c"))
    except BaseException as error:
        error.add_note(f"again: SHARDSTORE_ORDER='{store} {order}'")
        raise


def preempted(actors: tuple[str, ...], length: int, most: int) -> Iterator[str]:
    """Every order in which the turn passes at most so often from one that could go on."""
    names, others = ",".join(actors), range(len(actors) - 1)
    for count in range(1, most + 1):
        for moments in combinations(range(length), count):
            for number in others:
                yield f"{names}|at|{','.join(f'{moment}:{number}' for moment in moments)}"


STORES = ["local", "memory"]


@pytest.mark.skipif("SHARDSTORE_ORDER" in os.environ, reason="one order is asked for")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("actors", PAIRS, ids="-".join)
@pytest.mark.parametrize("store", STORES)
def test_every_order_of_two(tmp_path: Path, store: str, actors: tuple[str, ...], most: int) -> None:
    is_long = os.environ.get("SHARDSTORE_TESTS") == "all"
    for pair in (actors, actors[::-1]) if is_long else (actors,):
        length = checked(f"{','.join(pair)}|at|", store, tmp_path)
        assert length > 20
        for order in preempted(pair, length, most):
            checked(order, store, tmp_path)


@pytest.mark.skipif("SHARDSTORE_ORDER" in os.environ, reason="one order is asked for")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("runs", [30, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("store", STORES)
def test_random_orders_of_all(tmp_path: Path, store: str, runs: int) -> None:
    for seed in range(runs):
        checked(f"{','.join(ALL)}|seed|{seed}", store, tmp_path)


@pytest.mark.skipif("SHARDSTORE_ORDER" not in os.environ, reason="no order is asked for")
def test_the_order_that_the_environment_names_holds(tmp_path: Path) -> None:
    store, order = os.environ["SHARDSTORE_ORDER"].split(" ", 1)
    checked(order, store, tmp_path)
