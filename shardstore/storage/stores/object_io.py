"""How single objects are put and got: obstore for S3, the fsspec file system for all others.

A request is a call that blocks one thread; whoever has many runs them on as many threads as the
store takes. It knows keys and bytes; not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import run_batched
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore
from shardstore.storage.stores.s3 import S3IO

__all__ = [
    "LARGE_BYTES",
    "MAX_OBJECT_BYTES",
    "ObjectIO",
    "Taker",
    "each",
    "object_io",
    "put_objects",
    "read_objects",
]

T = TypeVar("T")

MAX_OBJECT_BYTES = 5 * 1024**3
"""The most that one PUT takes (Amazon S3 user guide, "Uploading objects")."""
LARGE_BYTES = 1024 * 1024
"""From this size on it is an object's bytes that take time, and not the wait for an answer."""
FILE_SYSTEM_THREADS = 8
Taker = Callable[[int, memoryview], None]
"""Takes a piece of an object, and where it begins, counted from the first byte that was asked for.
A piece at 0 begins anew: what came before it broke off."""


class ObjectIO(Protocol):
    """Puts and gets objects below one location. Any thread may call it."""

    threads: int
    """How many requests at a time are of use."""
    small_threads: int
    """How many for objects below :data:`LARGE_BYTES`."""

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

    def get(self, key: str) -> bytes | None:
        """A whole object; ``None``: there is none.

        Raises:
            StorageError: the store refused, or did not answer.
        """

    def fetch(
        self, key: str, start: int, stop: int | None, take: Taker, size: int = 0
    ) -> int | None:
        """Hand over bytes ``start:stop`` of an object, in order, as they come.

        Args:
            key: its name.
            start: the first byte.
            stop: one past the last; ``None``: all that there is.
            take: called with each piece.
            size: how many bytes are expected if ``stop`` does not say it: a large object may take
                longer.

        Returns:
            How many; fewer, or none, where the object ends before ``stop``. ``None``: there is no
            such object.

        Raises:
            StorageError: the store refused, or did not answer.
        """

    def close(self) -> None:
        """Let go of what it holds; no request may be under way."""


def object_io(location: Location) -> ObjectIO:
    """Puts and gets at a location.

    Raises:
        StorageError: the store can not be used.
    """
    if location.url.startswith(("s3://", "s3a://")):
        return S3IO(location)
    return _FileSystemIO(location.remote)


def read_objects(location: Location, keys: Sequence[str]) -> list[bytes | None]:
    """Read many small objects in parallel; ``None`` for one that is not there.

    Raises:
        StorageError: the store refused.
    """
    found: list[bytes | None] = [None] * len(keys)
    if not keys:
        return found
    counters.add(documents_read=len(keys))
    with closing(object_io(location)) as io:

        def work(batch: Sequence[tuple[int, str]]) -> None:
            for number, key in batch:
                found[number] = io.get(key)

        each(list(enumerate(keys)), work, io.small_threads)
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
        StorageError: the store refused.
    """
    if not objects:
        return
    with closing(object_io(location)) as io:

        def work(batch: Sequence[tuple[str, bytes]]) -> None:
            for name, data in batch:
                if not io.put(name, [data], create=True):
                    exists(name, data)

        each(objects, work, io.small_threads)


def each(items: Sequence[T], work: Callable[[Sequence[T]], None], threads: int) -> None:
    """Run one request an item, on so many threads; errors as :func:`run_batched`."""
    run_batched(items, work, threads=threads, weight=lambda _: 1, batch_weight=1)


class _FileSystemIO:
    """Over a file system of fsspec: correct first, fast second."""

    threads = FILE_SYSTEM_THREADS
    small_threads = FILE_SYSTEM_THREADS

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
        data = b"".join(parts)
        if create:
            return self._store.create(key, data)
        self._store.write(key, data)
        return True

    def get(self, key: str) -> bytes | None:
        return self._store.read_range(key, 0, None)

    def fetch(
        self, key: str, start: int, stop: int | None, take: Taker, size: int = 0
    ) -> int | None:
        data = self._store.read_range(key, start, stop)
        if data is None:
            return None
        take(0, memoryview(data))
        return len(data)

    def close(self) -> None:
        pass
