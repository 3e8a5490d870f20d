"""When a run saves: the rules, what the ranks decide together, and signals."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore import CheckpointManager
from shardstore.errors import ArgumentError
from shardstore.manager.schedule import Notices, Schedule, Vote
from shardstore.progress import Progress
from tests.helpers.managed import restored, state_of

RECEIVED: list[int] = []


def earlier(number: int, frame: Any) -> None:
    """A handler that the program set before."""
    RECEIVED.append(number)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    RECEIVED.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, earlier)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


votes = st.lists(
    st.tuples(st.booleans(), st.none() | st.sampled_from(["SIGTERM", "spot"]), st.floats(0, 99)),
    min_size=1,
    max_size=5,
)


@given(
    st.integers(0, 40),
    votes,
    st.none() | st.integers(1, 9),
    st.none() | st.floats(0.5, 50),
    st.floats(0, 60),
    st.booleans(),
)
def test_a_step_is_saved_if_any_rule_says_so(
    step: int,
    said: list[tuple[bool, str | None, float]],
    every: int | None,
    every_s: float | None,
    since_s: float,
    continuous: bool,
) -> None:
    rules: dict[str, Any] = {"every": every, "every_s": every_s}
    rules["interval"] = "continuous" if continuous else None
    voted = dict(enumerate(Vote(step, *one) for one in said))
    answer = Schedule(**rules).decide(voted, since_s)
    ages = {age: notice for _, notice, age in said if notice is not None}
    by_number = every is not None and step % every == 0
    by_time = every_s is not None and since_s >= every_s
    idle = continuous and not any(busy for busy, _, _ in said)
    assert answer.saves == (bool(ages) or by_number or by_time or idle)
    if ages:
        assert answer.age_s == max(ages)
        assert answer.notice in {notice for _, notice, age in said if age == max(ages)}
    else:
        assert answer.notice is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "every=0 must be a whole number"),
        ({"every": 2.5}, "every=2.5"),
        ({"every_s": 0}, "every_s=0 must be a number above 0"),
        ({"every_s": float("inf")}, "every_s=inf"),
        ({"every_s": True}, "every_s=True"),
        ({"every_s": "5"}, "every_s='5'"),
        ({"grace_s": -1}, "grace_s=-1"),
        ({"interval": "always"}, "interval='always' must be 'continuous'"),
        ({"save_on_signal": [signal.SIGKILL]}, r"save_on_signal=\[.*SIGKILL.* must be .*Errno 22"),
        ({"save_on_signal": ["SIGTERM"]}, r"save_on_signal=\['SIGTERM'\] must be True, False or"),
        ({"save_on_signal": "TERM"}, "save_on_signal='TERM' must be True, False or signals"),
        ({"save_on_signal": None}, "save_on_signal=None must be True, False or signals"),
        ({"keep_for": 3600}, "keep_for=3600 must be a timedelta"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": True}, "keep_every=True"),
        ({"keep_if": 2}, "keep_if=2 must be a function"),
        ({"best": 2}, "metric"),
        ({"metric": "loss"}, "best"),
        ({"best": 1, "metric": "loss", "mode": "least"}, "mode='least'"),
        ({"prefix": "../"}, "prefix"),
        ({"prefix": ".step"}, "prefix"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        CheckpointManager(tmp_path, **options)
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_calls_that_no_rule_answers_are_errors(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ArgumentError, match=r"needs a rule: .*every="):
        manager.should_save(3)
    with pytest.raises(ArgumentError, match=r"request_save\('spot'\).*save_on_signal="):
        manager.request_save("spot")
    with pytest.raises(ArgumentError, match="step=-1"):
        CheckpointManager(tmp_path, every=2).should_save(-1)


def test_saves_by_time_and_whenever_the_last_is_done(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path, every_s=1e-9).should_save(1)
    timed = CheckpointManager(tmp_path / "timed", every_s=3600, every=10)
    assert [step for step in range(1, 31) if timed.should_save(step)] == [10, 20, 30]
    with CheckpointManager(tmp_path / "continuous", interval="continuous") as manager:
        assert manager.should_save(1)
        go = threading.Event()

        def progress(_: Progress) -> None:
            if threading.current_thread() is not threading.main_thread():
                go.wait(60)

        handle = manager.async_save(1, state_of(1), progress=progress)
        assert not manager.should_save(2)
        go.set()
        handle.result(60)
        assert manager.should_save(3)


def test_a_signal_asks_for_one_save_until_a_save_ended(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=100, save_on_signal=True) as manager:
        assert not manager.should_save(1)
        assert manager.notice is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(2)
        assert manager.should_save(3)  # nobody saved step 2
        manager.save(3, state_of(3))
        assert manager.notice == "SIGUSR1"
        assert not manager.should_save(4)
        assert manager.notice is None
        manager.request_save("the node will be reclaimed")
        assert manager.should_save(5)
        manager.async_save(5, state_of(5))
        assert not manager.should_save(6)
    assert RECEIVED == []
    os.kill(os.getpid(), signal.SIGUSR1)  # closed: the earlier handler has it again
    assert RECEIVED == [signal.SIGUSR1]


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_a_signal_during_a_save_is_told_at_the_next_step(tmp_path: Path, name: str) -> None:
    def progress(_: Progress) -> None:
        if not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    sent: list[int] = []
    with CheckpointManager(tmp_path, every=5, save_on_signal=True, grace_s=60) as manager:
        assert manager.should_save(5)
        if name == "save":
            manager.save(5, state_of(5), progress=progress)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            manager.async_save(5, state_of(5))
        assert manager.should_save(6)
        assert manager.notice == "SIGTERM"
        manager.save(6, state_of(6))
        assert not manager.should_save(7)
        assert manager.notice is None


@pytest.mark.parametrize("rules", [{"every": 5}, {"every_s": 1e-9}, {"interval": "continuous"}])
def test_a_step_that_is_there_is_not_asked_for_again(tmp_path: Path, rules: Any) -> None:
    """As by an evaluation after the save, which asks with the number of the last step."""
    with CheckpointManager(tmp_path, save_on_signal=True, **rules) as manager:
        assert manager.should_save(5)
        manager.save(5, state_of(5))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not manager.should_save(5)
        assert manager.notice == "SIGTERM"  # for the program to end
        assert manager.should_save(6)  # if it goes on
        handle = manager.async_save(6, {"w": torch.nn.Linear(2, 2).weight, "f": lambda: None})
        assert handle.exception() is not None
        manager.wait()
        manager.request_save("spot")
        assert manager.should_save(6)
    with CheckpointManager(tmp_path, save_on_signal=True, **rules) as manager:
        found = restored(manager, state_of(0))
        manager.request_save("spot")
        assert not manager.should_save(found.step)
        assert manager.should_save(found.step + 1)


def test_a_signal_is_never_lost_to_a_manager_that_is_gone(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path / "1", save_on_signal=True)
    second = CheckpointManager(tmp_path / "2", save_on_signal=[signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
    assert first.should_save(1)
    assert second.should_save(1)
    first.close()  # the other still waits for its signal, but not for this one
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert RECEIVED == [signal.SIGUSR1]
    del second
    gc.collect()
    os.kill(os.getpid(), signal.SIGTERM)
    assert RECEIVED == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is earlier


@pytest.mark.parametrize("before", [signal.SIG_DFL, lambda *_: None])
def test_a_signal_without_a_name_is_received(tmp_path: Path, before: Any) -> None:
    """As real-time signals, which a scheduler may be told to send."""
    number = signal.SIGRTMIN + 1
    kept = signal.signal(number, before)
    try:
        with CheckpointManager(tmp_path, save_on_signal=[number]) as manager:
            os.kill(os.getpid(), number)
            assert manager.should_save(1)
            assert manager.notice == f"signal {number}"
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, kept)


def test_a_signal_that_comes_at_once_is_received(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def and_send(number: int, handler: Any) -> Any:
        found = install(number, handler)
        os.kill(os.getpid(), number)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", and_send)
        notices = Notices([signal.SIGUSR1])
    assert notices.pending == "SIGUSR1"
    notices.close()
    assert signal.getsignal(signal.SIGUSR1) is earlier


def test_a_handler_that_took_the_signal_later_keeps_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, save_on_signal=True)
    later = signal.SIG_IGN
    signal.signal(signal.SIGTERM, later)
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is later
    assert signal.getsignal(signal.SIGUSR1) is earlier


def test_a_forked_child_ends_by_a_signal_as_before() -> None:
    """As the workers of a data loader, which are ended by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    notices = Notices([signal.SIGTERM])
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"x")
            threading.Event().wait(60)
        finally:
            os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.close(ready)
    os.close(write)
    assert notices.pending is None
    notices.close()


def test_another_thread_waits_for_requests_alone(tmp_path: Path) -> None:
    """As the function of a Ray worker, which does not run in the main thread."""
    found: list[Any] = []

    def work() -> None:
        try:
            CheckpointManager(tmp_path, save_on_signal=True)
        except ArgumentError as error:
            found.append(str(error))
        manager = CheckpointManager(tmp_path, save_on_signal=())
        manager.request_save("spot")
        found.append((manager.should_save(1), manager.notice))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    text, answer = found
    assert "main thread" in text
    assert "request_save()" in text
    assert answer == (True, "spot")
