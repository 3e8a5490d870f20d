"""A manager and what it does to a place, in any order, against a dict of steps."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import shardstore
from shardstore import CheckpointManager, ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import FileSystemIO
from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.faults.test_crash_at_every_request import Killed, MortalFileSystem
from tests.helpers.deaths import dies

steps = st.integers(0, 5)
values = st.integers(1, 3)


def state(value: int) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((6, 8), float(value))),
        "frozen": ShardedTensor.from_rank_offsets("frozen", torch.arange(16.0)),
        f"only-{value}": ShardedTensor.from_rank_offsets(f"only-{value}", torch.ones(value)),
        "o": ShardedObject("o", {"value": value}, (1,), (0,)),
        "value": value,
    }


class Machine(RuleBasedStateMachine):
    """Steps of a manager; ``model`` has the value of each, in the order of their saves."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, int] = {}
        self.loaded: dict[int, tuple[object, int]] = {}
        """Step -> what its files were when it was loaded last, and its value."""
        self.options: dict[str, Any] = {}
        self.root = self.new_root()
        self.manager = CheckpointManager(self.root, storage_options=self.options or None)

    # -- what the places differ in ---------------------------------------------------------------

    replaces_at_once = False

    def new_root(self) -> str:
        raise NotImplementedError

    def killed(self, work: Callable[[], object], after: int) -> bool:
        raise NotImplementedError

    def files(self, step: int) -> object | None:
        """A value that changes with any change of a step's files; ``None`` if there is none."""
        return None

    # -- what is done ------------------------------------------------------------------------------

    @rule(step=steps, value=values, later=st.booleans(), base=steps, packed=st.booleans())
    def save(self, step: int, value: int, later: bool, base: int, packed: bool) -> None:
        self.do_save(step, value, later, base, packed)
        self.saved(step, value)

    def do_save(self, step: int, value: int, later: bool, base: int, packed: bool) -> None:
        options: dict[str, Any] = {"overwrite": True, "compression": "zstd" if packed else None}
        if base in self.model and base != step:
            options["base"] = self.manager.url(base)
        if later:
            self.manager.async_save(step, state(value), **options).result()
        else:
            self.manager.save(step, state(value), **options)
        self.manager.wait()

    def saved(self, step: int, value: int) -> None:
        self.model.pop(step, None)
        self.model[step] = value

    @rule(step=steps, value=values, later=st.booleans(), base=steps, after=st.integers(0, 60))
    def die_in_a_save(self, step: int, value: int, later: bool, base: int, after: int) -> None:
        if not self.killed(lambda: self.do_save(step, value, later, base, False), after):
            self.saved(step, value)
            return
        found = self.found(step)
        before = self.model.get(step)
        allowed = {before, value} if self.replaces_at_once else {before, value, None}
        assert found in allowed, (found, allowed)
        if found is None:
            self.model.pop(step, None)
        elif found != before:
            self.saved(step, value)
        elif before == value:
            # The value does not tell whether the old or the new one is there.
            self.save_plainly(step, value)

    def save_plainly(self, step: int, value: int) -> None:
        self.do_save(step, value, False, step, False)
        self.saved(step, value)

    @rule(nth=steps, after=st.integers(0, 20))
    def die_in_a_deletion(self, nth: int, after: int) -> None:
        step = self.existing(nth)
        url, options = self.manager.url(step), self.options or None
        self.killed(lambda: shardstore.delete_checkpoint(url, storage_options=options), after)
        if self.found(step) is None:
            del self.model[step]

    @rule(nth=steps)
    def delete(self, nth: int) -> None:
        step = self.existing(nth)
        shardstore.delete_checkpoint(self.manager.url(step), storage_options=self.options or None)
        del self.model[step]

    @rule()
    def sweep(self) -> None:
        for dry_run in (False, True):
            left = shardstore.sweep(
                self.root,
                older_than=timedelta(0),
                dry_run=dry_run,
                storage_options=self.options or None,
            )
        assert not left

    @rule()
    def restore(self) -> None:
        restored = self.manager.restore(self.asked())
        assert (restored and restored.step) == self.latest()
        if restored is not None:
            self.check(restored.state, self.model[restored.step])

    @rule(nth=steps, discard=st.booleans())
    def go_back(self, nth: int, discard: bool) -> None:
        step = self.existing(nth)
        restored = self.manager.restore(self.asked(), step=step, discard_later=discard)
        self.check(restored.state, self.model[step])
        if discard:
            self.model = {s: value for s, value in self.model.items() if s <= step}

    @rule(nth=steps, where=st.integers(0, 10**6), bit=st.integers(0, 7))
    def flip_a_byte(self, nth: int, where: int, bit: int) -> None:
        step = self.existing(nth)
        place = Location.of(self.manager.url(step), self.options)
        name = next(f"w/{name}" for name in place.listing("w") if name.startswith("c"))
        chunk = bytearray(place.read(name))
        chunk[where % len(chunk)] ^= 1 << bit
        place.delete(name)  # of other checkpoints that have the file too it is the same as before
        place.write(name, bytes(chunk))
        with pytest.raises(CheckpointingException) as caught:
            self.manager.restore(self.asked(), step=step)
        assert isinstance(caught.value, DamagedCheckpointError), caught.value
        value = self.model.pop(step)
        newest = self.latest()
        try:
            restored = self.manager.restore(self.asked())
        except DamagedCheckpointError:
            assert not self.model
        else:
            # Those that the damaged step came after are older than what it abandoned.
            assert restored.step in self.model
            self.check(restored.state, self.model[restored.step])
        self.save_plainly(step, value)
        assert newest is None or newest in self.model

    @rule(nth=steps)
    def convert(self, nth: int) -> None:
        step = self.existing(nth)
        target = f"{self.root}-converted/{uuid.uuid4().hex}"
        options = self.options or None
        source = self.manager.url(step)
        convert(source, target, source_options=options, target_options=options)
        loaded = shardstore.load_plain_tensors(target, storage_options=options)
        self.check(loaded, self.model[step])
        shardstore.delete_checkpoint(target, storage_options=options)

    # -- what is there -----------------------------------------------------------------------------

    @invariant()
    def every_step_is_there(self) -> None:
        assert self.manager.steps() == sorted(self.model)
        assert self.manager.latest() == self.latest()
        for step, value in self.model.items():
            assert self.content(step) == value

    def latest(self) -> int | None:
        """The newest, of the branch that was saved last."""
        branch: list[int] = []
        for step in self.model:
            branch = [*(other for other in branch if other < step), step]
        return branch[-1] if branch else None

    def existing(self, nth: int) -> int:
        """A step that is there. If there is none, save step ``nth`` first.

        A rule draws ``nth`` and not the step: threads decide what a killed process leaves, so the
        model of a repeated example can differ, and hypothesis allows no draw to depend on it.
        """
        if not self.model:
            self.save_plainly(nth, 1)
        there = sorted(self.model)
        return there[nth % len(there)]

    def found(self, step: int) -> int | None:
        return self.content(step) if step in self.manager.steps() else None

    def content(self, step: int) -> int:
        """The value of a step; loaded if its files changed since the last time."""
        files, url = self.files(step), self.manager.url(step)
        if files is None or self.loaded.get(step, (None, 0))[0] != files:
            loaded = shardstore.load_plain_tensors(url, storage_options=self.options or None)
            self.check(loaded, loaded["value"])
            self.loaded[step] = files, int(loaded["value"])
        return self.loaded[step][1]

    def asked(self) -> dict[str, Any]:
        everything = state(1)
        return {name: everything[name] for name in ("w", "frozen", "o")}

    def check(self, loaded: Any, value: int) -> None:
        assert loaded["value"] == value
        assert torch.equal(loaded["w"], torch.full((6, 8), float(value)))
        assert torch.equal(loaded["frozen"], torch.arange(16.0))
        assert loaded.get("o", {"value": value}) == {"value": value}
        assert [key for key in loaded if key.startswith("only-")] in ([], [f"only-{value}"])

    def teardown(self) -> None:
        self.manager.close()


