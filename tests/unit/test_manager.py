"""The checkpoint manager in a world of one: names, retention, damage, telemetry; on disk and S3."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from scripts.s3_servers import S3Server
from shardstore import CheckpointManager, ShardedTensor
from shardstore.branches import branches
from shardstore.errors import (
    CheckpointExistsError,
    DamagedCheckpointError,
    NotACheckpointError,
    ShapeMismatchError,
)
from shardstore.progress import Progress, bar
from shardstore.retention import Retention
from shardstore.storage.location import Location
from shardstore.storage.rank_record import MAX_COLUMNS_RANKS, RankRow, rank_record
from shardstore.storage.steps import Steps, what_is_missing

SIZE = (64, 32)


def state_of(value: float, shape: tuple[int, int] = SIZE) -> dict[str, Any]:
    data = torch.full(shape, float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", data), "iteration": value}


def wanted(shape: tuple[int, int] = SIZE) -> tuple[dict[str, Any], torch.Tensor]:
    data = torch.full(shape, -1.0)
    return {"w": ShardedTensor.from_rank_offsets("w", data)}, data


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A root and its storage options."""
    if request.param == "disk":
        return str(tmp_path / "run"), {}
    server: S3Server = request.getfixturevalue("s3_server")
    return f"s3://{server.new_bucket()}/run", server.storage_options


def managed(place: tuple[str, dict[str, Any]], **options: Any) -> CheckpointManager:
    return CheckpointManager(place[0], storage_options=place[1] or None, **options)


def damage(place: tuple[str, dict[str, Any]], name: str, data: bytes | None) -> None:
    """Replace a file of a checkpoint, or take it away."""
    root = Location.of(place[0], **place[1])
    if data is None:
        root.delete(name)
    else:
        root.write(name, data)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_saved_steps_are_restored(place: tuple[str, dict[str, Any]]) -> None:
    with managed(place) as manager:
        assert manager.latest() is None
        assert manager.restore(wanted()[0]) is None
        record = manager.save(2, state_of(2), metrics={"loss": 0.5})
        manager.save(10, state_of(10))
        assert record["stored_bytes"] == 64 * 32 * 4 + 4
        assert manager.steps() == [2, 10]
        assert manager.latest() == 10
        state, data = wanted()
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.damaged, restored.url) == (10, (), manager.url(10))
        assert restored.state["iteration"] == 10
        assert data.eq(10).all()
        restored = manager.restore(state, 2)
        assert restored is not None
        assert restored.step == 2
        assert data.eq(2).all()
        with pytest.raises(CheckpointExistsError):
            manager.save(10, state_of(11))
        manager.save(10, state_of(11), overwrite=True)
        assert managed(place).restore(state).step == 10  # type: ignore[union-attr]
        assert data.eq(11).all()
        with pytest.raises(NotACheckpointError, match=r"no step 3 .*2, 10"):
            manager.restore(state, 3)


def test_old_steps_go_and_others_folders_stay(place: tuple[str, dict[str, Any]]) -> None:
    root = Location.of(place[0], **place[1])
    with managed(place, keep_last=2, keep_every=40, best=1, metric="loss") as manager:
        # Somebody's own save, names that are almost ours, and a file.
        options = {"storage_options": place[1] or None}
        shardstore.save(state_of(1), f"{place[0]}/step-1", **options)
        shardstore.save(state_of(1), f"{place[0]}/step-010", **options)
        shardstore.save(state_of(1), f"{place[0]}/other-10", **options)
        root.write("notes.txt", b"mine")
        losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 9.0, 50: 8.0, 60: float("nan")}
        for step, loss in losses.items():
            manager.save(step, state_of(step), metrics={"loss": torch.tensor(loss)})
            assert manager.wait(60)
        assert manager.steps() == [1, 20, 40, 50, 60]
    names = ["notes.txt", "other-10", "step-010", "step-1"]
    assert root.listing() == [*names, "step-20", "step-40", "step-50", "step-60"]
    # Nothing but what is on the store tells another process the metrics, the NaN included.
    again = managed(place, keep_last=1, best=1, metric="loss", mode="max")
    again.save(70, state_of(70))
    again.close()
    assert again.steps() == [1, 40, 70]


