"""Asynchronous saves on real ranks: what is saved is the state at the call, all ranks commit or
none does, and everybody learns why."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import async_handle
from shardstore.convert import convert
from shardstore.dcp import StorageReader
from shardstore.distributed import coordinator as ranks
from shardstore.errors import CheckpointingException, RanksError, SaveInProgressError, StorageError
from shardstore.mapping import ShardedStateDict, ShardedTensor
from shardstore.storage.commit.folder import FolderAttempt
from shardstore.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.programs import run_forked
from tests.helpers.ranks_helper import RankFailed, run_ranks
from tests.helpers.scenarios import files_at_most, raised, remains, remains_of_all
from tests.helpers.spoilt_states import WHOLE, check, save_later, spoil, state_of

WORLD = 3
TORCH_DIST: dict[str, Any] = {"sharded_strategy": ("torch_dist", 1)}
WAYS: tuple[dict[str, Any], ...] = ({}, {"staging_budget_bytes": 8192}, TORCH_DIST)


class Gated(ZarrSaveShardedStrategy):
    """Writes once a gate is opened."""

    def __init__(self) -> None:
        super().__init__("zarr", 2)
        self.gate = threading.Event()

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        write = request.async_fn

        def after_gate() -> None:
            assert self.gate.wait(60)
            write()

        return request._replace(async_fn=after_gate)


def the_state_at_the_call_is_saved(rank: int, world_size: int, folder: Path) -> None:
    """Or the state at the end of wait_staged(), if the copying overlaps."""
    ways = product([*WAYS, {"validate_access_integrity": False}], (False, True))
    for number, (options, overlaps) in enumerate(ways):
        state, tensors = state_of(rank, world_size)
        place = folder / f"c{number}"
        handle = shardstore.async_save(state, place, overlap_staging=overlaps, **options)
        assert not overlaps or handle.wait_staged(60)
        spoil(tensors)
        record = handle.result(60)
        assert handle.done()
        assert handle.exception() is None
        if options is not TORCH_DIST:
            assert record["world_size"] == world_size
            assert record["stored_bytes"] >= 2 * WHOLE.nbytes + WHOLE.nbytes // 2
            root = json.loads((place / "zarr.json").read_text())
            assert root["attributes"]["shardstore"]["commit"] == record
        check(place)


def a_request_commits_where_the_trainer_polls(rank: int, world_size: int, folder: Path) -> None:
    queue = AsyncCallsQueue()
    for number, options in enumerate(WAYS):
        state, tensors = state_of(rank, world_size)
        place = folder / f"c{number}"
        request = shardstore.save(state, place, async_sharded_save=True, **options)
        spoil(tensors)
        assert isinstance(request, AsyncRequest)
        queue.schedule_async_request(request)
    dist.barrier()
    assert [name for name in remains(folder) if not name.startswith(".")] == []
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert remains(folder) == ["c0", "c1", "c2"]
    for name in remains(folder):
        check(folder / name)
    queue.close()


def the_strategy_alone_commits_arrays(rank: int, world_size: int, folder: Path) -> None:
    state, tensors = state_of(rank, world_size)
    only = {"rows": state["rows"]}
    request = ZarrSaveShardedStrategy("zarr", 2).async_save(only, folder / "c")
    spoil(tensors)
    request.execute_sync()
    import zarr

    assert (zarr.open_group(folder / "c", mode="r")["rows"][:] == WHOLE.numpy()).all()


def a_failed_write_reaches_every_rank_however_it_is_asked_for(rank: int, folder: Path) -> None:
    queue = AsyncCallsQueue()

    def by_handle(name: str = "c", **options: Any) -> None:
        save_later(folder / name, **options).result(60)

    def by_queue(**options: Any) -> None:
        state, _ = state_of(rank, WORLD)
        queue.schedule_async_request(
            shardstore.save(state, folder / "c", async_sharded_save=True, **options)
        )
        queue.maybe_finalize_async_calls(blocking=True)

    def at_once(**options: Any) -> None:
        shardstore.save(state_of(rank, WORLD)[0], folder / "c", **options)

    by_handle("before")  # ranks connect for the first save, by a store that is a file here
    for options, said in (({}, "file system"), (TORCH_DIST, "File too large")):
        for save in (by_handle, at_once, by_queue):
            with files_at_most(1000 if rank == 2 else resource.RLIM_INFINITY):
                error = raised(partial(save, **options))
                dist.barrier()
            assert said in str(error), error
            assert rank == 2 or "rank 2" in str(error), error
            if save is by_handle and not options:
                assert isinstance(error, StorageError if rank == 2 else RanksError)
                assert rank == 2 or list(error.failures) == [2]
                assert rank != 2 or error.key in ("rows", "flat", "object")
            assert str(folder) in str(error)
            assert remains_of_all(folder) == ["before"]
    assert isinstance(error, RanksError)
    by_queue()
    check(folder / "c")


class Staged(ZarrSaveShardedStrategy):
    """Copies in ``preload_fn``, writes in another function, and ends with a function of its own."""

    def __init__(self, fails_in: str = "") -> None:
        super().__init__("zarr", 2)
        self.fails_in = fails_in
        self.calls: list[tuple[str, int]] = []

    def call(self, name: str) -> str:
        self.calls.append((name, threading.get_ident()))
        if name == self.fails_in:
            raise OSError(f"{name} fails")
        return name

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        write = request.async_fn

        def after(_: object, preloaded: str | None) -> None:
            self.call(f"write after {preloaded}")
            write()

        ends = [*request.finalize_fns, lambda: self.call("end")]
        preload = lambda: self.call("preload")  # noqa: E731
        return AsyncRequest(after, (0, None), ends, preload_fn=preload)


def the_functions_of_another_strategy_are_called(rank: int, world_size: int, folder: Path) -> None:
    staged = Staged()
    handle = save_later(folder / "c", staged)
    assert staged.calls[0] == ("preload", threading.get_ident())
    handle.result(60)
    assert [name for name, _ in staged.calls] == ["preload", "write after preload", "end"]
    check(folder / "c")


def a_function_that_fails_on_one_rank_fails_the_save_on_all(rank: int, folder: Path) -> None:
    for name in ("preload", "end"):
        staged = Staged(name if rank == 1 else "")
        handle = save_later(folder / "c", staged)
        assert f"{name} fails" in str(handle.exception(60))
        assert remains_of_all(folder) == []


def wrong_input_of_one_rank_fails_on_all(rank: int, world_size: int, folder: Path) -> None:
    state, _ = state_of(rank, world_size)
    if rank == 1:
        state["rows"].axis_fragmentations = (5, 1)
    handle = shardstore.async_save(state, folder / "c")
    error = handle.exception(60)
    assert isinstance(error, CheckpointingException)
    assert "does not match axis_fragmentations" in str(error)
    budget = -1 if rank == 2 else None
    kind = ValueError if rank == 2 else RanksError
    with pytest.raises(kind, match="staging_budget_bytes=-1 must be"):
        save_later(folder / "c", staging_budget_bytes=budget)
    assert remains_of_all(folder) == []


def a_second_save_waits_or_is_refused(rank: int, world_size: int, folder: Path) -> None:
    gated = Gated()
    first = save_later(folder / "a", gated)
    if rank != 1:
        gated.gate.set()  # rank 1 holds the others up
    error = raised(lambda: save_later(folder / "b", when_busy="refuse"))
    assert isinstance(error, SaveInProgressError | RanksError)
    assert "still running" in str(error)
    assert not first.done()
    # Saves in the foreground have nothing to do with it.
    shardstore.save(state_of(rank, world_size)[0], folder / "now")
    check(folder / "now")
    gated.gate.set()
    second = save_later(folder / "b")
    assert first.done()
    second.result(60)
    check(folder / "a")
    check(folder / "b")


def a_save_to_the_same_place_waits_for_it(rank: int, world_size: int, folder: Path) -> None:
    """Else the older state would be committed last."""
    gated = Gated()
    state, tensors = state_of(rank, world_size)
    handle = shardstore.async_save(state, folder / "c", gated, overwrite=True)
    spoil(tensors)
    threading.Timer(0.5, gated.gate.set).start()
    shardstore.save({**state, "step": 8}, folder / "c", overwrite=True)
    assert handle.done()
    assert handle.exception() is None
    assert shardstore.load_common_state_dict(folder / "c")["step"] == 8


def loads_of_the_same_place_wait_for_it(rank: int, world_size: int, folder: Path) -> None:
    """Else they would return the older state, and a manager would restore an older step."""

    def by_dcp(place: Path) -> object:
        found = {"step": -1}
        dcp.load(found, storage_reader=StorageReader(place))
        return found["step"]

    ways: list[Callable[[Path], object]] = [
        lambda place: shardstore.load(state_of(rank, world_size)[0], place)["step"],
        lambda place: shardstore.load_common_state_dict(place)["step"],
        lambda place: shardstore.load_plain_tensors(place)["step"],
        lambda place: shardstore.open(place).common["step"],
        by_dcp,
    ]
    manager = shardstore.CheckpointManager(folder, prefix="c")
    # Each one replaces the first.
    for step, read in enumerate([lambda _: None, *ways]):
        gated = Gated()
        state, tensors = state_of(rank, world_size)
        state["step"] = step
        handle = manager.async_save(1, state, sharded_strategy=gated, overwrite=True)
        spoil(tensors)
        threading.Timer(0.3, gated.gate.set).start()
        if step:
            assert read(folder / "c1") == step
        else:
            restored = manager.restore(state_of(rank, world_size)[0])
            assert (restored.step, restored.state["step"]) == (1, 0)
        assert handle.done()
        assert handle.exception() is None
    manager.wait()


def test_conversions_and_deletions_wait_for_the_save_of_their_place(tmp_path: Path) -> None:
    to_model = partial(convert, target=tmp_path / "model", target_format="safetensors")
    for work in (to_model, shardstore.delete_checkpoint):
        gated, state = Gated(), {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
        handle = shardstore.async_save(state, tmp_path / "c", gated, overwrite=True)
        threading.Timer(0.3, gated.gate.set).start()
        work(tmp_path / "c")
        assert handle.exception() is None
    assert remains(tmp_path) == ["model"]


def an_aborted_save_leaves_nothing(rank: int, world_size: int, folder: Path) -> None:
    gated = Gated()
    handle = save_later(folder / "c", gated)
    if rank == 1:
        handle.abort()
    dist.barrier()
    gated.gate.set()
    error = handle.exception(60)
    assert isinstance(error, SaveInProgressError if rank == 1 else RanksError)
    assert "aborted before its commit" in str(error)
    assert raised(handle.result) is error
    assert remains_of_all(folder) == []
    save_later(folder / "c").result(60)
    check(folder / "c")


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


def _die_in_the_background(rank: int, world_size: int, folder: str) -> None:
    os.environ["SHARDSTORE_DEADLINE_S"] = "20"
    place = Path(folder, "c")
    save_later(place).result(60)
    gated = Gated()
    handle = save_later(place, gated, overwrite=True)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gated.gate.set()
    error = handle.exception(60)
    Path(folder, f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the group is beyond an orderly end


def test_a_rank_that_dies_in_the_background_is_named_to_all(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 died with exit code -9"):
        run_ranks(_die_in_the_background, WORLD, str(tmp_path))
    for rank in (0, 2):
        text = (tmp_path / f"{rank}.txt").read_text()
        assert text.startswith("RanksError: committing"), text
        assert "rank 1" in text
    check(tmp_path / "c")  # what was there is as it was
    assert remains(tmp_path) == ["0.txt", "2.txt", "c"]


def _commit_past_the_deadline(rank: int, world_size: int, folder: str) -> list[int]:
    """The coordinator commits for longer than the others wait; then another save. Returns how many
    channels each made."""
    os.environ["SHARDSTORE_DEADLINE_S"] = "6"
    ranks.GRACE_S = 0.1
    made: list[int] = []
    channel, commit = ranks.Channel, FolderAttempt.commit

    def noted(*args: Any, **kwargs: Any) -> Any:
        made[-1] += 1
        return channel(*args, **kwargs)

    def held(self: FolderAttempt, documents: Any, **options: Any) -> None:
        while not {"1.txt", "2.txt"}.issubset(remains(Path(folder))):
            time.sleep(0.01)
        commit(self, documents, **options)

    ranks.Channel = noted
    made.append(0)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(FolderAttempt, "commit", held)
        first = save_later(Path(folder, "a"))
        assert isinstance(first.exception(60), NoneType if rank == 0 else RanksError)
    Path(folder, f"{rank}.txt").touch()
    dist.barrier()
    for name in ("b", "c"):
        made.append(0)
        save_later(Path(folder, name)).result(60)
    return made


def test_a_save_after_one_whose_commit_took_too_long(tmp_path: Path) -> None:
    """Only the coordinator's connections look whole to it: all are made anew, once."""
    made = run_ranks(_commit_past_the_deadline, WORLD, str(tmp_path), timeout_s=60)
    assert made == [[2, 1, 0]] * WORLD
    for name in "abc":
        check(tmp_path / name)


