"""Objects of S3 by obstore: one PUT an object, conditional or not, and GETs that stream.

TensorStore's own driver asks with a HEAD before each conditional PUT, copies what it sends, and
hands over what came as one copy more; measured on Ceph's gateway that is a third more work of the
server for small objects, and twice the time for large reads. Here a request is a call that blocks
one thread, takes a bounded time and is tried a bounded number of times. It knows keys and bytes;
not what they mean.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from shardstore.errors import StorageError
from shardstore.storage.stores.errors import NOT_RENEWED, no_answer, remedy
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3_settings import S3Settings, s3_settings

__all__ = ["S3IO", "s3_client"]

KEPT_CLIENTS = 16
_OWN_ENDPOINT = "AWS_ENDPOINT_URL_S3"
"""A variable that obstore (0.12) puts before an endpoint that it is given."""

_clients: dict[object, Any] = {}
_lock = threading.Lock()


def s3_client(settings: S3Settings, bucket: str, seconds: int, *, sends: bool, signed: bool) -> Any:
    """A client, kept for the next: connections are what takes time.

    Args:
        settings: endpoint, credentials and the rest.
        bucket: its name.
        seconds: that a request may take.
        sends: whether it sends objects, or gets them.
        signed: whether signatures cover what is sent.
    """
    from obstore.store import S3Store

    known = (os.getpid(), settings, bucket, seconds, sends, signed)
    with _lock:
        found = _clients.get(known)
        if found is not None:
            return found
        client = S3Store(
            bucket,
            region=settings.region,
            client_options=_connections(settings, seconds, sends),
            retry_config={"max_retries": 0},
            config=_config(settings, bucket, signed),
            credential_provider=_credentials(settings),
        )
        while len(_clients) >= KEPT_CLIENTS:
            del _clients[next(iter(_clients))]
        _clients[known] = client
        return client


def _connections(settings: S3Settings, seconds: int, sends: bool) -> Any:
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
        "timeout": timedelta(seconds=seconds),
        "allow_http": not settings.tls,
        "allow_invalid_certificates": settings.verify is False,
    }
    if not sends:
        # Of an answer each piece is waited for; what is sent gives no sign on its way.
        options["read_timeout"] = timedelta(seconds=settings.read_timeout_s)
    if isinstance(settings.verify, str):
        options["root_certificate"] = Path(settings.verify).read_bytes()
    if settings.proxy is not None:
        options["proxy_url"] = settings.proxy
    return options


def _config(settings: S3Settings, bucket: str, signed: bool) -> Any:
    config: dict[str, Any] = {
        "conditional_put": "etag",
        "request_payer": settings.requester_pays,
        "skip_signature": settings.anonymous,
        "unsigned_payload": not signed,
        "virtual_hosted_style_request": settings.virtual_hosts,
        **dict(settings.encryption),
    }
    if settings.endpoint:
        endpoint = settings.endpoint
        if settings.virtual_hosts:
            scheme, _, rest = endpoint.partition("://")
            endpoint = f"{scheme}://{bucket}.{rest}"
        config["endpoint"] = endpoint
        if _OWN_ENDPOINT in os.environ:
            config["aws_endpoint_url_s3"] = endpoint
    return config


def _credentials(settings: S3Settings) -> Callable[[], Any] | None:
    if settings.anonymous:
        return None
    if settings.renewed is not None:
        return settings.renewed
    if settings.key is None:
        return None
    given = {
        "access_key_id": settings.key,
        "secret_access_key": settings.secret,
        "token": settings.token,
        "expires_at": None,
    }
    return lambda: given


T = TypeVar("T")

REQUESTS = 32
"""At a time, each process."""
SMALL_REQUESTS = 64
"""Of small objects, where what each of them takes is the wait for its answer."""
TRIES = 8
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0
TRYING_S = 90.0
"""No try begins later than this after the first one failed, which may have taken long: a large
object that broke off near its end is worth another. After a try that had no answer in time, it
counts from the beginning: who waited for long does not do so twice."""
SLOWEST_BYTES_PER_S = 128 * 1024
"""A request may take as long as its bytes take at this rate, beside the wait for the answer."""
DOCUMENT_BYTES = 16 * 1024 * 1024
"""What an object of unknown size may have at that rate: documents of very many arrays."""
STREAM_BYTES = 256 * 1024
"""An answer is handed on in pieces of about this size."""
WHOLE_BYTES = 1024 * 1024
"""Answers up to this size are taken in one piece: one call in place of several."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.]+)</Code>")
_NO_ANSWER_IN_TIME = "no answer in time"
_NOT_RENEWED = "the credentials can not be renewed"
_NO_TRUST = (
    "the server's certificate is not trusted (name the file of those that are: AWS_CA_BUNDLE, or "
    "client_kwargs={'verify': FILE})"
)
_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})


