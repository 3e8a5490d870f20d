"""Pauses of Python's garbage collector: none runs within, and what was made is not walked after."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from shardstore.storage.movers.collector import MANY, collector_paused


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


def test_none_runs_within_and_none_for_it_afterwards(collections: list[int]) -> None:
    before = gc.get_stats()[2]["collections"]
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
        kept = made(20 * MANY)
    assert gc.isenabled()
    made(10)
    assert not collections
    # They are old at once: only full collections look at them.
    old = {id(thing) for thing in gc.get_objects(generation=2)}
    assert all(id(thing) in old for thing in kept)
    assert gc.get_stats()[2]["collections"] == before
    made(50 * MANY)
    assert collections, "the collector is at work again"


def test_cycles_are_still_found() -> None:
    with collector_paused():
        for _ in range(MANY + 1000):
            ring: list[Any] = []
            ring.append(ring)
    assert gc.collect() >= MANY


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen
        with collector_paused():
            kept = made(20 * MANY)
        # Less what ended meanwhile.
        assert frozen - 100 < gc.get_freeze_count() <= frozen
        assert kept
    finally:
        gc.unfreeze()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
