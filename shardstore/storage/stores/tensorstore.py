"""Puts and gets objects of S3 and Google Cloud Storage through TensorStore's key-value stores.
Arrays that TensorStore decodes use the same stores.

A write is one request, conditional or not. A read is one GET, or several ranged GETs for a large
object. TensorStore retries failed requests and aborts requests that transfer no bytes
(``TENSORSTORE_CURL_LOW_SPEED_*``, set in :mod:`.s3`). It reads those of S3 from an in-memory file
that only this process has open (Linux man-pages, memfd_create(2)); no spec, ``repr`` or error
contains them.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import IO, Any, TypeVar

import tensorstore as ts

from shardstore.errors import StorageError
from shardstore.storage.stores.errors import NO_TRUST, REGION, no_answer, remedy, too_late
from shardstore.storage.stores.gcs import ENDPOINT, GcsSettings
from shardstore.storage.stores.object_io import LARGE_BYTES, UNKNOWN_BYTES, ObjectIO, Parts, Pieces
from shardstore.storage.stores.remote import RemoteStore
from shardstore.storage.stores.s3 import S3Settings
from shardstore.storage.stores.s3_uploads import begin_upload

T = TypeVar("T")

REQUESTS = 256
"""Concurrent requests of a process."""
RETRIES = 8
KEPT_BYTES = 32 * 1024 * 1024 - 64 * 1024
"""Size of a block that is allocated and freed before the first request. After that, glibc keeps
freed blocks up to this size for later requests (Linux man-pages, mallopt(3), M_MMAP_THRESHOLD).
Fresh pages for each object would take as much processor time as the rest of a load."""
PART_BYTES, MOST_PARTS = 16 * 1024 * 1024 + 64 * 1024, 8
"""Larger objects are read in parts. The allocator keeps the memory of those that were copied; a
chunk of 32 MiB and its checksum are two parts."""
ASKED_EVERY_S = 30.0
"""Seconds between two requests to botocore for credentials, which it renews some minutes before
they expire."""
NOTHING_THERE = b"\x02"
"""Generation of an object that does not exist."""
REFUSED = b""
"""Generation that TensorStore returns for a write whose condition did not hold."""

_BODY = re.compile(r"\s*\[(?!http_response_code)[\w-]+='(?:[^'\\]|\\.)*'\]")
_CODE = re.compile(r"<Code>([\w.]+)</Code>")
_STATUS = re.compile(r"http_response_code='(\d+)'")

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_copier = ThreadPoolExecutor(1, "shardstore-copies")


def _copied(copy: Callable[[], T], size: int) -> T:
    """Return a copy of an object, made by ``copy``. Large objects are copied one at a time, because
    during the copy the object is in memory twice, and in one thread, because the allocator keeps
    memory for each thread."""
    if size >= LARGE_BYTES:
        with suppress(RuntimeError):  # the pool rejects jobs during interpreter shutdown
            return _copier.submit(copy).result()
    return copy()


@cache
def shared_context() -> ts.Context:
    """Return the context of this process. It has one limit for requests, and no chunk cache,
    because each chunk is read once."""
    bytes(KEPT_BYTES)
    retries = {"max_retries": RETRIES, "initial_delay": "200ms", "max_delay": "5s"}
    limits = {f"{store}_request_concurrency": {"limit": REQUESTS} for store in ("s3", "gcs")}
    tries = {f"{store}_request_retries": retries for store in ("s3", "gcs")}
    return ts.Context({"cache_pool": {"total_bytes_limit": 0}, **limits, **tries})


def plain_words(text: str) -> str:
    """Return TensorStore's error text without the answer of the store, which may contain the access
    key."""
    code = _CODE.search(text)
    shown = (_BODY.sub("", text).splitlines() or [""])[0][:400]
    return shown if code is None or code.group(1) in shown else f"{code.group(1)}: {shown}"


def _pieces(parts: deque[Callable[[], bytes | None]]) -> Pieces:
    """Wait for the parts and yield them; popleft frees TensorStore's copy of each."""
    while parts and (data := parts.popleft()()) is not None:
        yield data
        del data


@dataclass(frozen=True)
class OpenStore:
    """An open key-value store with the credentials at the time of opening.

    Attributes:
        context: the TensorStore context.
        spec: the specification (TensorStore documentation, "s3 Key-Value Store driver", "gcs
            Key-Value Store driver").
        kvs: the store.
        secrets: the file from which TensorStore reads credentials of S3 at the first request.
    """

    context: ts.Context
    spec: dict[str, Any]
    kvs: ts.KvStore
    secrets: IO[str] | None


