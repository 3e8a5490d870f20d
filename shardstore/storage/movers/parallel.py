"""A few threads over many small jobs: the caller's thread works too, the first error stops the
rest."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

__all__ = [
    "ByteLimit",
    "Jobs",
    "default_threads",
    "local_ranks",
    "run_batched",
    "run_together",
    "yield_to_others",
]

T = TypeVar("T")

MAX_THREADS = 8
NICENESS = 5
"""Of threads that write beside a training loop, which comes first where processors are short."""


def default_threads() -> int:
    """Threads of one mover: this rank's share of the processors, at least 1, at most 8.

    The ranks of a machine share the processors that they may use, as many as the launcher tells
    (``LOCAL_WORLD_SIZE``, which torchrun sets), unless it has bound each to processors of its own.
    """
    processors = len(os.sched_getaffinity(0))
    if not _is_bound(processors):
        processors //= local_ranks()
    return max(1, min(MAX_THREADS, processors))


def local_ranks() -> int:
    """Ranks on this machine as the launcher tells (``LOCAL_WORLD_SIZE``), at least 1."""
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1


def _is_bound(processors: int) -> bool:
    """Whether this process may use fewer processors than the one that started it."""
    try:
        return processors < len(os.sched_getaffinity(os.getppid()))
    except OSError:  # it has ended, or is none of ours
        return False


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


class ByteLimit:
    """Lets threads hold no more than so many bytes together; one that wants more holds them alone.

    Args:
        limit_bytes: how many.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Hold ``size`` bytes within; waits for room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size <= self._limit)
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()


class Jobs:
    """Jobs that wait more than they work, in plain threads: a pool of :mod:`concurrent.futures`
    takes none any more once the interpreter is about to end.

    Args:
        threads: the most at a time; as many are started as there are jobs for.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False
        self._error: BaseException | None = None

    def add(self, job: Callable[[], None]) -> None:
        """Have a job done; after the first that failed none is begun. Does it at once where no
        thread is to be had for any."""
        with self._changed:
            self._waiting.append(job)
            if self._idle >= len(self._waiting) or len(self._threads) >= self._most:
                self._changed.notify()
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:  # none is to be had, as at the end of the interpreter
            with self._changed:
                self._threads.remove(thread)
                alone = not self._threads
            if alone:
                self._do_all()

    def end(self) -> None:
        """Have the threads end once nothing waits any more; waits for none of them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all, and end the threads; does itself what no thread was to be had for. Called
        once.

        Raises:
            BaseException: what the first job that failed raised.
        """
        self.end()
        for thread in self._threads:
            thread.join()
        self._run()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._idle -= 1
                closed = self._closed
            self._do_all()
            if closed:
                return

    def _do_all(self) -> None:
        """Do what is waiting."""
        while True:
            with self._changed:
                if self._error is not None:
                    self._waiting.clear()
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            try:
                job()
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error


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
    others: list[threading.Thread] = []

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

    with suppress(RuntimeError):  # no more threads are to be had: those that run do the work
        for _ in range(threads - 1):
            thread = threading.Thread(target=worker, name="shardstore-io")
            thread.start()
            others.append(thread)
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
    items: Sequence[T],
    weight: Callable[[T], int],
    batch_weight: int,
    batch_items: int,
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