def test_a_run_that_went_back_goes_on_from_there(
    place: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    state, data = wanted()
    with managed(place, keep_last=2) as manager:
        for step in (100, 200, 300):
            manager.save(step, state_of(step))
        manager.wait(60)
        assert manager.steps() == [200, 300]
        assert warnings_of(caplog) == []
        assert manager.restore(state, 200) is not None
        (text,) = warnings_of(caplog)
        assert "later steps" in text
        assert ": 300. " in text
        assert "resumes at step 300" in text
        assert "discard_later=True" in text
        for step in (210, 220):
            manager.save(step, state_of(step))
            assert manager.wait(60)
            assert step in manager.steps()
            assert (manager.latest(), managed(place).latest()) == (step, step)
        assert "saved before it: 300." in warnings_of(caplog)[-1]
        assert len(warnings_of(caplog)) == 2
        # The line that the run is on counts, and what it left stays.
        assert manager.steps() == [210, 220, 300]
    again = managed(place, keep_last=2)
    restored = again.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (220, ())
    assert data.eq(220).all()
    assert "later steps" in warnings_of(caplog)[-1]
    assert "resumes" not in warnings_of(caplog)[-1]
    with pytest.raises(CheckpointExistsError):
        again.save(300, state_of(300))
    # From damage the run goes back along its own line.
    damage(place, "step-220/w/c.0.0", None)
    restored = managed(place).restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (210, (220,))
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


def test_later_steps_are_discarded_if_asked(place: tuple[str, dict[str, Any]]) -> None:
    state, data = wanted()
    manager = managed(place, keep_last=4)
    for step in (1, 2, 3, 4):
        manager.save(step, state_of(step))
    manager.close()
    shardstore.save(state_of(9), f"{place[0]}/step-9", storage_options=place[1] or None)
    with pytest.raises(NotACheckpointError):
        manager.restore(state, 7, discard_later=True)
    assert manager.steps() == [1, 2, 3, 4, 9]
    assert manager.restore(state, 2, discard_later=True).step == 2  # type: ignore[union-attr]
    assert data.eq(2).all()
    assert manager.steps() == [1, 2, 9]  # 9 is not the manager's
    manager.save(3, state_of(33))
    manager.close()
    assert managed(place).restore(state, 3) is not None
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


def test_asynchronous_steps_are_retained_too(place: tuple[str, dict[str, Any]]) -> None:
    with managed(place, keep_last=1) as manager:
        for step in (1, 2, 3):
            state = state_of(step)
            handle = manager.async_save(step, state, metrics={"loss": step})
            state["w"].data.fill_(-7)
        assert handle.result(60)["stored_bytes"] > 0
        assert manager.wait(60)
        assert manager.steps() == [3]
        state, data = wanted()
        manager.restore(state)
        assert data.eq(3).all()


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("step-3/w/c.0.0", b"\0" * (64 * 32 * 4 + 4), "chunk (0, 0) of key 'w'"),
        ("step-3/w/c.0.0", None, "chunk (0, 0) of key 'w' is missing"),
        ("step-3/common.pt", None, "common.pt is missing"),
        ("step-3/common.pt", b"PK\3\4 no more", "common.pt"),
        ("step-3/zarr.json", b'{"zarr_format": 3, ', "zarr.json"),
        ("step-3/metadata.json", b"{", "metadata.json"),
    ],
)
def test_damage_is_passed_over_loudly(
    place: tuple[str, dict[str, Any]],
    name: str,
    data: bytes | None,
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = managed(place, keep_last=1, keep_every=1)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    manager.close()
    damage(place, name, data)
    state, tensor = wanted()
    restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (2, (3,))
    assert tensor.eq(2).all()
    assert restored.state["iteration"] == 2
    (text,) = warnings_of(caplog)
    assert "step 3" in text
    assert named in text
    # Training goes on from 2 and comes by 3 again, which takes the damaged one's place.
    manager.save(3, state_of(33))
    manager.close()
    restored = managed(place).restore(state)
    assert restored is not None
    assert (restored.step, restored.damaged) == (3, ())
    assert tensor.eq(33).all()


def test_verify_first_finds_what_no_rank_asks_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        other = ShardedTensor.from_rank_offsets("other", torch.ones(4))
        manager.save(step, {**state_of(step), "other": other})
    (tmp_path / "step-2/other/c.0").write_bytes(bytes(20))
    state, _ = wanted()
    assert manager.restore(state).step == 2  # type: ignore[union-attr]
    events: list[Progress] = []
    restored = manager.restore(state, verify_first=True, progress=events.append)
    assert restored is not None
    assert restored.step == 1
    assert "'other'" in warnings_of(caplog)[-1]
    assert [(e.operation, e.phase) for e in events if e.finished] == [
        ("verify", "failed"),
        ("verify", "done"),
        ("load", "done"),
    ]
    with pytest.raises(DamagedCheckpointError, match="'other'"):
        manager.restore(state, 2, verify_first=True)


def test_no_whole_step_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    for step in (1, 2):
        (tmp_path / f"step-{step}/w/c.0.0").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"step 2: .*step 1: "):
        manager.restore(wanted()[0])
    with pytest.raises(DamagedCheckpointError, match="missing"):
        manager.restore(wanted()[0], 2)


