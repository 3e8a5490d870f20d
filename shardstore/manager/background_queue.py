"""Background jobs of a manager, one after the other, and which steps they use or delete."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from shardstore.async_handle import register
from shardstore.storage.movers.parallel import yield_to_others

__all__ = ["BackgroundQueue", "Claims"]

logger = logging.getLogger(__name__)

EXIT_WAIT_S = 60.0
"""Seconds that an exiting interpreter waits. The next manager of the same root finds what was cut
off."""


_all: weakref.WeakSet[BackgroundQueue | Claims] = weakref.WeakSet()


class BackgroundQueue:
    """A queue of jobs, and a thread that lives while there are any. A job that fails is logged; an
    exiting interpreter waits for what is left.

    Args:
        about: what the jobs belong to, for the log.
    """

    def __init__(self, about: str) -> None:
        self._about = about
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        # Now, so that it runs after the exit functions of saves which begin later.
        this = weakref.ref(self)
        register(lambda: _wait_at_exit(this))
        _all.add(self)

    def put(self, job: Callable[[], None]) -> None:
        """Append a job."""
        with self._changed:
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shardstore-manager", daemon=True
                )
                self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no job is left; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def _leave(self) -> None:
        """Forget the jobs in a forked child: the parent does them."""
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
                    "background work on %s failed and is tried again after the next save: %s: %s",
                    self._about,
                    type(error).__name__,
                    error,
                )


class Claims:
    """Steps in use and steps being deleted; no step is both."""

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
        """Start to use a step, unless it is being deleted; returns whether it is used."""
        with self._changed:
            if step in self._doomed:
                return False
            self._used[step] += 1
            return True

    def release(self, step: int) -> None:
        """Stop using a step."""
        with self._changed:
            self._used[step] -= 1

    def doom(self, step: int) -> bool:
        """Start to delete a step, unless it is in use; returns whether it is deleted."""
        with self._changed:
            if self._used[step] > 0:
                return False
            self._doomed.add(step)
            return True

    def gone(self, step: int) -> None:
        """Note that a step is deleted."""
        with self._changed:
            self._doomed.discard(step)
            self._changed.notify_all()

    def _leave(self) -> None:
        """Forget the deletions of the parent in a forked child."""
        self._changed = threading.Condition()
        self._doomed.clear()


def _wait_at_exit(queue: weakref.ref[BackgroundQueue]) -> None:
    left = queue()
    if left is not None:
        left.wait(EXIT_WAIT_S)


def _leave_all() -> None:
    for one in list(_all):
        one._leave()


os.register_at_fork(after_in_child=_leave_all)
