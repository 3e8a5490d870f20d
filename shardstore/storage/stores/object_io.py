"""The interface to single objects of a store.

A request has a start and an end. TensorStore runs started requests in its own threads, so a few
threads can have many requests in progress. With fsspec, each request blocks a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias, TypeVar

from shardstore.storage.runtime.parallel import default_threads, run_batched

T = TypeVar("T")
Parts: TypeAlias = Sequence[bytes | memoryview]
"""The content of an object, in order."""

MAX_OBJECT_BYTES = 5 * 1024**3
"""Size limit of one PUT (Amazon S3 user guide, "Uploading objects")."""
LARGE_BYTES = 1024 * 1024
"""For objects of at least this size, the transfer takes longer than the wait for the answer."""
UNKNOWN_BYTES = 2 * 1024 * 1024
"""Expected size of an object of unknown size: that of a document of 4,000 arrays."""


class ObjectIO:
    """Puts and gets objects below one location. Any thread may call it.

    A subclass defines ``put`` and ``get``, or ``begin_put`` and ``begin_get``. This class defines
    each pair by the other one.

    Attributes:
        requests: useful number of concurrent requests.
        small_requests: the same for objects below :data:`LARGE_BYTES`.
        blocks: whether each request blocks a thread.
        reads_past_end: whether a range may end after the object, without a second request.
    """

    requests: int
    small_requests: int
    blocks = True
    reads_past_end = True

    def put(self, key: str, parts: Parts, *, create: bool) -> bool:
        """Write an object.

        Args:
            key: name of the object.
            parts: the content, in order.
            create: whether to write only if no object of that name exists.

        Returns:
            Whether the object was written. ``False`` if an object of that name exists; it may come
            from an earlier try of this call whose answer was lost.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        return self.begin_put(key, parts, create=create)()

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> bytes | memoryview | None:
        """Return an object, or a part of it.

        Args:
            key: name of the object.
            start: the first byte.
            stop: one past the last byte; ``None``: the end of the object.
            size: expected number of bytes, which sets the deadline.

        Returns:
            The bytes; fewer, or none, if the object ends before ``stop``. ``None`` if there is no
            such object.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        return self.begin_get(key, start, stop, size=size)()

    def end_of(self, size: int | None) -> int | None:
        """Return the ``stop`` of a :meth:`get` of an object of ``size`` bytes (``None``: unknown).
        One more byte is requested if that costs nothing, to detect a larger object."""
        return size + self.reads_past_end if size else None

    def begin_put(self, key: str, parts: Parts, *, create: bool) -> Callable[[], bool]:
        """Start :meth:`put`. Return a function that waits for the end and returns the result."""
        return partial(self.put, key, parts, create=create)

    def begin_get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> Callable[[], bytes | memoryview | None]:
        """Start :meth:`get`. Return a function that waits for the end and returns the result."""
        return partial(self.get, key, start, stop, size=size)


def run_requests(
    io: ObjectIO,
    items: Sequence[T],
    begin: Callable[[T, bool], Callable[[], None] | None],
    *,
    small: bool = True,
) -> None:
    """Run one request for each item, with the concurrency that ``io`` states.

    Args:
        io: puts and gets objects.
        items: one item for each request.
        begin: called with an item, and whether it may wait for memory. It starts a request and
            returns the function that finishes it; ``None`` if there is no memory for the request
            beside the others.
        small: whether some objects are below :data:`LARGE_BYTES`.

    Raises:
        BaseException: the first error of a request. No request starts after it, and all started
            requests have ended.
    """
    most = io.small_requests if small else io.requests
    threads = most if io.blocks else min(default_threads(), most)
    queue = deque(items)

    def work(_: Sequence[int]) -> None:
        pending: deque[Callable[[], None]] = deque()
        try:
            while True:
                item: T | None = None
                finish: Callable[[], None] | None = None
                if len(pending) < most // threads:
                    with suppress(IndexError):
                        item = queue.popleft()
                if item is not None and (finish := begin(item, not pending)) is None:
                    queue.appendleft(item)
                if finish is not None:
                    pending.append(finish)
                elif pending:
                    pending.popleft()()
                else:
                    return
        except BaseException:
            queue.clear()
            for finish in pending:
                with suppress(Exception):
                    finish()
            raise

    run_batched(range(threads), work, threads=min(threads, len(items)))
