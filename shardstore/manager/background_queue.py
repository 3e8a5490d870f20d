"""Jobs in the background, one after the other: what a manager does while training goes on.

Answers for one thread, that a job which fails harms nobody, that a program which ends waits for the
jobs that it left, and that no step is in use and on its way out at a time. It does not know what
the jobs are, nor what a step is.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from shardstore import async_handle as leaving
from shardstore.storage.movers.parallel import yield_to_others

__all__ = ["Claims", "Housekeeping"]

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 60.0
"""Seconds that an exiting interpreter gives to what is left. What is cut off then is found by the
next manager of the same root."""


_all: weakref.WeakSet[Housekeeping | Claims] = weakref.WeakSet()


class Housekeeping:
    """A queue of jobs and a thread that lives while there are any.

    Args:
        about: of what, for the log.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Now, so that it runs after the exit functions of saves which begin later.
        this = weakref.ref(self)
        leaving.register(lambda: _wait_at_exit(this))
        _all.add(self)

    def put(self, job: Callable[[], None]) -> None:
        """Have a job done. An error that it raises is logged."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shardstore-housekeeping", daemon=True
                )
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def _leave(self) -> None:
        """In a forked child: the jobs are done by the parent, whose thread is not here."""
        self._changed = threading.Condition()  # a thread may have held the old one
        self._jobs.clear()
        self._thread = None

    def _run(self) -> None:
        yield_to_others()
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                logger.warning(
                    "housekeeping of %s failed and is tried again after the next save: %s: %s",
                    self._about,
                    type(error).__name__,
                    error,
                )


class Claims:
    """Which steps are in use here and which are being deleted, so that no step is both."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used: Counter[int] = Counter()
        self._doomed: set[int] = set()
        _all.add(self)

    @contextmanager
    def of(self, steps: Collection[int]) -> Iterator[None]:
        """Use steps; waits while one of them is being deleted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._doomed & set(steps))
            self._used.update(steps)
        try:
            yield
        finally:
            for step in steps:
                self.release(step)

    def take(self, step: int) -> bool:
        """Use a step unless it is being deleted."""
        with self._changed:
            if step in self._doomed:
                return False
            self._used[step] += 1
            return True

    def release(self, step: int) -> None:
        """Use it no more."""
        with self._changed:
            self._used[step] -= 1

    def doom(self, step: int) -> bool:
        """Begin to delete a step unless it is in use."""
        with self._changed:
            if self._used[step] > 0:
                return False
            self._doomed.add(step)
            return True

    def gone(self, step: int) -> None:
        """It is deleted."""
        with self._changed:
            self._doomed.discard(step)
            self._changed.notify_all()

    def _leave(self) -> None:
        """In a forked child: what the parent deletes is not waited for."""
        self._changed = threading.Condition()
        self._doomed.clear()


def _wait_at_exit(housekeeping: weakref.ref[Housekeeping]) -> None:
    left = housekeeping()
    if left is not None:
        left.wait(EXIT_WAIT_S)


def _leave_all() -> None:
    for one in list(_all):
        one._leave()


os.register_at_fork(after_in_child=_leave_all)
