"""Which steps are kept: retention's rules, and runs that went back to an earlier step."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore import CheckpointManager, latest
from shardstore.errors import CheckpointExistsError, NotACheckpointError, StorageError
from shardstore.manager.steps import Retention, StepInfo, Steps, branches
from shardstore.storage.stores.location import Location
from tests.helpers.managed import restored, state_of, wanted, warnings_of
from tests.helpers.users import another_user, folder_for_all


def deleting(monkeypatch: pytest.MonkeyPatch, method: str, root: Path, *steps: int) -> None:
    """Let another process delete a step after each of the first calls of a method of Steps."""
    called, left = getattr(Steps, method), list(steps)

    def then_deleted(one: Steps) -> Any:
        found = called(one)
        if left:
            shardstore.delete_checkpoint(root / f"step-{left.pop(0)}")
        return found

    monkeypatch.setattr(Steps, method, then_deleted)


def test_steps_that_are_deleted_after_they_were_listed_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        shardstore.save(state_of(step), tmp_path / f"step-{step}")
    deleting(monkeypatch, "committed", tmp_path, 1, 2, 4)
    assert [*Steps(Location.of(tmp_path), "step-").infos()] == [3]


def test_steps_that_are_deleted_during_a_restore_are_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    (tmp_path / "step-3/w/c.0.0").unlink()
    deleting(monkeypatch, "infos", tmp_path, 2)
    found = restored(manager, wanted()[0])
    assert (found.step, found.damaged) == (1, (3,))
    (text,) = warnings_of(caplog)
    assert "step 3" in text


def test_a_run_that_went_back_goes_on_from_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, data = wanted()
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for step in (100, 200, 300):
            manager.save(step, state_of(step))
        manager.wait(60)
        assert manager.steps() == [200, 300]
        assert warnings_of(caplog) == []
        restored(manager, state, 200)
        (text,) = warnings_of(caplog)
        assert "later steps" in text
        assert ": 300. " in text
        assert "loads step 300" in text
        assert "discard_later=True" in text
        for step in (210, 220):
            manager.save(step, state_of(step))
            assert manager.wait(60)
            assert step in manager.steps()
            assert (manager.latest(), CheckpointManager(tmp_path).latest()) == (step, step)
        assert "saved before it: 300." in warnings_of(caplog)[-1]
        assert len(warnings_of(caplog)) == 2
        # The line that the run is on counts, and what it left stays.
        assert manager.steps() == [210, 220, 300]
    again = CheckpointManager(tmp_path, keep_last=2)
    found = restored(again, state)
    assert (found.step, found.damaged) == (220, ())
    assert data.eq(220).all()
    assert "later steps" in warnings_of(caplog)[-1]
    assert "resumes" not in warnings_of(caplog)[-1]
    with pytest.raises(CheckpointExistsError):
        again.save(300, state_of(300))
    # From damage the run goes back along its own line.
    (tmp_path / "step-220/w/c.0.0").unlink()
    found = restored(CheckpointManager(tmp_path), state)
    assert (found.step, found.damaged) == (210, (220,))
    assert "resumes" not in warnings_of(caplog)[-1]
    # Once the run has come past what it left, that is one more old step.
    for step in (400, 500, 600):
        again.save(step, state_of(step))
    again.close()
    assert again.steps() == [500, 600]


def test_the_step_just_saved_after_going_back_stays(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1, keep_every=100) as manager:
        for step in (100, 200):
            manager.save(step, state_of(step))
        manager.restore(wanted()[0], 100)
        for step in (150, 160):
            manager.save(step, state_of(step))
            manager.wait(60)
            assert manager.latest() == step
        assert manager.steps() == [100, 160, 200]
        manager.save(200, state_of(7), overwrite=True)
        manager.wait(60)
        assert (manager.steps(), manager.latest()) == ([100, 200], 200)


def test_later_steps_are_discarded_if_asked(tmp_path: Path) -> None:
    state, data = wanted()
    manager = CheckpointManager(tmp_path, keep_last=4)
    for step in (1, 2, 3, 4):
        manager.save(step, state_of(step))
    manager.close()
    shardstore.save(state_of(9), tmp_path / "step-9")
    with pytest.raises(NotACheckpointError):
        manager.restore(state, 7, discard_later=True)
    assert manager.steps() == [1, 2, 3, 4, 9]
    assert restored(manager, state, 2, discard_later=True).step == 2
    assert data.eq(2).all()
    assert manager.steps() == [1, 2, 9]  # 9 is not the manager's
    manager.save(3, state_of(33))
    manager.close()
    restored(CheckpointManager(tmp_path), state, 3)
    assert data.eq(33).all()


def test_a_clock_that_went_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host whose clock is behind that of the one which ran before it."""
    CheckpointManager(tmp_path).save(100, state_of(100))
    CheckpointManager(tmp_path).save(200, state_of(200))
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        for step in (250, 300):
            manager.save(step, state_of(step))
    assert manager.steps() == [300]
    CheckpointManager(tmp_path).save(270, state_of(270))
    assert CheckpointManager(tmp_path).latest() == 270


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_step_that_cannot_be_deleted_keeps_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as another user's in a shared folder. The others would fill the disk."""
    root = folder_for_all(tmp_path / "run", 0o1777)
    manager = CheckpointManager(root, keep_last=2)
    manager.save(1, state_of(1))
    assert manager.wait(60)
    with another_user():
        for step in range(2, 7):
            manager.save(step, state_of(step))
            assert manager.wait(60)
    assert manager.steps() == [1, 5, 6]
    assert "step-1" in warnings_of(caplog)[-1]
    manager.save(7, state_of(7))
    assert manager.wait(60)
    assert manager.steps() == [6, 7]


