"""How single objects are put and got: by TensorStore on S3, by fsspec elsewhere and where
TensorStore's driver does not take the settings.

A request is a call that blocks one thread; whoever has many runs them on as many threads as the
store takes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import run_batched
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import RemoteStore

__all__ = [
    "LARGE_BYTES",
    "MAX_OBJECT_BYTES",
    "UNKNOWN_BYTES",
    "ObjectIO",
    "object_io",
    "put_objects",
    "read_objects",
]

logger = logging.getLogger(__name__)

MAX_OBJECT_BYTES = 5 * 1024**3
"""The most that one PUT takes (Amazon S3 user guide, "Uploading objects")."""
LARGE_BYTES = 1024 * 1024
"""From this size on it is an object's bytes that take time, and not the wait for an answer."""
UNKNOWN_BYTES = 16 * 1024 * 1024
"""What a document of very many arrays may have."""

_said: set[tuple[str, str]] = set()


class ObjectIO(ABC):
    """Puts and gets objects below one location. Any thread may call it.

    Attributes:
        threads: how many requests at a time are of use.
        small_threads: how many for objects below :data:`LARGE_BYTES`.
    """

    threads: int
    small_threads: int

    @abstractmethod
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

    @abstractmethod
    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> bytes | None:
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


class FileSystemIO(ObjectIO):
    """Over a file system of fsspec: correct first, fast second."""

    threads = small_threads = 8

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
    ) -> bytes | None:
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


def read_objects(location: Location, keys: Sequence[str]) -> list[bytes | None]:
    """Read many small objects in parallel; ``None`` for one that is not there.

    Raises:
        StorageError: the store refused.
    """
    found: list[bytes | None] = [None] * len(keys)
    if not keys:
        return found
    counters.add(documents_read=len(keys))
    io = object_io(location)

    def work(batch: Sequence[tuple[int, str]]) -> None:
        for number, key in batch:
            found[number] = io.get(key)

    run_batched(list(enumerate(keys)), work, threads=io.small_threads)
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
    io = object_io(location)

    def work(batch: Sequence[tuple[str, bytes]]) -> None:
        for name, data in batch:
            if not io.put(name, [data], create=True):
                exists(name, data)

    run_batched(objects, work, threads=io.small_threads)
