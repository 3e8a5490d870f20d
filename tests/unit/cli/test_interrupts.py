"""Ctrl-C: soon, in one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardstore.cli import app, options
from shardstore.inspection import streaming
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid


def test_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "locate", interrupted)
    assert app.run(["rm", "-y", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_what_is_read_in_threads_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece may be a request to a slow store."""
    monkeypatch.setattr(streaming, "default_threads", lambda: 2)
    begun = threading.Event()
    pieces = 0

    def work(array: ArrayMeta, box: Box) -> None:
        nonlocal pieces
        pieces += 1
        if threading.current_thread() is threading.main_thread():
            begun.set()
            raise KeyboardInterrupt
        assert begun.wait(60)

    def arrays() -> Iterator[ArrayMeta]:
        yield ArrayMeta("w", "w", Grid((4000,), (4,)), "float32")

    with pytest.raises(KeyboardInterrupt):
        streaming.stream(arrays(), work, lambda array, error: None)
    assert pieces <= 3 * streaming.BATCH_PIECES
