"""Single objects of a store: through TensorStore on S3, through fsspec on other stores or if
TensorStore's driver does not support the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location, require_size
from shardstore.storage.stores.object_io import UNKNOWN_BYTES, ObjectIO, Parts, run_requests

logger = logging.getLogger(__name__)


class FileSystemIO(ObjectIO):
    """Puts and gets objects through an fsspec file system."""

    requests = small_requests = 8

    def __init__(self, location: Location) -> None:
        self._store = location.remote

    def put(self, key: str, parts: Parts, *, create: bool) -> bool:
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
    """Return the :class:`ObjectIO` of a location.

    Raises:
        StorageError: the store cannot be used.
    """
    why = (
        location.remote.s3_settings().unsupported if location.is_s3 else "another protocol than s3"
    )
    if not why:
        from shardstore.storage.stores.tensorstore import KvStoreIO

        return KvStoreIO(location)
    _say_once("/".join(location.url.split("/")[:3]), why)
    return FileSystemIO(location)


@cache
def _say_once(root: str, why: str) -> None:
    logger.info("%s: fsspec moves chunks too, as TensorStore does not take %s", root, why)


def read_many(
    location: Location, keys: Sequence[str], sizes: Sequence[int | None] = ()
) -> list[bytes | None]:
    """Read small documents, concurrently from an object store.

    Args:
        location: the location below which the documents are.
        keys: their names.
        sizes: their sizes, if the commit has them.

    Returns:
        Their contents; ``None`` for each document that does not exist.

    Raises:
        DamagedCheckpointError: a document is larger than its size; or a FIFO, a device or a socket
            has its name.
        StorageError: the store failed.
    """
    sizes = sizes or [None] * len(keys)
    if location.is_local:
        return [location.read_if_there(*wanted) for wanted in zip(keys, sizes, strict=True)]
    counters.add(documents_read=len(keys))
    found: list[bytes | None] = [None] * len(keys)
    if not keys:
        return found
    io = object_io(location)

    def begin(number: int, _: bool) -> Callable[[], None]:
        get = io.begin_get(keys[number], 0, io.end_of(sizes[number]))

        def finish() -> None:
            data = get()
            require_size(data, f"{location.url}/{keys[number]}", sizes[number])
            found[number] = None if data is None else bytes(data)

        return finish

    run_requests(io, range(len(keys)), begin)
    return found


def begin_create(
    io: ObjectIO, location: Location, key: str, parts: Parts, check: Callable[[], None]
) -> Callable[[], None]:
    """Start a conditional PUT. Return a function that waits for the end. If an object of that name
    exists, it is from an earlier try, whose answer was lost, or a leftover, or from a newer
    attempt.

    Args:
        io: puts and gets objects below the location.
        location: the location of the object.
        key: name of the object.
        parts: the content, in order.
        check: called before an object with other content is replaced; raises if it must stay.
    """
    put = io.begin_put(key, parts, create=True)

    def finish() -> None:
        if put():
            return
        there = io.get(key, size=sum(map(len, parts)))
        if there is None and not io.put(key, parts, create=True):
            raise location.child(key).error(
                ": the store says that the object exists, but has none of this name; save again"
            )
        if there not in (None, b"".join(parts)):
            check()
            io.put(key, parts, create=False)

    return finish
