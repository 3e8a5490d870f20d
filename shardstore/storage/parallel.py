"""A few threads over many small jobs: the caller's thread works too, the first error stops the
rest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["default_threads", "run_batched", "run_together", "yield_to_others"]

T = TypeVar("T")

MAX_THREADS = 8
NICENESS = 5
"""Of threads that write beside a training loop, which comes first where processors are short."""


def default_threads() -> int:
    """Threads of one mover: the processors this process may use, at least 1, at most 8."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def yield_to_others() -> None:
    """Let this thread, and those that it starts, give way to the process's others (Linux).

    There the priority is a thread's own (man-pages setpriority(2)); elsewhere nothing happens. It
    can not be taken back: for threads of our own that end.
    """
    with suppress(AttributeError, OSError):
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        thread = threading.get_native_id()
        if thread != os.getpid():
            os.setpriority(os.PRIO_PROCESS, thread, min(19, of_process + NICENESS))


def run_batched(
    items: Sequence[T],
    work: Callable[[Sequence[T]], None],
    *,
    threads: int,
    weight: Callable[[T], int],
    batch_weight: int,
    batch_items: int = 256,
) -> None:
    """Call ``work`` on consecutive batches of ``items``, from up to ``threads`` threads.

    Args:
        items: the jobs.
        work: called with a batch; must be safe to run beside itself.
        threads: the caller's thread included.
        weight: of a job (bytes).
        batch_weight: a batch is closed once it weighs this much.
        batch_items: a batch is closed once it has this many jobs.

    Raises:
        BaseException: the first that ``work`` raised; no batch is started after it, and all threads
            have ended.
    """
    batches = _batches(items, weight, batch_weight, batch_items)
    threads = min(threads, len(batches))
    if threads <= 1:
        for batch in batches:
            work(batch)
        return
    remaining = iter(batches)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def worker() -> None:
        while True:
            with lock:
                batch = None if failures else next(remaining, None)
            if batch is None:
                return
            try:
                work(batch)
            except BaseException as error:
                with lock:
                    failures.append(error)
                return

    others: list[threading.Thread] = []
    try:
        for _ in range(threads - 1):
            thread = threading.Thread(target=worker, name="shardstore-io")
            thread.start()
            others.append(thread)
    except RuntimeError:
        pass  # no more threads are to be had: those that run, and this one, do the work
    worker()
    while any(thread.is_alive() for thread in others):
        try:
            for thread in others:
                thread.join()
        except BaseException as error:  # an interrupt: stop the others, but do wait for them
            with lock:
                failures.append(error)
    if failures:
        raise failures[0]


def run_together(*jobs: Callable[[], Any]) -> tuple[Any, ...]:
    """Call each job at once, in threads; for waiting, not for computing.

    Raises:
        BaseException: the first that a job raised; all have ended.
    """
    found: list[Any] = [None] * len(jobs)

    def work(batch: Sequence[tuple[int, Callable[[], Any]]]) -> None:
        for number, job in batch:
            found[number] = job()

    run_batched(
        list(enumerate(jobs)),
        work,
        threads=len(jobs),
        weight=lambda _: 1,
        batch_weight=1,
    )
    return tuple(found)


def _batches(
    items: Sequence[T], weight: Callable[[T], int], batch_weight: int, batch_items: int
) -> list[Sequence[T]]:
    out: list[Sequence[T]] = []
    start = total = 0
    for i, item in enumerate(items):
        total += weight(item)
        if total >= batch_weight or i + 1 - start >= batch_items:
            out.append(items[start : i + 1])
            start, total = i + 1, 0
    if start < len(items):
        out.append(items[start:])
    return out