class InMemory(Machine):
    """On a store in memory that lets no request through any more when it dies."""

    def new_root(self) -> str:
        MortalFileSystem.store.clear()
        MortalFileSystem.pseudo_dirs[:] = [""]
        return "mortal://runs"

    def killed(self, work: Callable[[], object], after: int) -> bool:
        MortalFileSystem.left = after
        try:
            with requests_at_a_time(8):
                work()
        except Killed:
            return True
        finally:
            MortalFileSystem.left = None
        return False

    def files(self, step: int) -> object:
        # A write puts a new object into the store.
        place = f"{self.manager.url(step).partition(':/')[2]}/"
        return {name: file for name, file in MortalFileSystem.store.items() if place in name}


class OnDisk(Machine):
    """In a folder; processes are killed at a call of the file system."""

    replaces_at_once = True

    def new_root(self) -> str:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        folder = os.environ.get("SHARDSTORE_MACHINE_DIR", memory)
        return os.path.join(tempfile.mkdtemp(prefix="machine-", dir=folder), "run")

    def killed(self, work: Callable[[], object], after: int) -> bool:
        return dies(work, after, self.root)

    def files(self, step: int) -> object:
        paths = [
            os.path.join(top, name)
            for top, _, names in os.walk(self.manager.url(step))
            for name in names
        ]
        return {
            path: (s.st_ino, s.st_ctime_ns, s.st_size) for path in paths for s in [os.stat(path)]
        }

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(Path(self.root).parent)


