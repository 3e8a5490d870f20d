"""Threads: a rank's share of the processors that the ranks of a machine have together; errors."""

from __future__ import annotations

import os
import threading
import time

import pytest

from shardstore.storage.runtime.parallel import default_threads, run_together


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
