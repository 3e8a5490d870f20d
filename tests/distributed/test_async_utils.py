"""Background calls: order, agreement between ranks, failures, with threads held by events."""

from __future__ import annotations

import threading
from collections import namedtuple
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
from tests.helpers.ranks_helper import run_ranks


def _request(log: list[str], name: str, gate: threading.Event | None = None) -> AsyncRequest:
    def work() -> None:
        if gate is not None:
            assert gate.wait(60)
        log.append(name)

    return AsyncRequest(work, (), [lambda: log.append(f"{name} final")])


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

    def fail() -> None:
        raise OSError("disk is full")

    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(fail, (), [lambda: log.append("never")]))
    queue.schedule_async_request(_request(log, "next"))
    with pytest.raises(RanksError, match=r"rank 0: OSError: disk is full") as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(caught.value.__cause__, OSError)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert log == ["next", "next final"]


def test_failure_of_preload_surfaces_at_the_poll() -> None:
    def fail() -> None:
        raise MemoryError("no room to stage")

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(print, (1, 2), [], preload_fn=fail))
    with pytest.raises(CheckpointingException, match="no room to stage"):
        queue.maybe_finalize_async_calls()
    queue.schedule_async_request(AsyncRequest(print, (1,), [], preload_fn=lambda: 3))
    with pytest.raises(CheckpointingException, match="at least two"):
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0


def test_failure_at_close_still_finalises_the_others() -> None:
    log: list[str] = []

    def fail() -> None:
        raise OSError("disk is full")

    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(fail, (), []))
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


def _wait_for_the_slowest(rank: int, world_size: int) -> list[list[int]]:
    gate = threading.Event()
    log: list[str] = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_request(log, "a", gate if rank == 1 else None))
    polls = [queue.maybe_finalize_async_calls() for _ in range(3)]
    assert "a final" not in log
    if rank == 1:
        gate.set()
    polls.append(queue.maybe_finalize_async_calls(blocking=True))
    queue.close()
    return polls


def _all(rank: int, world_size: int) -> tuple[Any, ...]:
    return (
        _wait_for_the_slowest(rank, world_size),
        _fail_on_one(rank, world_size),
        _different_calls(rank, world_size),
        _reductions(rank, world_size),
    )


@pytest.fixture(scope="module")
def told() -> list[Any]:
    """What three ranks found, by what they tried."""
    return list(zip(*run_ranks(_all, 3), strict=True))


def test_finalised_only_when_done_on_all_ranks(told: list[Any]) -> None:
    assert list(told[0]) == [[[], [], [], [0]]] * 3


def _fail_on_one(rank: int, world_size: int) -> tuple[str, list[str], list[str]]:
    log: list[str] = []

    def work(bad: int) -> None:
        if rank == bad:
            raise OSError(f"rank {bad} has no space left")
        log.append("written")

    def final() -> None:
        if rank == 0:
            raise ValueError("no commit")

    texts = []
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(work, (1,), [lambda: log.append("final")]))
    queue.schedule_async_request(AsyncRequest(work, (-1,), [final]))
    queue.schedule_async_request(AsyncRequest(work, (-1,), [lambda: log.append("third final")]))
    for _ in range(2):
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except RanksError as error:
            texts.append(f"{sorted(error.failures)} {error}")
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    try:
        AsyncRequest(work, (2,), [lambda: log.append("final")]).execute_sync()
    except RanksError as error:
        texts.append(str(error))
    return texts[0], texts[1:], [entry for entry in log if "final" in entry]


def test_failure_on_one_rank_surfaces_on_all(told: list[Any]) -> None:
    for background, others, finals in told[1]:
        assert background.startswith("[1] ")
        assert "rank 1: OSError: rank 1 has no space left" in background
        assert "rank 0: ValueError: no commit" in others[0]
        assert "rank 2: OSError: rank 2 has no space left" in others[1]
        assert finals == ["third final"]


def _different_calls(rank: int, world_size: int) -> str:
    queue = AsyncCallsQueue()
    if rank == 0:
        queue.call_idx += 1
    queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises(RanksError, match="different") as caught:
        queue.maybe_finalize_async_calls()
    return str(caught.value)


def test_ranks_that_poll_different_calls_are_told(told: list[Any]) -> None:
    assert "call 1" in told[2][0]


def _reductions(rank: int, world_size: int) -> int:
    count = 0
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    gate = threading.Event()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(_request([], "a", gate))
    queue.maybe_finalize_async_calls()
    polled = count
    queue.maybe_finalize_async_calls(no_dist=True)
    assert count == polled
    gate.set()
    queue.close()
    return polled


def test_a_poll_makes_one_reduction_and_none_with_no_dist(told: list[Any]) -> None:
    assert list(told[3]) == [1, 1, 1]
