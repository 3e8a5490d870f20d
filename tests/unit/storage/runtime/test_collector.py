"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from shardstore.storage.runtime.collector import collector_paused


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


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
