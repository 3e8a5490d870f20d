"""What other libraries would say of credentials, taken out of their logs and errors.

Our own texts have no storage option in them. But the client libraries of S3 log, at level DEBUG,
requests with the access key and the session token in their headers, and keep answers of the store
that repeat them (Amazon S3 API, "Error responses") with the errors that they raise. And before they
have credentials at all, they log the answers that bring those: of a role, a single sign-on, a
program. So what is known is hidden by its value, and what is not by the place where it stands,
which makes it known. It knows strings, loggers and exceptions; nothing of requests.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["keep_quiet_about", "scrub"]

LIBRARIES = ("aiobotocore", "botocore", "boto3", "s3fs", "fsspec", "aiohttp", "urllib3")
LOGGERS = (
    *("botocore.endpoint", "botocore.auth", "botocore.parsers", "botocore.hooks"),
    *("botocore.httpsession", "botocore.credentials", "botocore.retryhandler"),
    *("botocore.tokens", "botocore.utils", "botocore.awsrequest", "botocore.handlers"),
    *("aiobotocore.endpoint", "aiobotocore.httpsession", "s3fs", "fsspec"),
    *("aiobotocore.credentials", "aiobotocore.tokens", "aiobotocore.utils"),
)
"""Also before their modules are imported: a logger made later has no filter."""
OPTIONS = ("key", "secret", "token", "username", "password", "account_key", "sas_token")
"""Storage options, and keyword arguments of the client, that are credentials or name one."""
CLIENT_OPTIONS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
PROFILE_VALUES = CLIENT_OPTIONS
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SHORTEST = 8
"""Shorter ones are no secrets, and would spoil what is logged."""
HIDDEN = "***"

_HEADERS = "x-amz-security-token|x-amz-sso_bearer_token|x-aws-ec2-metadata-token"
_NAMES = (
    "access_?key(?:_?id)?|secret_?(?:access_?)?key|session_?token|access_?token|refresh_?token|"
    "id_?token|token|client_?secret|password|web_?identity_?token|saml_?assertion|authorization"
)
_PLACES = re.compile(
    # In the Authorization header and in presigned URLs (Amazon S3 API reference, "Authenticating
    # Requests (AWS Signature Version 4)"): the access key comes before the date.
    r"Credential=(?P<signed>[^\s/%,*]+)(?=/|%2F)"
    # Of XML: the answers of the token service.
    rf"|<(?:{_NAMES})>(?P<element>[^<*]+)<"
    # Of JSON, and of dicts as Python shows them.
    rf"|\b(?:aws_)?(?:{_NAMES}|{_HEADERS})[\"']+\s*:\s*b?[\"'](?!AWS4-)(?P<quoted>[^\"'*]+)[\"']"
    # Of headers as they are signed, and of queries.
    rf"|\b(?:{_HEADERS})[:=](?P<plain>[^\s\"'*&,;]+)",
    re.IGNORECASE,
)
_NO_SECRETS = re.compile(r"\d{1,12}")

_TOLD = ("Code", "Message", "Region", "Endpoint", "Bucket", "BucketName", "Key", "Resource")
"""Of a store's own answer; its other members repeat the access key, the token, or what was
signed."""

_hidden: frozenset[str] = frozenset()  # replaced and never changed: other threads go through it
_lock = threading.Lock()


class _Filter(logging.Filter):
    """Replaces what is to be hidden in whatever passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See :meth:`logging.Filter.filter`; lets every record pass."""
        try:
            text = record.getMessage()
        except Exception:  # of a record that is not ours: whoever prints it will say so
            return True
        _learn(found for match in _PLACES.finditer(text) for found in match.groups() if found)
        shown = text
        # The longest first: one may be the beginning of another.
        for value in sorted(_hidden, key=len, reverse=True):
            shown = shown.replace(value, HIDDEN)
        if shown != text:
            record.msg, record.args = shown, None
        return True


_filter = _Filter()


def keep_quiet_about(options: Mapping[str, Any], *found: str | None) -> None:
    """Keep credentials out of what the client libraries log, from now on.

    Args:
        options: storage options; the environment's are kept out too.
        *found: credentials that come from elsewhere.
    """
    client = options.get("client_kwargs")
    given = [options.get(name) for name in OPTIONS]
    given += [client.get(name) for name in CLIENT_OPTIONS] if isinstance(client, Mapping) else []
    given += [os.environ.get(name) for name in VARIABLES]
    _learn([*given, *found])
    known = [name for name in logging.root.manager.loggerDict if name.startswith(LIBRARIES)]
    for name in {*LOGGERS, *known}:
        logging.getLogger(name).addFilter(_filter)  # once, however often it is called


def _learn(values: Iterable[object]) -> None:
    fresh = {
        value
        for value in values
        if isinstance(value, str) and len(value) >= SHORTEST and not _NO_SECRETS.fullmatch(value)
    }
    global _hidden
    if not fresh <= _hidden:
        with _lock:
            _hidden = _hidden | fresh


def _forget() -> None:
    # In a forked child, which may log through the filter: another thread may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


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
