"""How single objects are put and got: TensorStore for S3, the fsspec file system for all others.

Requests are started and waited for apart, so that a mover keeps many under way. It knows keys and
bytes; not what they mean.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import tensorstore as ts

from shardstore.errors import StorageError
from shardstore.storage.counters import counters
from shardstore.storage.location import Location
from shardstore.storage.remote import RemoteStore
from shardstore.storage.tensorstore_mover import shared_context
from shardstore.storage.tensorstore_store import has_driver, kvstore_spec, plain_words

__all__ = ["IN_FLIGHT", "MAX_OBJECT_BYTES", "ObjectIO", "object_io", "read_objects"]

IN_FLIGHT = 1024
"""Requests that are started at a time, however small; the store's own limit lets fewer run."""

MAX_OBJECT_BYTES = 5 * 1024**3
"""The most that one PUT takes (Amazon S3 user guide, "Uploading objects")."""
REQUEST_DEADLINE_S = 300.0
"""A request that takes longer, its retries included, is given up."""
FILE_SYSTEM_THREADS = 8
ABSENT = b"\x02"
"""The generation of a key that is not there; TensorStore sends it as ``If-None-Match: *``."""

_RANGES = "byte_range" in (ts.KvStore.read.__doc__ or "")
"""Whether this TensorStore reads parts of objects; older ones read the whole."""


class ObjectIO(Protocol):
    """Puts and gets objects below one location."""

    def put(self, key: str, data: bytes, *, create: bool) -> Callable[[], bool]:
        """Start writing an object.

        Args:
            key: its name.
            data: its content.
            create: only if there is no object of that name.

        Returns:
            Waits for the end, and tells whether the object was written; ``False``: there is one.
            Raises :class:`StorageError`.
        """

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Callable[[], bytes | None]:
        """Start reading bytes ``start:stop`` of an object.

        Returns:
            Waits for them; ``None``: there is no such object. Fewer bytes, or none, where it ends
            before ``stop``. Raises :class:`StorageError`.
        """

    def close(self) -> None:
        """End what threads there are; no request may be under way."""


def object_io(location: Location) -> ObjectIO:
    """Puts and gets at a location.

    Raises:
        StorageError: the store can not be used.
    """
    if has_driver(location):
        return _TensorStoreIO(location)
    return _FileSystemIO(location.remote)


def read_objects(location: Location, keys: Sequence[str]) -> list[bytes | None]:
    """Read many small objects in parallel; ``None`` for one that is not there.

    Raises:
        StorageError: the store refused.
    """
    if not keys:
        return []
    io = object_io(location)
    counters.add(documents_read=len(keys))
    pending: deque[Callable[[], bytes | None]] = deque()
    found: list[bytes | None] = []
    try:
        for key in keys:
            if len(pending) >= IN_FLIGHT:
                found.append(pending.popleft()())
            pending.append(io.get(key))
        while pending:
            found.append(pending.popleft()())
    finally:
        for finish in pending:
            with suppress(Exception):
                finish()
        io.close()
    return found


class _TensorStoreIO:
    def __init__(self, location: Location) -> None:
        self._url = location.url
        try:
            self._store = ts.KvStore.open(kvstore_spec(location), context=shared_context()).result(
                timeout=REQUEST_DEADLINE_S
            )
        except ValueError as error:
            raise self._error("opening", "", error) from None

    def put(self, key: str, data: bytes, *, create: bool) -> Callable[[], bool]:
        future = self._store.write(key, data, if_equal=ABSENT if create else None)

        def finish() -> bool:
            stamp = self._result("writing", key, future)
            # A generation of no bytes: the condition did not hold.
            return not create or bool(stamp.generation)

        return finish

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Callable[[], bytes | None]:
        ranged = _RANGES and (start, stop) != (0, None)
        limits: dict[str, Any] = {"byte_range": slice(start, stop)} if ranged else {}
        future = self._store.read(key, **limits)

        def finish() -> bytes | None:
            try:
                found = self._result("reading", key, future)
            except _RangeError:
                return b""
            if found.state == "missing":
                return None
            value: bytes = found.value
            return value if ranged else value[start:stop]

        return finish

    def close(self) -> None:
        pass

    def _result(self, doing: str, key: str, future: Any) -> Any:
        try:
            return future.result(timeout=REQUEST_DEADLINE_S)
        except TimeoutError:
            future.cancel()
            raise StorageError(
                f"{doing} {self._url}/{key} took longer than {REQUEST_DEADLINE_S:g} s; the store "
                "does not answer: check the endpoint and the network",
                url=f"{self._url}/{key}",
            ) from None
        except Exception as error:
            # The answer of the store in the text may have the access key in it.
            raise self._error(doing, key, error) from None

    def _error(self, doing: str, key: str, error: Exception) -> StorageError:
        text = str(error)
        url = f"{self._url}/{key}" if key else self._url
        if text.startswith("OUT_OF_RANGE"):
            return _RangeError(f"{doing} {url}: it ends before the range", url=url)
        return StorageError(f"{doing} {url} failed: {plain_words(text)}; {_remedy(text)}", url=url)


class _RangeError(StorageError):
    """The object ends before the range begins."""


def _remedy(text: str) -> str:
    if text.startswith("PERMISSION_DENIED"):
        return "check the credentials, and what they are allowed to do in this bucket"
    if "SlowDown" in text or "http_response_code='503'" in text:
        return "the store is overloaded: save less often, or with fewer requests at a time"
    if "CURL" in text or text.startswith(("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")):
        return "the store does not answer: check the endpoint and the network"
    return "see the store's own words"


class _FileSystemIO:
    """Over a file system of fsspec: correct first, fast second."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(FILE_SYSTEM_THREADS, "shardstore-objects")

    def put(self, key: str, data: bytes, *, create: bool) -> Callable[[], bool]:
        def work() -> bool:
            if create:
                return self._store.create(key, data)
            self._store.write(key, data)
            return True

        return self._pool.submit(work).result

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Callable[[], bytes | None]:
        future: Future[bytes | None] = self._pool.submit(self._store.read_range, key, start, stop)
        return future.result

    def close(self) -> None:
        self._pool.shutdown(wait=True)