def test_what_is_no_damage_is_not_passed_over(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2, (8, 8)))
    with pytest.raises(ShapeMismatchError):
        manager.restore(wanted()[0])


def test_the_newest_whole_step_is_never_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that would be kept lost a chunk right after its commit."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state_of(1))
    manager.close()
    gate = threading.Event()
    manager._house.put(lambda: assert_set(gate))
    manager.save(2, state_of(2))
    (tmp_path / "step-2/w/c.0.0").write_bytes(b"short")
    gate.set()
    manager.close()
    assert manager.steps() == [1, 2]
    assert "has 5 bytes, not 8196" in warnings_of(caplog)[-1]
    manager.save(3, state_of(3))
    manager.close()
    assert manager.steps() == [3]


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_a_step_in_use_stays_until_it_is_not(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state_of(1))
    manager.close()
    seen: list[list[int]] = []

    def progress(event: Progress) -> None:
        if event.phase == "begin":  # while step 1 is being restored
            manager.save(2, state_of(2))
            manager.close()
            seen.append(manager.steps())

    state, data = wanted()
    manager.restore(state, 1, progress=progress)
    assert seen == [[1, 2]]
    assert data.eq(1).all()
    manager.save(3, state_of(3))
    manager.close()
    assert manager.steps() == [3]
    # A base is in use while a save is linked to it; the links hold when it is gone.
    manager.save(4, state_of(3), base=manager.url(3))
    manager.close()
    assert manager.steps() == [4]
    assert CheckpointManager(tmp_path).restore(state) is not None
    assert data.eq(3).all()


def test_deletion_goes_on_in_the_background(tmp_path: Path) -> None:
    """A save does not wait until old steps are gone."""
    manager = managed((str(tmp_path), {}), keep_last=1)
    go_on = threading.Event()
    manager._house.put(lambda: go_on.wait(60) and None)  # the background is busy with something
    try:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
        assert manager.steps() == [1, 2, 3]
    finally:
        go_on.set()
    assert manager.wait(60)
    assert manager.steps() == [3]


