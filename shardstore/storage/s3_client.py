"""Clients of obstore, made of what the control plane's client has found out, and of that alone.

obstore takes what it is not told from variables of the environment, and by rules of its own: a
session token beside keys that it does not belong to, an endpoint before the one that is given. So
it is told everything that has a name. It knows settings; it makes no request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardstore.storage.s3_settings import S3Settings

__all__ = ["s3_client"]

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