def _refused_past_the_deadline(rank: int, world_size: int, folder: str) -> list[str]:
    """On all but the last rank the save before has failed, there it still runs."""
    os.environ["SHARDSTORE_DEADLINE_S"] = "4"
    gated = Gated()
    first = save_later(Path(folder, "a"), gated)
    if rank != world_size - 1:
        gated.gate.set()
        assert isinstance(first.exception(60), RanksError)
    dist.barrier()
    os.environ["SHARDSTORE_DEADLINE_S"] = "600"  # nobody waits for it
    place = Path(folder, "b")
    error = raised(lambda: save_later(place, when_busy="refuse"))
    gated.gate.set()
    assert isinstance(first.exception(60), CheckpointingException)
    save_later(place).result(60)
    check(place)
    return [type(error).__name__, str(error)]


def test_a_refused_save_after_one_that_ran_into_the_deadline(tmp_path: Path) -> None:
    """Who has lost the others does not wait for connections that these have not lost."""
    refused = run_ranks(_refused_past_the_deadline, WORLD, str(tmp_path))
    assert [name for name, _ in refused] == ["RanksError", "RanksError", "SaveInProgressError"]
    assert all("still running" in text for _, text in refused)


def _late_to_connect(rank: int, world_size: int, folder: str) -> str:
    os.environ["SHARDSTORE_DEADLINE_S"] = "2"
    ranks.GRACE_S = 0.1
    shardstore.save(state_of(rank, world_size)[0], Path(folder, "c"))
    if rank == 1:
        channel = ranks.Channel

        def late(*args: Any, **kwargs: Any) -> Any:
            while remains(Path(folder)) != ["0.txt", "2.txt", "c"]:
                time.sleep(0.01)
            return channel(*args, **kwargs)

        ranks.Channel = late
    error = raised(lambda: save_later(Path(folder, "c"), overwrite=True))
    Path(folder, f"{rank}.txt").touch()
    return f"{type(error).__name__}: {error}"


