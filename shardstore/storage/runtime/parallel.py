"""Runs many small jobs in threads. The caller's thread works too, and the first error stops the
rest. Also pauses the garbage collector while many small objects are made.

It uses plain threads: a pool of :mod:`concurrent.futures` rejects jobs during interpreter shutdown,
when a save in the background may still submit some.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_THREADS = 8
MOST_IN_BATCH = 256
NICENESS = 5
"""Added to the nice value of threads that write beside a training loop, so that the loop has
priority if processors are busy."""

kept_memory = threading.local()
"""Memory that a thread keeps for its next job. :func:`run_batched` frees that of its caller; a
thread that ends frees its own."""
MANY_OBJECTS = 2000
"""Objects created minus objects freed during a pause, above which the pause freezes the rest."""

_pauses: list[None] = []
"""The pauses that disabled the collector; several, if several threads began one at once."""


def default_threads() -> int:
    """Return the number of threads of one mover: this rank's share of the processors, from 1 to 8.

    The ranks of a machine share its processors, unless the launcher binds each rank to its own
    processors. ``LOCAL_WORLD_SIZE``, which torchrun sets, is the number of these ranks.
    """
    processors = of_parent = len(os.sched_getaffinity(0))
    with suppress(OSError):  # the parent has ended, or another user owns it
        of_parent = len(os.sched_getaffinity(os.getppid()))
    if processors >= of_parent:
        processors //= local_ranks()
    return max(1, min(MAX_THREADS, processors))


def local_ranks() -> int:
    """Return the number of ranks on this machine from ``LOCAL_WORLD_SIZE``, at least 1."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def yield_to_others() -> None:
    """Lower the priority of this thread, and of the threads that it starts, below the other threads
    of the process.

    On Linux each thread has its own priority (man-pages setpriority(2)); elsewhere this does
    nothing. The priority cannot be raised again, so only threads that this package starts call it.
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
    threads: int | None = None,
    weight: Callable[[T], int] = lambda _: 1,
    batch_weight: int = 1,
) -> None:
    """Call ``work`` on consecutive batches of ``items``, from up to ``threads`` threads.

    Args:
        items: the jobs.
        work: called with a batch, by several threads at a time.
        threads: number of threads, including the caller's; ``None``: :func:`default_threads`.
        weight: returns the weight of a job (bytes).
        batch_weight: largest weight of a batch, which has at most :data:`MOST_IN_BATCH` jobs; a job
            that exceeds it is a batch by itself.

    Raises:
        BaseException: the first error that ``work`` raised, or an interrupt. No batch starts after
            it, and all threads have ended. :data:`kept_memory` of the calling thread is freed.
    """
    batches = deque(in_rounds(items, weight, batch_weight, MOST_IN_BATCH))
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
    more = len(batches) - 1
    if more > 0:
        more = min(more, (threads or default_threads()) - 1)
    with suppress(RuntimeError):  # no thread can be started: the running ones do the work
        for _ in range(more):
            thread = threading.Thread(target=worker, name="shardstore-io")
            thread.start()
            others.append(thread)
    worker()
    for thread in others:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # an interrupt: stop the other threads, and wait
                failures.append(error)
    kept_memory.__dict__.clear()
    if failures:
        # An interrupt comes before errors that it or the other threads caused.
        raise next((f for f in failures if not isinstance(f, Exception)), failures[0])


def start_thread(
    work: Callable[[], object], *, name: str, daemon: bool = False, yields: bool = False
) -> None:
    """Call a function in a new thread or, if the system has no thread left, in this one.

    Args:
        work: the function; must not raise an error.
        name: name of the thread.
        daemon: whether an exiting interpreter does not wait for the thread.
        yields: whether the thread calls :func:`yield_to_others`.
    """

    def run() -> None:
        if yields:
            yield_to_others()
        work()

    try:
        threading.Thread(target=run, name=name, daemon=daemon).start()
    except RuntimeError as error:
        logger.warning("%s: the program waits until the work of %s is done", error, name)
        work()


def run_together(*jobs: Callable[[], Any]) -> tuple[Any, ...]:
    """Call all jobs at once, each in a thread, and return their results in order. The jobs should
    wait for I/O, not compute.

    Raises:
        BaseException: the first error that a job raised; all threads have ended.
    """
    found: list[Any] = [None] * len(jobs)

    def work(numbers: Sequence[int]) -> None:
        for number in numbers:
            found[number] = jobs[number]()

    run_batched(range(len(jobs)), work, threads=len(jobs))
    return tuple(found)


def in_rounds(
    items: Iterable[T], size: Callable[[T], int], most_bytes: int, most_items: int | None = None
) -> Iterator[list[T]]:
    """Yield items in rounds of at most ``most_bytes`` and ``most_items``. An item that is larger
    than ``most_bytes`` is a round by itself."""
    batch: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if batch and (total > most_bytes or len(batch) == most_items):
            yield batch
            batch, total = [], size(item)
        batch.append(item)
    if batch:
        yield batch


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable automatic garbage collections in all threads for the duration of the context. Pauses
    may nest. If pauses of several threads overlap, the first one that ends may end all of them.

    Planning a checkpoint of thousands of arrays creates no cycles, but it triggers collections that
    walk all objects of the program. They double the duration of a load of 20,000 arrays.
    """
    if not gc.isenabled():
        yield
        return
    _pauses.append(None)
    gc.disable()
    try:
        yield
    finally:
        # Move the objects of the pause to the oldest generation (Python documentation, gc.freeze):
        # otherwise a collection of the youngest generation follows at once and walks all of them
        # for nothing. Objects that the program froze stay frozen.
        if gc.get_count()[0] > MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
        _pauses.pop()


def _end_pauses() -> None:
    """End all pauses in a forked child, because the threads that began them do not exist there."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_end_pauses)