def test_equal_content_is_warned_about(
    place: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with managed(place) as manager:
        for step, value in ((1, 5), (2, 6), (3, 5)):
            state = state_of(value)
            state["iteration"] = step
            manager.save(step, state)
    (text,) = warnings_of(caplog)
    assert "step 3 is the same as in step 1" in text
    caplog.clear()
    with managed(place) as again:  # from the commits alone
        again.save(4, state_of(6))
        again.save(5, {"w": ShardedTensor.from_rank_offsets("v", torch.full(SIZE, 6.0))})
        again.save(6, state_of(6, (32, 64)))
    (text,) = warnings_of(caplog)
    assert "step 4 is the same as in step 2" in text


def test_a_removed_tensor_takes_the_digest_with_it(tmp_path: Path) -> None:
    extra = ShardedTensor.from_rank_offsets("extra", torch.ones(3))
    shardstore.save({**state_of(1), "extra": extra}, tmp_path / "step-1")
    shardstore.save(state_of(1), tmp_path / "step-2")
    steps = Steps(Location.of(tmp_path), "step-")
    assert steps.info(1).content not in (None, steps.info(2).content)
    shardstore.remove_sharded_tensors(tmp_path / "step-1", "extra")
    assert steps.info(1).content == steps.info(2).content
    assert what_is_missing(steps.place(1)) is None


DIES = """
import os, sys, torch, shardstore
from shardstore import ShardedTensor
from shardstore.storage import commit
name = sys.argv[2]
def die(*args, **kwargs):
    os._exit(9)
if name == "write":
    commit.FolderAttempt.commit = die
else:
    commit.remove_attempt = die
manager = shardstore.CheckpointManager(sys.argv[1], keep_last=1)
for step in (7, 8):
    manager.save(step, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8))})
    manager.close()
"""


@pytest.mark.parametrize("moment", ["write", "delete"])
def test_what_a_dead_process_left_is_swept(tmp_path: Path, moment: str) -> None:
    """A save killed before its commit; a deletion killed before its end."""
    root = tmp_path / "run"
    foreign = root / ".mine.attempt-1"
    foreign.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", DIES, str(root), moment], env=environment, check=False
    )
    assert ended.returncode == 9
    left = [name for name in os.listdir(root) if name.startswith(".step-7.attempt-")]
    assert len(left) == 1
    manager = CheckpointManager(root)
    manager.save(9, state_of(9))
    manager.close()
    steps = ["step-8", "step-9"] if moment == "delete" else ["step-9"]
    assert sorted(os.listdir(root)) == [".mine.attempt-1", *steps]


ENDS = """
import sys, torch, shardstore
from shardstore import ShardedTensor
manager = shardstore.CheckpointManager(sys.argv[1], keep_last=1)
for step, save in ((1, manager.save), (2, manager.async_save)):
    save(step, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8) * step)}, progress=print)
"""


def test_a_program_that_ends_leaves_nothing_undone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert os.listdir(tmp_path) == ["step-2"]
    assert ended.stdout.count("phase='done'") == 2
    assert ended.stderr == ""


def test_an_interrupted_save_to_a_store_is_swept(s3_server: S3Server) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    root = Location.of(url, **options)
    CheckpointManager(url, storage_options=options).save(1, state_of(1))
    for name in root.child("step-1").remote.walk():
        if name != "zarr.json":
            root.write(f"step-2/{name}", root.child("step-1").read(name))
            root.write(f"other/{name}", root.child("step-1").read(name))
    patient = CheckpointManager(url, storage_options=options)
    assert patient.restore(wanted()[0]).step == 1  # type: ignore[union-attr]
    patient.close()
    assert root.listing() == ["other", "step-1", "step-2"]
    eager = CheckpointManager(url, storage_options=options, sweep_after=timedelta(0))
    eager.save(3, state_of(3))
    eager.close()
    assert root.listing() == ["other", "step-1", "step-3"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_every": True}, "keep_every=True"),
        ({"best": 2}, "metric"),
        ({"metric": "loss"}, "best"),
        ({"best": 1, "metric": "loss", "mode": "least"}, "mode='least'"),
        ({"prefix": "../"}, "prefix"),
        ({"prefix": ".step"}, "prefix"),
    ],
)
def test_impossible_policies_are_refused(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointManager(tmp_path, **options)


def test_wrong_arguments_save_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="step=-1"):
        manager.save(-1, state_of(1))
    with pytest.raises(TypeError, match=r"step=1\.5"):
        manager.save(1.5, state_of(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metric 'loss' is 'low'"):
        manager.save(1, state_of(1), metrics={"loss": "low"})
    with pytest.raises(TypeError, match=r"strict.*what it takes: .*durable"):
        manager.save(1, state_of(1), strict="raise_all")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="metric"):
        manager.async_save(1, state_of(1), metrics={"loss": torch.ones(2)})
    with pytest.raises(ValueError, match="compression"):
        manager.save(1, state_of(1), compression="rar")
    with pytest.raises(ValueError, match="progress='line'"):
        manager.save(1, state_of(1), progress="line")  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="progress=7"):
        manager.restore(wanted()[0], progress=7)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