def test_a_rank_that_does_not_connect_for_the_background_is_an_error_on_all(tmp_path: Path) -> None:
    """It is after the agreement to begin: what the coordinator has begun is cleared away."""
    for text in run_ranks(_late_to_connect, WORLD, str(tmp_path), timeout_s=60):
        assert text.startswith("RanksError: connecting the ranks for the background failed")
        assert "rank 1: no answer (it did not come within 2 s)" in text
    check(tmp_path / "c")


EXITS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch, shardstore
from pathlib import Path
from shardstore.mapping import ShardedTensor
from shardstore.saving.session import session_of
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

exiting = threading.Event()

class Late(ZarrSaveShardedStrategy):
    "Writes when the interpreter exits, or once it is aborted."
    def async_save(self, state, place):
        session = session_of(place)
        request = super().async_save(state, place)
        def write():
            exiting.wait()
            # As asyncio does for the address of a host: pools must still take jobs.
            ThreadPoolExecutor(1).submit(int).result()
            while sys.argv[2] == "abort" and session.failure is None:
                threading.Event().wait(0.01)
            request.async_fn()
        return request._replace(async_fn=write)

w = ShardedTensor.from_rank_offsets("w", torch.arange(100000.0))
shardstore.async_save({"w": w}, Path(sys.argv[1], "c"), Late("zarr", 2), at_exit=sys.argv[2])
threading._register_atexit(exiting.set)  # the newest is called first
if sys.argv[3] == "signal":
    import os, signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
