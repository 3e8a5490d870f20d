"""Ctrl-C: soon, in one line."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shardstore.cli import app, options
from shardstore.inspection import values
from shardstore.inspection.opened import OpenCheckpoint, StoredArray
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.stores.location import Location


def test_an_interrupt_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "locate", interrupted)
    assert app.run(["rm", "-y", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_what_is_read_in_threads_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece may be a request to a slow store."""
    monkeypatch.setattr(values, "default_threads", lambda: 2)
    begun = threading.Event()
    pieces = 0

    def work(array: StoredArray, box: Box) -> None:
        nonlocal pieces
        pieces += 1
        if threading.current_thread() is threading.main_thread():
            begun.set()
            raise KeyboardInterrupt
        assert begun.wait(60)

    stored = StoredCheckpoint(Location.of("/no/such/place"))
    meta = ArrayMeta("w", "w", Grid((4000,), (4,)), "float32")
    stored.arrays = {"w": meta}
    with pytest.raises(KeyboardInterrupt):
        values.stream(list(OpenCheckpoint(stored).values()), work)
    assert pieces <= 3
