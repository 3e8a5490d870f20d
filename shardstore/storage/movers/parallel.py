"""Threads for many small jobs: the caller's thread works too, the first error stops the rest.

Plain threads: a pool of :mod:`concurrent.futures` takes no jobs once the interpreter is about to
end, when a save in the background may still have some.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from shardstore.storage.movers.chunk_bytes import free_scratch

T = TypeVar("T")

MAX_THREADS = 8
NICENESS = 5
"""Of threads that write beside a training loop, which comes first where processors are short."""


def default_threads() -> int:
    """Threads of one mover: this rank's share of the processors, at least 1, at most 8.

    The ranks of a machine share the processors that they may use, as many ranks as the launcher
    says (``LOCAL_WORLD_SIZE``, which torchrun sets), unless each is bound to its own processors.
    """
    processors = len(os.sched_getaffinity(0))
    if not _is_bound(processors):
        processors //= local_ranks()
    return max(1, min(MAX_THREADS, processors))


def local_ranks() -> int:
    """Return the ranks on this machine as the launcher says (``LOCAL_WORLD_SIZE``), at least 1."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _is_bound(processors: int) -> bool:
    """Return whether this process may use fewer processors than the one that started it."""
    try:
        return processors < len(os.sched_getaffinity(os.getppid()))
    except OSError:  # the parent has ended, or is another user's
        return False


def yield_to_others() -> None:
    """Lower the priority of this thread, and of those that it starts, below the process's others.

    On Linux the priority is a thread's own (man-pages setpriority(2)); elsewhere nothing happens.
    It cannot be raised again: for threads of this package that end.
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
    weight: Callable[[T], int] = lambda _: 1,
    batch_weight: int = 1,
    batch_items: int = 256,
) -> None:
    """Call ``work`` on consecutive batches of ``items``, from up to ``threads`` threads.

    Args:
        items: the jobs.
        work: called with a batch, by several threads at a time.
        threads: the caller's thread included.
        weight: of a job (bytes).
        batch_weight: a batch is closed once it weighs this much.
        batch_items: a batch is closed once it has this many jobs.

    Raises:
        BaseException: the first that ``work`` raised; no batch is started after it, and all threads
            have ended. The calling thread's scratch memory is given back.
    """
    batches = deque(_batches(items, weight, batch_weight, batch_items))
    failures: list[BaseException] = []

    def worker() -> None:
        while not failures:
            try:
                batch = batches.popleft()
            except IndexError:
                return
            try:
                work(batch)
            except BaseException as error:
                failures.append(error)

    others: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be started: those that run do the work
        for _ in range(min(threads, len(batches)) - 1):
            thread = threading.Thread(target=worker, name="shardstore-io")
            thread.start()
            others.append(thread)
    worker()
    for thread in others:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # an interrupt: stop the others, but do wait for them
                failures.append(error)
    free_scratch()
    if failures:
        raise failures[0]


def run_together(*jobs: Callable[[], Any]) -> tuple[Any, ...]:
    """Call all jobs at once, in threads; for waiting, not for computing.

    Raises:
        BaseException: the first that a job raised; all have ended.
    """
    found: list[Any] = [None] * len(jobs)

    def work(numbers: Sequence[int]) -> None:
        for number in numbers:
            found[number] = jobs[number]()

    run_batched(range(len(jobs)), work, threads=len(jobs))
    return tuple(found)


def _batches(
    items: Sequence[T], weight: Callable[[T], int], batch_weight: int, batch_items: int
) -> Iterator[Sequence[T]]:
    start = total = 0
    for stop, item in enumerate(items, 1):
        total += weight(item)
        if total >= batch_weight or stop - start >= batch_items or stop == len(items):
            yield items[start:stop]
            start, total = stop, 0
