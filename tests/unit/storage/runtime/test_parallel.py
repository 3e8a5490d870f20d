"""Threads: a rank's share of a machine's processors, and errors; pauses of garbage collection."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import hf
from shardstore.storage.runtime.parallel import collector_paused, default_threads, run_together


@pytest.mark.parametrize(
    ("mine", "parents", "local_ranks", "threads"),
    [
        (16, 16, None, 8),
        (16, 16, "4", 4),
        (16, 16, "64", 1),
        (16, 64, "4", 8),  # bound to processors of its own by the launcher
        (2, 2, "many", 2),
        (2, 2, "0", 2),
        (6, None, "2", 3),  # its parent has ended
    ],
)
def test_ranks_of_a_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch,
    mine: int,
    parents: int | None,
    local_ranks: str | None,
    threads: int,
) -> None:
    def affinity(pid: int) -> set[int]:
        count = parents if pid else mine
        if count is None:
            raise ProcessLookupError
        return set(range(count))

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    assert default_threads() == threads


def test_an_interrupt_comes_before_the_errors_of_other_threads() -> None:
    begun = threading.Barrier(2, timeout=60)

    def fails() -> None:
        begun.wait()
        raise OSError

    def is_interrupted() -> None:
        begun.wait()
        time.sleep(0.1)  # the other error is most likely the first one
        raise KeyboardInterrupt

    for jobs in ((fails, is_interrupted), (is_interrupted, fails)):
        with pytest.raises(KeyboardInterrupt):
            run_together(*jobs)


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations of the automatic collections since the test began."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def made(count: int) -> list[Any]:
    return [[i] for i in range(count)]


def test_no_collection_runs_within(collections: list[int]) -> None:
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
        made(10_000)
        assert not collections
    assert gc.isenabled()
    made(10_000)
    assert collections, "the collector is at work again"


@pytest.mark.parametrize("save", [shardstore.save, hf.save])
def test_a_save_of_many_tensors_collects_little(
    collections: list[int], tmp_path: Path, save: Callable[..., object]
) -> None:
    state = {f"w{number}": torch.ones(1) for number in range(3000)}
    save(state, tmp_path / "first")  # which imports modules
    collections.clear()
    save(state, tmp_path / "c")
    assert len(collections) <= 2


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
