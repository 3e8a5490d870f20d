"""How single objects are put and got: by TensorStore on S3, by fsspec elsewhere and where
TensorStore's driver does not take the settings.

A request is begun and finished: TensorStore carries out what was begun, so that few threads have
many requests under way. Over fsspec a request blocks a thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.stores.location import Location

if TYPE_CHECKING:
    from shardstore.storage.stores.remote import RemoteStore

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 5 * 1024**3
"""The most that one PUT takes (Amazon S3 user guide, "Uploading objects")."""
LARGE_BYTES = 1024 * 1024
"""From this size on it is an object's bytes that take time, and not the wait for an answer."""
UNKNOWN_BYTES = 16 * 1024 * 1024
"""What a document of very many arrays may have."""

_said: set[tuple[str, str]] = set()


class ObjectIO:
    """Puts and gets objects below one location. Any thread may call it.

    A class of these has ``put`` and ``get``, or ``begin_put`` and ``begin_get``; the others follow.

    Attributes:
        requests: how many at a time are of use.
        small_requests: how many for objects below :data:`LARGE_BYTES`.
        blocks: whether each takes a thread of its own.
    """

    requests: int
    small_requests: int
    blocks = True

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
        """Write an object.

        Args:
            key: its name.
            parts: its content, one after the other.
            create: only if there is no object of that name.

        Returns:
            Whether the object was written; ``False``: there is one of that name, which may be ours,
            where the answer to an earlier try was lost.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        return self.begin_put(key, parts, create=create)()

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> bytes | memoryview | None:
        """Return an object, or a part of it.

        Args:
            key: its name.
            start: the first byte.
            stop: one past the last; ``None``: all that there is.
            size: how many bytes are expected: a large object may take longer.

        Returns:
            Its bytes; fewer, or none, where it ends before ``stop``. ``None``: there is no such
            object.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        return self.begin_get(key, start, stop, size=size)()

    def begin_put(
        self, key: str, parts: Sequence[bytes | memoryview], *, create: bool
    ) -> Callable[[], bool]:
        """Begin :meth:`put`; the call of what is returned waits for its end."""
        return partial(self.put, key, parts, create=create)

    def begin_get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> Callable[[], bytes | memoryview | None]:
        """Begin :meth:`get`; the call of what is returned waits for its end."""
        return partial(self.get, key, start, stop, size=size)


class FileSystemIO(ObjectIO):
    """Over a file system of fsspec: correct first, fast second."""

    requests = small_requests = 8

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
        """See :meth:`ObjectIO.put`."""
        data = b"".join(parts)
        if create:
            return self._store.create(key, data)
        self._store.write(key, data)
        return True

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> bytes | memoryview | None:
        """See :meth:`ObjectIO.get`."""
        return self._store.read_range(key, start, stop, size)


def object_io(location: Location) -> ObjectIO:
    """Return what puts and gets objects at a location.

    Raises:
        StorageError: the store cannot be used.
    """
    store = location.remote
    why = store.s3_settings().unsupported if location.is_s3 else "another protocol than s3"
    if not why:
        from shardstore.storage.stores.tensorstore import KvStoreIO

        return KvStoreIO(location)
    root = "/".join(location.url.split("/")[:3])
    if (root, why) not in _said:
        _said.add((root, why))
        logger.info("%s: fsspec moves chunks too, as TensorStore does not take %s", root, why)
    return FileSystemIO(store)


def run_requests(
    io: ObjectIO,
    items: Sequence[T],
    begin: Callable[[T, bool], Callable[[], None] | None],
    *,
    small: bool = True,
) -> None:
    """Carry out one request for each item, as many at a time as are of use.

    Args:
        io: puts and gets objects.
        items: what the requests are about.
        begin: called with an item, and whether it may wait for room. Begins a request and returns
            the function that finishes it; ``None``: there is no room beside the other requests.
        small: whether some objects are below :data:`LARGE_BYTES`.

    Raises:
        BaseException: the first that was raised; no request is begun after it, and all have ended.
    """
    most = io.small_requests if small else io.requests
    threads = most if io.blocks else min(default_threads(), most)
    queue = deque(items)

    def work(_: Sequence[int]) -> None:
        pending: deque[Callable[[], None]] = deque()
        try:
            while True:
                finish = None
                if len(pending) < most // threads:
                    with suppress(IndexError):
                        item = queue.popleft()
                        finish = begin(item, not pending)
                        if finish is None:
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


def read_objects(location: Location, keys: Sequence[str]) -> list[bytes | None]:
    """Read many small objects in parallel; ``None`` for one that is not there.

    Raises:
        StorageError: the store failed.
    """
    found: list[bytes | None] = [None] * len(keys)
    if not keys:
        return found
    counters.add(documents_read=len(keys))
    io = object_io(location)

    def begin(number: int, _: bool) -> Callable[[], None]:
        get = io.begin_get(keys[number])

        def finish() -> None:
            data = get()
            found[number] = None if data is None else bytes(data)

        return finish

    run_requests(io, range(len(keys)), begin)
    return found


def put_objects(
    location: Location,
    objects: Sequence[tuple[str, bytes]],
    exists: Callable[[str, bytes], None],
) -> None:
    """Create many small objects in parallel.

    Args:
        location: below which.
        objects: names and contents.
        exists: called for each of whose name there is one already.

    Raises:
        StorageError: the store failed.
    """
    if not objects:
        return
    io = object_io(location)

    def begin(item: tuple[str, bytes], _: bool) -> Callable[[], None]:
        name, data = item
        put = io.begin_put(name, [data], create=True)

        def finish() -> None:
            if not put():
                exists(name, data)

        return finish

    run_requests(io, objects, begin)