class KvStoreIO(ObjectIO):
    """Puts and gets objects through TensorStore.

    Args:
        url: URL of a prefix in a bucket.
        options: its storage options.

    Raises:
        StorageError: there are no credentials, or the settings do not fit.
    """

    requests = 32
    small_requests = 160
    put_copies = 2  # the joined parts, and TensorStore's copy of its argument
    blocks = False
    reads_past_end = False

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options, self._lock = url, options, threading.Lock()
        self._asked_at = -math.inf
        self.opened()
        if self._unsigned is not None:  # botocore sends the parts from where they are
            self.put_copies = 0

    def opened(self) -> OpenStore:
        """Return the store, with credentials that are valid for some more minutes."""
        with self._lock:
            if (now := time.monotonic()) >= self._asked_at + ASKED_EVERY_S:
                self._remote, self._asked_at = RemoteStore(self._url, self._options), now
                self._settings = found = self._remote.driver_settings()
                self._unsigned = (
                    found if isinstance(found, S3Settings) and found.is_unsigned else None
                )
            return _open(self._url, self._settings, shared_context())

    def begin_put(self, key: str, parts: Parts, *, create: bool) -> Callable[[], bool]:
        """See :meth:`ObjectIO.begin_put`."""
        condition, size = NOTHING_THERE if create else None, sum(map(len, parts))
        store = self.opened()
        if self._unsigned is not None:
            return begin_upload(self._remote, self._unsigned, key, parts, create=create)
        future = _copied(lambda: store.kvs.write(key, b"".join(parts), if_equal=condition), size)
        written = self._begun("writing", key, size, store, future)
        return lambda: bool(written().generation != REFUSED)

    def begin_get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> Pieces:
        """See :meth:`ObjectIO.begin_get`."""
        size = size if stop is None else min(size, stop - start)
        count = min(max(1, -(-size // PART_BYTES)), MOST_PARTS)
        starts = range(start, start + max(size, 1), -(-size // count) or 1)
        ranges = zip(starts, [*starts[1:], stop], strict=True)
        return _pieces(deque(self._begin_range(key, *part, size) for part in ranges))

    def _begin_range(
        self, key: str, start: int, stop: int | None, size: int
    ) -> Callable[[], bytes | None]:
        part, store = slice(start, stop) if (start, stop) != (0, None) else None, self.opened()
        read = self._begun("reading", key, size, store, store.kvs.read(key, byte_range=part))

        def finish() -> bytes | None:
            why = _APART
            try:
                found = read()
                if found.state != "missing":
                    data: bytes = _copied(lambda: found.value, size)
                    return data
            except UnreadError as error:
                why = error.why
            there = self._remote.read_range(key, start, stop, size)
            if there is not None and why:
                _warn_once(self._url, why)
            return there

        return finish

    def require_seen(self, key: str) -> None:
        """Raise :class:`StorageError` if fsspec finds an object that TensorStore does not find."""
        store = self.opened()
        read = self._begun("reading", key, UNKNOWN_BYTES, store, store.kvs.read(key))
        if read().state == "missing":
            require_absent(self._remote, key)

    def _begun(
        self, doing: str, key: str, size: int, opened: OpenStore, future: Any
    ) -> Callable[[], Any]:
        """Return a function that waits for a started request and returns its result."""
        began, url = time.monotonic(), f"{self._url}/{key}"

        def finish() -> Any:
            try:
                return wait(future, self._remote, opened.context, size, began)
            except ValueError as error:
                failure = _failure(doing, url, str(error))
            # Raised outside of the handler: the caught error, which would be the context, may
            # contain the access key in the store's answer.
            raise failure

        return finish


def wait(
    future: Any, remote: RemoteStore, context: ts.Context, size: int, began: float | None = None
) -> Any:
    """Wait for a request of ``size`` bytes and return its result. The deadline counts from
    ``began``, a time of :func:`time.monotonic`; ``None``: now.

    Raises:
        StorageError: no answer came in time. The request is cancelled, and later requests use a new
            context.
        ValueError: any other error of TensorStore.
    """
    seconds, now = remote.deadline_s(size), time.monotonic()
    try:
        found = future.result(timeout=max(0.0, (began or now) + seconds - now))
        remote.has_answered()
        return found
    except NotImplementedError as error:  # HTTP 501
        raise ValueError(str(error)) from None
    except TimeoutError:
        future.cancel()
        # A cancelled request counts against the limit of its context until the server answers.
        with _lock:
            if shared_context() is context:
                shared_context.cache_clear()
    raise too_late(remote.url, seconds)


_APART = (
    "fsspec finds an object that TensorStore does not find: the two clients reach different "
    "servers; compare HTTP_PROXY, ALL_PROXY and NO_PROXY in capital and small letters"
)


@cache
def _warn_once(url: str, why: str) -> None:
    logger.warning("%s: %s. fsspec reads it, more slowly", url, why)


def require_absent(remote: RemoteStore, key: str) -> None:
    """Raise :class:`StorageError` if fsspec finds an object that TensorStore does not find."""
    if remote.exists(key):
        url = f"{remote.url}/{key}"
        raise StorageError(f"{url}: {_APART}", url=url)


class UnreadError(StorageError):
    """TensorStore did not read an object that fsspec may read.

    Attributes:
        why: the reason, for a warning; empty: none is needed.
    """

    why = ""


def _failure(doing: str, url: str, text: str) -> StorageError:
    if text.startswith("OUT_OF_RANGE"):
        return UnreadError(f"{doing} {url}: it ends before the range does", url=url)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        said = f"HTTP {status[1]}" if code is None else f"{code[1]} (HTTP {status[1]})"
        advice = remedy((code or status)[1], doing, url)
    else:
        said = plain_words(text)
        advice = NO_TRUST if "curl_code='60'" in text else no_answer(url)
    text = f"{doing} {url} failed: {said}; {advice}"
    if advice != REGION or doing != "reading":
        return StorageError(text, url=url)
    failure = UnreadError(text, url=url)  # botocore follows the store to the bucket's region
    failure.why = advice
    return failure


@lru_cache(maxsize=64)
def _open(url: str, settings: S3Settings | GcsSettings, context: ts.Context) -> OpenStore:
    _, _, bucket, *path = url.split("/", 3)
    prefix, secrets = "".join(f"{below}/" for below in path), None
    if isinstance(settings, S3Settings):
        spec, secrets = _s3_spec(bucket, settings)
    elif settings.unsupported:  # TensorStore would read another server, or as another user
        raise StorageError(
            f"{url}: TensorStore does not take {settings.unsupported}; use this machine's default "
            f"credentials, and set {ENDPOINT} for a server that is not Google's",
            url=url,
        )
    else:
        spec = {"driver": "gcs", "bucket": bucket}
    spec["path"] = prefix
    try:
        store = ts.KvStore.open(spec, context=context).result()
    except ValueError as error:
        failure = _failure("opening", url, str(error))
    else:
        return OpenStore(context, spec, store, secrets)
    raise failure  # outside of the handler, as in _begun


def _s3_spec(bucket: str, settings: S3Settings) -> tuple[dict[str, Any], IO[str] | None]:
    secrets, credentials = None, {"type": "anonymous"}
    if settings.credentials is not None:
        # The lock makes concurrent threads share one file: the cache would close a second one.
        with _lock:
            secrets = _secrets(settings.credentials)
        credentials = {
            "type": "profile",
            "profile": "shardstore",
            "credentials_file": f"/proc/self/fd/{secrets.fileno()}",
            "config_file": os.devnull,
        }
    endpoint = settings.endpoint
    if settings.in_host:  # the driver reads the bucket from the host if it gets no name
        scheme, _, host = endpoint.partition("://")
        endpoint, bucket = f"{scheme}://{bucket}.{host}", ""
    spec = {
        "driver": "s3",
        "bucket": bucket,
        "aws_region": settings.region,
        "endpoint": endpoint,
        "use_conditional_write": True,
        "aws_credentials": credentials,
    }
    return spec, secrets


@lru_cache(maxsize=64)
def _secrets(credentials: tuple[str | None, ...]) -> IO[str]:
    """Return an in-memory file with the credentials. It stays open, because TensorStore reads it at
    its first request."""
    names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    lines = [f"{n} = {v}" for n, v in zip(names, credentials, strict=True) if v]
    file = os.fdopen(os.memfd_create("credentials", os.MFD_CLOEXEC), "w")
    file.write("\n".join(["[shardstore]", *lines, ""]))
    file.flush()
    return file