if sys.argv[3] == "exit":
    sys.exit(3)
if sys.argv[3] == "raise":
    raise RuntimeError("of the trainer")
"""


@pytest.mark.parametrize(
    ("at_exit", "ends"),
    [
        ("wait", "return"),
        ("wait", "raise"),
        ("wait", "signal"),
        ("abort", "exit"),
        ("abort", "raise"),
    ],
)
def test_interpreter_exit(tmp_path: Path, at_exit: str, ends: str) -> None:
    program, place = tmp_path / "program.py", tmp_path / "run"
    program.write_text(EXITS)
    place.mkdir()
    ended = run_forked(program, 1, {}, str(place), at_exit, ends)
    codes = {"return": 0, "exit": 3, "raise": 1, "signal": 3}
    assert ended.returncode == codes[ends], ended.stderr
    trace, _, _ = ended.stderr.partition("RuntimeError: of the trainer\n")
    if at_exit == "wait":
        assert ends == "raise" or ended.stderr == ""
        assert ended.stderr.removeprefix(trace) in ("", "RuntimeError: of the trainer\n")
        loaded = shardstore.load_plain_tensors(place / "c")
        assert torch.equal(loaded["w"], torch.arange(100000.0))
    else:
        assert "aborted before its commit" in ended.stderr
        assert ended.stderr.count("Traceback") == (1 if ends == "raise" else 0)
        assert remains(place) == []


def test_an_exiting_interpreter_waits_for_the_thread_that_frees_the_connections(
    tmp_path: Path,
) -> None:
    """It does so after the save, and gloo aborts the process if the interpreter ends meanwhile."""
    gated, freeing = Gated(), list[threading.Thread]()

    def free(_: object) -> None:
        freeing.append(threading.current_thread())
        time.sleep(0.5)

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(10.0))}
    handle = shardstore.async_save(state, tmp_path / "c", gated)
    handle._end.add_done_callback(free)
    gated.gate.set()
    async_handle._end_latest()
    assert not freeing[0].is_alive()


def test_waiting_for_a_handle_may_time_out(tmp_path: Path) -> None:
    gated = Gated()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(10.0))}
    handle = shardstore.async_save(state, tmp_path / "c", gated)
    assert not handle.wait(0)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="is still running after 0 s"):
        handle.result(0)
    gated.gate.set()
    handle.result(60)