class OnS3(Machine):
    """In a bucket, behind a proxy; processes are killed at a request."""

    server: ClassVar[S3Server]
    proxy: ClassVar[FaultProxy]
    bucket: ClassVar[str]

    def new_root(self) -> str:
        self.options = self.server.at(self.proxy.endpoint_url).storage_options
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def killed(self, work: Callable[[], object], after: int) -> bool:
        return dies(work, after, self.root, self.proxy)


@contextmanager
def requests_at_a_time(count: int) -> Iterator[None]:
    """Of a store in memory. With one, nothing runs in other threads, which costs less."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("requests", "small_requests"):
            patch.setattr(FileSystemIO, name, count)
        yield


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(object_commit, "SETTLE_S", 0.0)
    fsspec.register_implementation("mortal", MortalFileSystem, clobber=True)
    logger = logging.getLogger("shardstore")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)


def run(machine: type[Machine], examples: int, count: int) -> None:
    chosen = settings(
        max_examples=int(os.environ.get("SHARDSTORE_MACHINE_EXAMPLES", examples)),
        stateful_step_count=int(os.environ.get("SHARDSTORE_MACHINE_STEPS", count)),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    if "SHARDSTORE_MACHINE_SEED" in os.environ:
        machine = seed(int(os.environ["SHARDSTORE_MACHINE_SEED"]))(machine)
    with requests_at_a_time(1):
        run_state_machine_as_test(machine, settings=chosen)


def test_any_order_of_operations_holds_in_memory() -> None:
    run(InMemory, 10, 15)


def test_any_order_of_operations_holds_on_disk() -> None:
    run(OnDisk, 5, 10)


def test_any_order_of_operations_holds_on_s3(s3_server: S3Server) -> None:
    on_s3(s3_server, 2, 8)


def on_s3(server: S3Server, examples: int, count: int) -> None:
    with FaultProxy(server.endpoint_url) as OnS3.proxy:
        OnS3.server, OnS3.bucket = server, server.new_bucket()
        run(OnS3, examples, count)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_long_orders_of_operations_hold_on_s3(s3_server: S3Server) -> None:
    on_s3(s3_server, 50, 50)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", [InMemory, OnDisk])
def test_long_orders_of_operations_hold(machine: type[Machine]) -> None:
    run(machine, 1000, 200)
