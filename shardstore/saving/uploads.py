"""Files that are no chunks, sent to an object store beside what the save does meanwhile.

There each file is a request that somebody waits for: a model's hundreds of sharded objects, one
after the other, would hold up a save for seconds, and an asynchronous one before it returns. It
knows names and bytes of one rank; not what they mean, and no other rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.movers.parallel import ByteLimit, Jobs

__all__ = ["FilesBeside", "files_beside"]

THREADS = 16
BUDGET_PART = 16
"""Of the memory for chunks under way, so much again is for files that wait to be sent."""


class FilesBeside:
    """Sends files in threads of its own, a bounded number of bytes at a time.

    Args:
        attempt: what they are a part of.
        budget_bytes: memory for chunks under way. Files that wait take a sixteenth of that on top;
            one that is larger waits alone.
    """

    def __init__(self, attempt: Attempt, budget_bytes: int) -> None:
        self._attempt = attempt
        self._jobs: Jobs | None = None
        self._room = ByteLimit(budget_bytes // BUDGET_PART)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """Have a file written; waits while too much waits already. One thread at a time calls it.

        Raises:
            StorageError: an earlier one could not be written.
        """
        held = ExitStack()
        held.enter_context(self._room.taken(len(data)))

        def send() -> None:
            with held:
                if self._error is not None:
                    return
                try:
                    self._attempt.put_all([(name, data)])
                except BaseException as error:
                    self.stop(error)

        if self._error is not None:
            held.close()
            raise self._error
        if self._jobs is None:
            self._jobs = Jobs(THREADS, "shardstore-files")
        self._jobs.add(send)

    def stop(self, error: BaseException) -> None:
        """Send no more: something went wrong, here or elsewhere. Waits for nothing."""
        with self._lock:
            self._error = self._error or error
        jobs = self._jobs
        if jobs is not None:
            jobs.end()

    def finish(self) -> None:
        """Wait until all are written, or those that are under way once it was stopped.

        Raises:
            StorageError: the first that could not be written, or what it was stopped for.
        """
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            try:
                jobs.finish()
            except BaseException as error:  # an interrupt
                self.stop(error)
                raise
        if self._error is not None:
            raise self._error


@contextmanager
def files_beside(attempt: Attempt, budget_bytes: int) -> Iterator[FilesBeside]:
    """Files that are on their way within, see :class:`FilesBeside`; none is any more when it ends,
    however it ends.

    Raises:
        StorageError: one of them could not be written.
    """
    files = FilesBeside(attempt, budget_bytes)
    try:
        yield files
    except BaseException as problem:
        files.stop(problem)
        with suppress(Exception):
            files.finish()
        raise
    files.finish()
