"""Background calls: order, agreement between ranks, failures, with threads held by events."""

from __future__ import annotations

import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardstore.errors import CheckpointingException, RanksError
from shardstore.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)

WORLD = 3


def _request(log: list[str], name: str, gate: threading.Event | None = None) -> AsyncRequest:
    def work() -> None:
        if gate is not None:
            assert gate.wait(60)
        log.append(name)

    return AsyncRequest(work, (), [lambda: log.append(f"{name} final")])


def _fail() -> None:
    raise OSError("disk is full")


@pytest.mark.parametrize("persistent", [False, True])
def test_done_calls_are_finalised_in_order(persistent: bool) -> None:
    log: list[str] = []
    gate = threading.Event()
    queue = AsyncCallsQueue(persistent)
    assert queue.maybe_finalize_async_calls() == []
    assert queue.schedule_async_request(_request(log, "a", gate)) == 0
    assert queue.schedule_async_request(_request(log, "b")) == 1
    assert queue.maybe_finalize_async_calls() == [], "the first is held back, so is the second"
    assert queue.get_num_unfinalized_calls() == 2
    gate.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert [entry for entry in log if "final" in entry] == ["a final", "b final"]
    assert queue.schedule_async_request(_request(log, "c")) == 2
    queue.close()
    assert log[-2:] == ["c", "c final"]


@pytest.mark.parametrize("kind", [TemporalAsyncCaller, PersistentAsyncCaller])
def test_a_caller_runs_what_it_is_given_and_finalises_nothing(kind: type[AsyncCaller]) -> None:
    log: list[str] = []
    gate = threading.Event()
    caller = kind()
    caller.schedule_async_call(_request(log, "a", gate))
    assert not caller.is_current_async_call_done(blocking=False, no_dist=True)
    assert not caller.sync_all_async_calls(is_alive=1)
    gate.set()
    assert caller.is_current_async_call_done(blocking=True, no_dist=False)
    assert log == ["a"]
    caller.close()


def test_work_is_done_in_another_thread_of_this_process() -> None:
    seen: list[threading.Thread] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        AsyncRequest(
            lambda: seen.append(threading.current_thread()),
            (),
            [lambda: seen.append(threading.current_thread())],
        )
    )
    queue.close()
    assert seen[0] is not threading.current_thread()
    assert seen[1] is threading.current_thread()


@pytest.mark.parametrize("how", ["sync", "queue"])
def test_preloaded_data_takes_the_second_place(how: str) -> None:
    seen: list[Any] = []
    threads: list[threading.Thread] = []

    def preload() -> str:
        threads.append(threading.current_thread())
        return "staged"

    request = AsyncRequest(
        lambda *args, **kwargs: seen.append((args, kwargs)), (1, None, 3), [], {"k": 4}, preload
    )
    if how == "sync":
        request.execute_sync()
    else:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(request)
        assert threads == [threading.current_thread()], "staged when scheduling returns"
        queue.close()
    assert seen == [((1, "staged", 3), {"k": 4})]


def test_frozen_when_scheduled() -> None:
    request = AsyncRequest(None, (), [])
    request.add_finalize_fn(lambda: None)
    assert len(request.finalize_fns) == 1
    frozen = request.freeze()
    assert not request.is_frozen
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(lambda: None)


def test_a_request_of_another_class_is_finalised_in_the_same_way() -> None:
    """It has the fields of a request, and no methods."""
    log: list[str] = []
    kind = namedtuple("kind", AsyncRequest._fields)
    queue = AsyncCallsQueue()
    queue.schedule_async_request(kind(*_request(log, "a")))  # type: ignore[arg-type]
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert log == ["a", "a final"]


def test_failure_surfaces_at_the_poll_and_the_next_call_goes_on() -> None:
    log: list[str] = []
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(_fail, (), [lambda: log.append("never")]))
    queue.schedule_async_request(_request(log, "next"))
    with pytest.raises(RanksError, match=r"rank 0: OSError: disk is full") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value.__cause__, OSError)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == ["next", "next final"]


def test_failure_of_preload_surfaces_at_the_poll() -> None:
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(print, (1, 2), [], preload_fn=_fail))
    with pytest.raises(CheckpointingException, match="disk is full"):
        queue.maybe_finalize_async_calls()
    queue.schedule_async_request(AsyncRequest(print, (1,), [], preload_fn=lambda: 3))
    with pytest.raises(CheckpointingException, match="at least two"):
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0


def test_failure_at_close_still_finalises_the_others() -> None:
    log: list[str] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(_fail, (), []))
    queue.schedule_async_request(_request(log, "b"))
    with pytest.raises(RanksError, match="disk is full"):
        queue.close()
    assert log == ["b", "b final"]


def test_abort_finalises_nothing() -> None:
    log: list[str] = []
    gate = threading.Event()
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(_request(log, "running", gate))
    queue.schedule_async_request(_request(log, "waiting"))
    queue.close(abort=True)
    gate.set()
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert not any("final" in entry for entry in log)


def calls_are_finalised_only_when_done_on_all_ranks(rank: int, folder: Path) -> None:
    gate = threading.Event()
    log: list[str] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_request(log, "a", gate if rank == 1 else None))
    for _ in range(3):
        assert queue.maybe_finalize_async_calls() == []
    assert "a final" not in log
    gate.set()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()


def a_failure_on_one_rank_surfaces_on_all(rank: int, folder: Path) -> None:
    log: list[str] = []

    def work(bad: int) -> None:
        if rank == bad:
            raise OSError(f"rank {bad} has no space left")
        log.append("written")

    def final() -> None:
        if rank == 0:
            raise ValueError("no commit")

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(work, (1,), [lambda: log.append("final")]))
    queue.schedule_async_request(AsyncRequest(work, (-1,), [final]))
    queue.schedule_async_request(AsyncRequest(work, (-1,), [lambda: log.append("third final")]))
    with pytest.raises(RanksError, match="rank 1: OSError: rank 1 has no space left") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert list(caught.value.failures) == [1]
    with pytest.raises(RanksError, match="rank 0: ValueError: no commit"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    with pytest.raises(RanksError, match="rank 2: OSError: rank 2 has no space left"):
        AsyncRequest(work, (2,), [lambda: log.append("final")]).execute_sync()
    assert [entry for entry in log if "final" in entry] == ["third final"]


def ranks_that_poll_different_calls_are_told(rank: int, folder: Path) -> None:
    queue = AsyncCallsQueue()
    if rank == 0:
        queue.call_idx += 1
    queue.schedule_async_request(AsyncRequest(None, (), []))
    told = f"different asynchronous calls: rank {rank} polls call {int(rank == 0)}, others"
    with pytest.raises(RanksError, match=told):
        queue.maybe_finalize_async_calls()


def a_poll_makes_one_reduction_and_none_with_no_dist(rank: int, folder: Path) -> None:
    count = 0
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    gate = threading.Event()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_request([], "a", gate))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        queue.maybe_finalize_async_calls()
        assert count == 1
        queue.maybe_finalize_async_calls(no_dist=True)
        assert count == 1
    gate.set()
    queue.close()


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
