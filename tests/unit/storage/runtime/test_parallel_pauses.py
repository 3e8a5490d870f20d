"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import hf
from shardstore.storage.runtime.parallel import collector_paused


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
