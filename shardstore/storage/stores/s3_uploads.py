"""Uploads objects, and parts of objects, to S3 through botocore, which sends them from where they
are.

TensorStore's driver takes the content as one ``bytes``, copies it, and signs its SHA-256, and s3fs
takes more processor time. Where the options ask for it, signatures leave the content out (Amazon S3
API, "UNSIGNED-PAYLOAD"): chunks have checksums of their own, which each load verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import Any, TypeVar

from shardstore.storage.stores.errors import too_late
from shardstore.storage.stores.object_io import Parts
from shardstore.storage.stores.remote import RemoteStore, unless_there
from shardstore.storage.stores.s3 import S3Settings, config_options

T = TypeVar("T")

REQUESTS = 32
"""Concurrent uploads of a process. Each has a thread, which mostly waits for the socket."""
PIECE_BYTES = 1024 * 1024
"""Bytes given to the socket at a time."""


class Body:
    """A file-like object with the content of an object, without a copy of it.

    Args:
        parts: the content, in order.
    """

    def __init__(self, parts: Parts) -> None:
        self._views = [memoryview(part).cast("B") for part in parts]
        self._size, self._at = sum(map(len, self._views)), 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position of the next byte. See :meth:`io.IOBase.seek`."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, _: int = -1) -> memoryview:
        """Return the next piece, of :data:`PIECE_BYTES` or less; empty at the end. The HTTP client
        asks for much smaller ones."""
        start = self._at
        for view in self._views:
            if start < len(view):
                piece = view[start : start + PIECE_BYTES]
                self._at += len(piece)
                return piece
            start -= len(view)
        return memoryview(b"")


_threads = ThreadPoolExecutor(REQUESTS, "shardstore-uploads")


@lru_cache(maxsize=64)
def _client(settings: S3Settings) -> Any:
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config

    is_of_amazon = "amazonaws.com" in settings.endpoint
    style = "virtual" if settings.in_host else "auto" if is_of_amazon else "path"
    signing = False if settings.is_unsigned else None
    key, secret, token = settings.credentials or (None, None, None)
    # AWS_PROFILE may name a profile that does not exist beside options that name another.
    session = botocore.session.Session(session_vars={"profile": (None, None, None, None)})
    return session.create_client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=Config(
            **config_options(
                s3={"addressing_style": style, "payload_signing_enabled": signing},
                signature_version=None if settings.credentials else UNSIGNED,
                max_pool_connections=REQUESTS,
            )
        ),
    )


def begin_upload(
    remote: RemoteStore, settings: S3Settings, key: str, parts: Parts, *, create: bool
) -> Callable[[], bool]:
    """Start a PUT. See :meth:`ObjectIO.begin_put`. ``parts`` must not change before its end."""
    condition = {"IfNoneMatch": "*"} if create else {}
    put = partial(_client(settings).put_object, **condition)
    return _begin(remote, key, Body(parts), lambda **about: unless_there(partial(put, **about)))


def upload_part(
    remote: RemoteStore, settings: S3Settings, key: str, parts: Parts, **about: Any
) -> str:
    """Upload a part of an object, and return its tag (Amazon S3 API, "UploadPart").

    Args:
        remote: location of the object.
        settings: those of its store.
        key: name of the object.
        parts: its bytes, in order; not copied.
        about: further arguments of the request: the ID of the upload, and the part's number.

    Raises:
        StorageError: the store refused, or did not answer.
    """
    answer = _begin(remote, key, Body(parts), partial(_client(settings).upload_part, **about))()
    tag: str = answer["ETag"]
    return tag


def _begin(remote: RemoteStore, key: str, body: Body, request: Callable[..., T]) -> Callable[[], T]:
    """Start a request that sends a body. Return a function that waits for the answer."""
    _, _, bucket, *above = f"{remote.url}/{key}".split("/", 3)
    future = _threads.submit(request, Bucket=bucket, Key=above[0], Body=body)
    seconds = remote.deadline_s(len(body))

    def finish() -> T:
        with remote.errors("writing", key):
            if not wait([future], seconds).done:
                future.cancel()
                raise too_late(remote.url, seconds)
            answer = future.result()
        remote.has_answered()
        return answer

    return finish