steps_and_losses = st.dictionaries(
    st.integers(0, 60), st.none() | st.floats(allow_nan=True, width=16), max_size=12
)
limits = st.none() | st.integers(1, 5)


@given(steps_and_losses, limits, limits, limits, st.sampled_from(["min", "max"]))
def test_retention_keeps_what_each_rule_says(
    losses: dict[int, float | None],
    last: int | None,
    every: int | None,
    best: int | None,
    mode: Any,
) -> None:
    metric = None if best is None else "loss"
    policy = Retention(keep_last=last, keep_every=every, best=best, metric=metric, mode=mode)
    steps = {s: ({} if loss is None else {"loss": loss}) for s, loss in losses.items()}
    kept = policy.kept(steps)
    newest = sorted(steps)[-1:]
    assert set(newest) <= kept <= set(steps)
    for step in steps:
        newer = sum(other > step for other in steps)
        loss = losses[step]
        finite = [(o, v) for o, v in losses.items() if v is not None and abs(v) < float("inf")]
        sign = 1 if mode == "min" else -1
        better = [
            o
            for o, v in finite
            if loss is not None and (sign * v < sign * loss or (v == loss and o > step))
        ]
        among_best = best is not None and step in dict(finite) and len(better) < best
        expected = (
            (last is None and every is None and best is None)
            or newer < (last or 1)
            or (every is not None and step % every == 0)
            or among_best
        )
        assert (step in kept) == expected


@given(st.lists(st.integers(0, 12), max_size=12))
def test_branches_are_told_by_the_order_of_the_saves(order: list[int]) -> None:
    """Against a plain model: a save of a step leaves all higher ones that are there."""
    left: dict[int, bool] = {}
    for step in order:
        left = {other: gone or other > step for other, gone in left.items()}
        left[step] = False
    found = branches({step: when for when, step in enumerate(order)})
    assert found.abandoned == tuple(sorted(step for step, gone in left.items() if gone))
    assert found.current == tuple(sorted(step for step, gone in left.items() if not gone))
    assert found.latest == (order[-1] if order else None)
    assert set(found.to_restore) == set(order)
    unknown = branches(dict.fromkeys(order))
    assert (unknown.current, unknown.abandoned) == (tuple(sorted(set(order))), ())


# -- progress and telemetry ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}])
def test_progress_counts_what_moves(
    place: tuple[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    sharded = ShardedTensor.from_rank_offsets
    state = {"a": sharded("a", torch.rand(100, 50)), "b": sharded("b", torch.rand(33).double())}
    size = 100 * 50 * 4 + 33 * 8
    url, storage = f"{place[0]}/c", place[1] or None
    for operation in ("save", "load"):
        events: list[Progress] = []
        if operation == "save":
            shardstore.save(state, url, storage_options=storage, progress=events.append, **options)
        else:
            shardstore.load(state, url, storage_options=storage, progress=events.append)
        assert {e.operation for e in events} == {operation}
        assert [e.phase for e in events if e.finished] == ["done"]
        assert events[-1].finished
        assert events[0].phase == "begin"
        assert (events[-1].bytes_done, events[-1].bytes_total) == (size, size)
        assert (events[-1].chunks_done, events[-1].chunks_total) == (2, 2)
        done = [e.bytes_done for e in events]
        assert done == sorted(done)
        assert {size, 0} <= set(done)
        assert any(0 < n < size for n in done)


def test_progress_of_asynchronous_and_failed_saves(tmp_path: Path) -> None:
    events: list[Progress] = []
    handle = shardstore.async_save(state_of(1), tmp_path / "c", progress=events.append)
    handle.result(60)
    assert events[-1].phase == "done"
    assert events[-1].bytes_done == events[-1].bytes_total == 64 * 32 * 4
    events.clear()
    broken = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))}
    with pytest.raises(ValueError, match="written by no rank"):
        shardstore.save(broken, tmp_path / "d", progress=events.append)
    assert events[-1].phase == "failed"
    events.clear()
    (tmp_path / "c/w/c.0.0").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError):
        shardstore.load(wanted()[0], tmp_path / "c", progress=events.append)
    assert [e.phase for e in events if e.finished] == ["failed"]