class S3IO:
    """See :class:`~shardstore.storage.stores.object_io.ObjectIO`.

    Args:
        location: a prefix of a bucket.

    Raises:
        StorageError: obstore is missing, there are no credentials, or no connection.
    """

    threads = REQUESTS
    small_threads = SMALL_REQUESTS

    def __init__(self, location: Location) -> None:
        try:
            import obstore  # the extra "s3" brings it
        except ImportError as error:
            raise StorageError(
                f"{location.url}: s3:// needs obstore (pip install 'shardstore[s3]'): {error}",
                url=location.url,
            ) from error
        self._obstore: Any = obstore
        self._url = location.url
        self._bucket, _, path = location.url.partition("://")[2].partition("/")
        self._prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        self._settings = s3_settings(location)
        self._clients: dict[tuple[int, bool, bool], Any] = {}

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
        """See :meth:`ObjectIO.put`."""
        size = sum(map(len, parts))
        store = self._store(size, sends=True, signed=self._settings.signs(size))
        mode = "create" if create else "overwrite"

        def work() -> bool:
            try:
                self._obstore.put(store, self._prefix + key, parts, mode=mode, use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            return True

        return self._tried("writing", key, work)

    def get(self, key: str) -> bytes | None:
        """See :meth:`ObjectIO.get`."""
        store = self._store(DOCUMENT_BYTES)

        def work() -> bytes | None:
            try:
                found: bytes = self._obstore.get(store, self._prefix + key).bytes().to_bytes()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            return found

        return self._tried("reading", key, work)

    def fetch(
        self,
        key: str,
        start: int,
        stop: int | None,
        take: Callable[[int, memoryview], None],
        size: int = 0,
    ) -> int | None:
        """See :meth:`ObjectIO.fetch`."""
        store = self._store(size if stop is None else stop - start)
        options: Any = None
        if (start, stop) != (0, None):
            options = {"range": {"offset": start} if stop is None else (start, stop)}

        def work() -> int | None:
            try:
                answer = self._obstore.get(store, self._prefix + key, options=options)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            first, last = answer.range
            if last - first <= WHOLE_BYTES:
                piece = memoryview(answer.bytes()).cast("B")
                take(0, piece)
                return len(piece)
            position = 0
            for buffer in answer.stream(min_chunk_size=STREAM_BYTES):
                piece = memoryview(buffer).cast("B")
                take(position, piece)
                position += len(piece)
            return position

        try:
            return self._tried("reading", key, work)
        except _RangeError:
            take(0, memoryview(b""))
            return 0

    def close(self) -> None:
        """Nothing to end: connections are kept for the next."""

    def _store(self, size: int, *, sends: bool = False, signed: bool = True) -> Any:
        """The client for requests of this size."""
        # A power of two of seconds, so that there are few clients.
        seconds = self._settings.read_timeout_s
        allowed = 1 << (int(seconds + size / SLOWEST_BYTES_PER_S) - 1).bit_length()
        found = self._clients.get((allowed, sends, signed))
        if found is None:
            found = s3_client(self._settings, self._bucket, allowed, sends=sends, signed=signed)
            self._clients[allowed, sends, signed] = found
        return found

    def _tried(self, doing: str, key: str, work: Callable[[], T]) -> T:
        """Do it, again where that may help."""
        began = time.monotonic()
        failed_at: float | None = None
        delay = FIRST_DELAY_S
        for left in reversed(range(TRIES)):
            try:
                return work()
            except (self._obstore.exceptions.BaseError, OSError) as error:
                failure = self._failure(doing, key, error)
                status = _status(error)
                # Waiting is no better a second time: for an answer, or for credentials.
                slow = (_NO_ANSWER_IN_TIME, _NOT_RENEWED)
                timed_out = status is None and _silent(str(error)) in slow
            now = time.monotonic()
            failed_at = now if failed_at is None else failed_at
            tried_s = now - (began if timed_out else failed_at)
            again = status is None or status in _AGAIN
            if not (again and left and tried_s < TRYING_S):
                # Not while the other is handled: the store's own answer in it, which would be the
                # context of ours, may have the access key.
                raise failure
            time.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, MAX_DELAY_S)
        raise AssertionError

    def _failure(self, doing: str, key: str, error: Exception) -> StorageError:
        text, status = str(error), _status(error)
        url = f"{self._url}/{key}"
        if status == 416:
            return _RangeError(f"{doing} {url}: it ends before the range", url=url)
        found = _CODE.search(text)
        code = found.group(1) if found else None
        if status is not None:
            said = f"{code} (HTTP {status})" if code else f"HTTP {status}"
            hint = remedy(code or str(status), doing)
        else:
            said = _silent(text)
            hint = NOT_RENEWED if said == _NOT_RENEWED else no_answer(url)
        return StorageError(f"{doing} {url} failed: {said}; {hint}", url=url)


class _RangeError(StorageError):
    """The object ends before the range begins."""


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else None


def _silent(text: str) -> str:
    for sign, words in (
        ("kind: Timeout", _NO_ANSWER_IN_TIME),
        ("TimedOut", _NO_ANSWER_IN_TIME),
        ("ConnectionRefused", "connection refused"),
        ("dns error", "the host's name is not known"),
        ("invalid peer certificate", _NO_TRUST),
        ("credential provider", _NOT_RENEWED),
        ("kind: Connect", "no connection"),
    ):
        if sign in text:
            return words
    return "the connection broke"
