"""The interface to single objects of a store.

A request has a start and an end. TensorStore runs started requests in its own threads, so a few
threads can have many requests in progress. With fsspec, each request blocks a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from shardstore.errors import StorageError
from shardstore.storage.runtime.parallel import default_threads, run_batched

Parts: TypeAlias = Sequence[bytes | memoryview]
"""The content of an object, in order."""
Pieces: TypeAlias = Iterator[bytes | memoryview]
"""The bytes of an object, or of a range of it, in order; no piece if there is no such object. Each
is freed before the next one is taken, if the caller keeps none."""

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
        put_copies: copies of one object at a time that PUTs have in memory beside the others.
        blocks: whether each request blocks a thread.
        reads_past_end: whether a range may end after the object, without a second request.
    """

    requests: int
    small_requests: int
    put_copies = 1
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
        return joined(self.begin_get(key, start, stop, size=size))

    def end_of(self, size: int | None) -> int | None:
        """Return the ``stop`` of a :meth:`get` of an object of ``size`` bytes (``None``: unknown).
        One more byte is requested if that costs nothing, to detect a larger object."""
        return size + self.reads_past_end if size else None

    def begin_put(self, key: str, parts: Parts, *, create: bool) -> Callable[[], bool]:
        """Start :meth:`put`. Return a function that waits for the end and returns the result."""
        return partial(self.put, key, parts, create=create)

    def begin_get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> Pieces:
        """Start :meth:`get`. The iteration over the result waits for it."""
        if (data := self.get(key, start, stop, size=size)) is not None:
            yield data


def joined(pieces: Pieces) -> bytes | memoryview | None:
    """Return the bytes of all pieces; ``None`` if there is none."""
    found = list(pieces)
    return b"".join(found) if len(found) > 1 else next(iter(found), None)


class Request(ABC):
    """A request in flight: it starts, and then ends."""

    __slots__ = ()

    @abstractmethod
    def start(self, *, may_wait: bool) -> bool:
        """Start the request. Return ``False`` if there is no memory for it beside the others, and
        it may not wait."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the end, and take the answer."""


@dataclass
class Create(Request):
    """A conditional PUT. If an object of that name exists, it is from an earlier try, whose answer
    was lost, or a leftover, or from a newer attempt.

    Attributes:
        io: puts and gets objects below the location.
        url: URL of the location.
        key: name of the object.
        parts: the content, in order.
        check: called before an object with other content is replaced; raises if it must stay.
    """

    io: ObjectIO
    url: str
    key: str
    parts: Parts
    check: Callable[[], None]

    def start(self, *, may_wait: bool = True) -> bool:
        """See :meth:`Request.start`."""
        self._put = self.io.begin_put(self.key, self.parts, create=True)
        return True

    def finish(self) -> None:
        """See :meth:`Request.finish`."""
        if self._put():
            return
        there = self.io.get(self.key, size=sum(map(len, self.parts)))
        if there is None and not self.io.put(self.key, self.parts, create=True):
            url = f"{self.url}/{self.key}"
            raise StorageError(
                f"{url}: the store says that the object exists, but has none of this name; save "
                "again",
                url=url,
            )
        if there not in (None, b"".join(self.parts)):
            self.check()
            self.io.put(self.key, self.parts, create=False)


def run_requests(io: ObjectIO, requests: Iterable[Request], *, small: bool = True) -> None:
    """Run requests with the concurrency that ``io`` states.

    Args:
        io: puts and gets objects.
        requests: the requests; none is kept after its end.
        small: whether some objects are below :data:`LARGE_BYTES`.

    Raises:
        BaseException: the first error of a request. No request starts after it, and all started
            requests have ended.
    """
    most = io.small_requests if small else io.requests
    threads = most if io.blocks else min(default_threads(), most)
    queue = deque(requests)

    def work(_: Sequence[int]) -> None:
        pending: deque[Request] = deque()
        try:
            while True:
                request = None
                if len(pending) < most // threads:
                    with suppress(IndexError):
                        request = queue.popleft()
                if request is not None and request.start(may_wait=not pending):
                    pending.append(request)
                    continue
                if request is not None:
                    queue.appendleft(request)
                if not pending:
                    return
                pending.popleft().finish()
        except BaseException:
            queue.clear()
            for request in pending:
                with suppress(Exception):
                    request.finish()
            raise

    run_batched(range(threads), work, threads=min(threads, len(queue)))