def test_a_function_keeps_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, keep_last=1, keep_if=lambda step: step % 4 == 2) as manager:
        for step in range(1, 8):
            manager.save(step, state_of(step))
    assert manager.steps() == [2, 6, 7]
    with CheckpointManager(tmp_path, keep_last=1, keep_if=lambda step: {2: 1}[step]) as manager:
        manager.save(8, state_of(8))
    assert manager.steps() == [2, 6, 7, 8]
    (text,) = warnings_of(caplog)
    assert "keep_if(6) raised KeyError: 6; no step is deleted" in text


def test_a_wrong_clock_keeps_no_later_steps_and_deletes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later saves are ordered after it, a nanosecond apart; ``keep_for`` counts their own times."""
    far, hour = 2**62, 3600 * 10**9
    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda: far)
            manager.save(1, state_of(1))
        manager.save(2, state_of(2))
    infos = manager._steps.infos()
    assert [infos[step].saved for step in (1, 2)] == [far, far + 1]
    assert abs((infos[2].clock or 0) - time.time_ns()) < hour
    clocks = {1: far, 2: hour, 3: 4 * hour, 4: 5 * hour, 5: 5 * hour - 10**9}
    steps = {n: StepInfo(n, saved=far + n, clock=clock) for n, clock in clocks.items()}
    two_hours = Retention(keep_for=timedelta(hours=2))
    assert two_hours.kept(steps) == {1, 3, 4, 5}
    steps[6] = StepInfo(6, saved=far + 6, clock=hour)  # a clock that went back
    assert two_hours.kept(steps) == {*steps}


steps_and_losses = st.dictionaries(
    st.integers(0, 60), st.none() | st.floats(allow_nan=True, width=16), max_size=12
)
times = st.lists(st.none() | st.integers(0, 9), min_size=61, max_size=61)
limits = st.none() | st.integers(1, 5)


@given(steps_and_losses, times, limits, limits, limits, limits, st.sampled_from(["min", "max"]))
def test_retention_keeps_what_each_rule_says(
    losses: dict[int, float | None],
    saved: list[int | None],
    last: int | None,
    every: int | None,
    hours: int | None,
    best: int | None,
    mode: Any,
) -> None:
    policy = Retention(
        keep_last=last,
        keep_every=every,
        keep_for=hours and timedelta(hours=hours),
        best=best,
        metric=None if best is None else "loss",
        mode=mode,
    )
    hour = 3600 * 10**9
    steps = {
        step: StepInfo(
            step,
            metrics={} if loss is None else {"loss": loss},
            saved=None if (when := saved[step]) is None else when * hour,
        )
        for step, loss in losses.items()
    }
    kept = policy.kept(steps)
    newest_hour = max((saved[step] or 0 for step in steps), default=0)
    finite = {o: v for o, v in losses.items() if v is not None and math.isfinite(v)}
    sign = 1 if mode == "min" else -1
    best_first = sorted(finite, key=lambda step: (sign * finite[step], -step))
    assert set(sorted(steps)[-1:]) <= kept <= set(steps)
    for step in steps:
        when = saved[step]
        rules = [
            last is every is hours is best is None,
            hours is not None and when is not None and newest_hour - when <= hours,
            sum(other > step for other in steps) < (last or 1),
            every is not None and step % every == 0,
            best is not None and step in best_first[:best],
        ]
        assert (step in kept) == any(rules)


@given(st.lists(st.integers(0, 12), max_size=12))
def test_branches_are_told_by_the_order_of_the_saves(order: list[int]) -> None:
    """Against a plain model: a save of a step leaves all higher ones that are there."""
    left: dict[int, bool] = {}
    for step in order:
        left = {other: gone or other > step for other, gone in left.items()}
        left[step] = False
    infos = {step: StepInfo(step, saved=when) for when, step in enumerate(order)}
    current, abandoned = branches(infos)
    assert abandoned == sorted(step for step, gone in left.items() if gone)
    assert current == sorted(step for step, gone in left.items() if not gone)
    assert current[-1:] == order[-1:]
    assert branches({step: StepInfo(step) for step in order}) == (sorted(set(order)), [])


def test_a_step_that_cannot_be_read_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    """A run would resume from an older step, or begin anew. A link to itself is an error for
    every user, as is a folder without permission, or a stale handle, for some."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
    (tmp_path / "step-2").symlink_to("step-2")
    (tmp_path / "lost+found").symlink_to("lost+found")  # no step
    for work in (manager.steps, manager.latest, lambda: latest(tmp_path)):
        with pytest.raises(StorageError, match=r"step-2/.* failed: Too many levels"):
            work()
    (tmp_path / "step-2").unlink()
    assert manager.steps() == [1]
    assert latest(tmp_path) == str(tmp_path / "step-1")
    (tmp_path / "step-1").rename(tmp_path / "last")
    assert latest(tmp_path) == str(tmp_path / "last")