def test_a_callback_that_fails_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Progress] = []

    def broken(event: Progress) -> None:
        calls.append(event)
        raise RuntimeError("no screen")

    shardstore.save(state_of(1), tmp_path / "c", progress=broken)
    state, data = wanted()
    shardstore.load(state, tmp_path / "c")
    assert data.eq(1).all()
    assert len(calls) == 1
    (text,) = warnings_of(caplog)
    assert "no screen" in text


def test_a_bar_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with open(tmp_path / "screen", "w") as screen:
        drawn = bar(Console(file=screen, force_terminal=True, width=100))
        shardstore.save(state_of(1), tmp_path / "step-7", progress=drawn)
        shardstore.load(wanted()[0], tmp_path / "step-7", progress=drawn)
    text = (tmp_path / "screen").read_text()
    assert "save step-7 done" in text
    assert "load step-7 done" in text
    assert "100%" in text or "8.2/8.2" in text or "8.0/8.0" in text
    shardstore.load(wanted()[0], tmp_path / "step-7", progress="bar")
    out, err = capfd.readouterr()
    assert out == ""
    assert "load step-7 done" in err


def test_the_commit_record_says_what_each_rank_did(tmp_path: Path) -> None:
    shardstore.save(state_of(1), tmp_path / "c")
    commit = json.loads((tmp_path / "c/zarr.json").read_text())["attributes"]["shardstore"][
        "commit"
    ]
    ranks = commit["ranks"]
    assert ranks["bytes"] == [commit["stored_bytes"]] == [64 * 32 * 4 + 4]
    assert ranks["chunks"] == [1]
    assert ranks["slowest"] == 0
    assert 0 < ranks["write_s"][0] <= commit["seconds"]
    assert 0 <= ranks["plan_s"][0] <= commit["seconds"]
    assert zarr.open_group(tmp_path / "c", mode="r")["w"][0, 0] == 1
    record = shardstore.async_save(state_of(2), tmp_path / "d").result(60)
    assert record["ranks"]["stage_s"][0] > 0
    assert record["content"] != commit["content"]


def test_many_ranks_are_summed_up() -> None:
    rows = [RankRow(rank, 10 * rank, rank, {"write": float(rank == 5000)}) for rank in range(16384)]
    record = rank_record(rows[::-1])
    assert record["slowest"] == 5000
    assert record["chunks"] == {"min": 0, "median": 8191, "max": 16383}
    assert record["bytes"]["max"] == 163830
    assert record["write_s"] == {"min": 0.0, "median": 0.0, "max": 1.0}
    assert len(json.dumps(record)) < 500
    few = rank_record(rows[:MAX_COLUMNS_RANKS][::-1])
    assert few["chunks"] == list(range(MAX_COLUMNS_RANKS))
    assert rank_record([]) == {}


def test_logs_are_structured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardstore")
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(4, state_of(4), metrics={"loss": 2})
        manager.save(5, state_of(5))
        manager.restore(wanted()[0])
    by_event: dict[str, list[dict[str, Any]]] = {}
    for record in caplog.records:
        if hasattr(record, "event"):
            by_event.setdefault(record.event, []).append(vars(record))
    assert [r["bytes"] for r in by_event["commit"]] == [64 * 32 * 4 + 4] * 2
    assert [r["step"] for r in by_event["step"]] == [4, 5]
    assert by_event["step"][0]["metrics"] == {"loss": 2.0}
    assert [r["step"] for r in by_event["delete"]] == [4]
    (loaded,) = by_event["load"]
    assert loaded["bytes"] == 64 * 32 * 4
    for record in [*by_event["commit"], loaded]:
        assert record["seconds"] > 0
        assert record["bytes_per_second"] > 0
        assert record["world_size"] == 1
        assert record["url"].startswith(str(tmp_path))
