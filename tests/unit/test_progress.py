"""Progress, the commit record and the logs, of saves and loads in a world of one."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import shardstore
from shardstore import CheckpointManager, ShardedTensor
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.progress import Progress, bar
from shardstore.storage.format.merge import MAX_COLUMNS_RANKS, rank_record
from tests.helpers.managed import state_of, wanted, warnings_of


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
    missing = {"v": ShardedTensor.from_rank_offsets("v", torch.ones(4))}
    for strict, place in (("raise_unexpected", "c"), ("assume_ok_unexpected", "nowhere")):
        events.clear()
        with pytest.raises(CheckpointingException):
            shardstore.load(missing, tmp_path / place, strict=strict, progress=events.append)
        assert [e.phase for e in events] == ["begin", "failed"]


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


@pytest.mark.parametrize("waits", ["load", "save", "async_save", "handle", "manager", "restore"])
@pytest.mark.parametrize("link", [False, True])
def test_a_callback_that_waits_for_its_own_save_is_an_error_of_the_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: str, link: bool
) -> None:
    """Also if a symbolic link leads to its place."""
    manager, begun = CheckpointManager(tmp_path), threading.Event()
    place = manager.url(1)
    if link:
        (tmp_path / "link").symlink_to(place)
        place = str(tmp_path / "link")
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: shardstore.load(wanted()[0], place),
        "save": lambda: shardstore.save(state_of(2), place, overwrite=True),
        "async_save": lambda: shardstore.async_save(state_of(2), place, overwrite=True),
        "handle": lambda: handle.wait(60),
        "manager": lambda: manager.wait(60),
        "restore": lambda: manager.restore(wanted()[0]),
    }

    def callback(event: Progress) -> None:
        if event.phase == "commit" and begun.wait(60):
            calls[waits]()

    handle = manager.async_save(1, state_of(1), progress=callback)
    begun.set()
    assert handle.wait(60)
    handle.result()
    (text,) = warnings_of(caplog)
    assert "after the callback" in text
    assert manager.wait(60)


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
    assert 0 < ranks["write_s"][0] <= commit["seconds"] + 0.001  # seconds are rounded
    assert 0 <= ranks["plan_s"][0] <= commit["seconds"] + 0.001
    assert zarr.open_group(tmp_path / "c", mode="r")["w"][0, 0] == 1
    record = shardstore.async_save(state_of(2), tmp_path / "d").result(60)
    assert record["content"] != commit["content"]
    # Large enough that its copy is not rounded to no time at all.
    large = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8 << 20))}
    record = shardstore.async_save(large, tmp_path / "e").result(60)
    assert 0 < record["ranks"]["stage_s"][0] <= record["seconds"] + 0.001


def test_many_ranks_are_summed_up() -> None:
    def record_of(ranks: int) -> dict[str, Any]:
        seconds = {rank: {"write": float(rank == 5000)} for rank in reversed(range(ranks))}
        return rank_record(seconds, range(0, 10 * ranks, 10), range(ranks))

    record = record_of(16384)
    assert record["slowest"] == 5000
    assert record["chunks"] == {"min": 0, "median": 8191, "max": 16383}
    assert record["bytes"]["max"] == 163830
    assert record["write_s"] == {"min": 0.0, "median": 0.0, "max": 1.0}
    assert len(json.dumps(record)) < 500
    few = record_of(MAX_COLUMNS_RANKS)
    assert few["chunks"] == list(range(MAX_COLUMNS_RANKS))
    assert record_of(0) == {}


def test_a_handler_that_fails_fails_no_save_and_keeps_no_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unreachable(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if hasattr(record, "event"):
                raise ConnectionError("no server for charts")

    caplog.set_level(logging.INFO, "shardstore")
    monkeypatch.setattr(logging.getLogger("shardstore"), "handlers", [Unreachable()])
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
        manager.async_save(3, state_of(3)).result(60)
    assert manager.steps() == [3]
    shardstore.load(wanted()[0], manager.url(3))
    assert "no server for charts" in capsys.readouterr().err


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
    # Each record names the place that logs it, by which programs group records.
    assert loaded["funcName"] == "run_load"
    assert by_event["commit"][0]["filename"] == "session.py"
    for record in [*by_event["commit"], loaded]:
        assert record["seconds"] > 0
        assert record["bytes_per_second"] > 0
        assert record["world_size"] == 1
        assert record["url"].startswith(str(tmp_path))
