"""What other libraries would say of credentials, taken out of their logs and errors.

Our own texts have no storage option in them. But the client libraries of S3 log, at level DEBUG,
requests with the access key and the session token in their headers, and keep answers of the store
that repeat them (Amazon S3 API, "Error responses") with the errors that they raise. It knows
strings, loggers and exceptions; nothing of requests.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["keep_quiet_about", "scrub"]

LIBRARIES = ("aiobotocore", "botocore", "boto3", "s3fs", "fsspec", "aiohttp", "urllib3")
LOGGERS = (
    *("botocore.endpoint", "botocore.auth", "botocore.parsers", "botocore.hooks"),
    *("botocore.httpsession", "botocore.credentials", "botocore.retryhandler"),
    *("aiobotocore.endpoint", "aiobotocore.httpsession", "s3fs", "fsspec"),
)
OPTIONS = ("key", "secret", "token", "username", "password", "account_key", "sas_token")
"""Storage options, and keyword arguments of the client, that are credentials or name one."""
CLIENT_OPTIONS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SHORTEST = 8
"""Shorter ones are no secrets, and would spoil what is logged."""
HIDDEN = "***"

_TOLD = ("Code", "Message", "Region", "Endpoint", "Bucket", "BucketName", "Key", "Resource")
"""Of a store's own answer; its other members repeat the access key, the token, or what was
signed."""

_hidden: set[str] = set()
_lock = threading.Lock()


class _Filter(logging.Filter):
    """Replaces what is to be hidden in whatever passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See :meth:`logging.Filter.filter`; lets every record pass."""
        try:
            text = record.getMessage()
        except Exception:  # of a record that is not ours: whoever prints it will say so
            return True
        shown = text
        for value in tuple(_hidden):
            shown = shown.replace(value, HIDDEN)
        if shown != text:
            record.msg, record.args = shown, None
        return True


_filter = _Filter()


def keep_quiet_about(options: Mapping[str, Any]) -> None:
    """Keep credentials out of what the client libraries log, from now on.

    Args:
        options: storage options; the environment's are kept out too.
    """
    client = options.get("client_kwargs")
    given = [options.get(name) for name in OPTIONS]
    given += [client.get(name) for name in CLIENT_OPTIONS] if isinstance(client, Mapping) else []
    given += [os.environ.get(name) for name in VARIABLES]
    with _lock:
        _hidden.update(v for v in given if isinstance(v, str) and len(v) >= SHORTEST)
    known = [name for name in logging.root.manager.loggerDict if name.startswith(LIBRARIES)]
    for name in {*LOGGERS, *known}:
        logging.getLogger(name).addFilter(_filter)  # once, however often it is called


def scrub(error: BaseException) -> None:
    """Take what repeats credentials out of an error of a client library, and out of those that it
    came from."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            said = response["Error"]
            response["Error"] = {name: said[name] for name in _TOLD if name in said}


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__]
