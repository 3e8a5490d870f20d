"""What a store's refusals mean (Amazon S3 API, "Error responses"), each with its remedy, and
credentials kept out of errors and logs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardstore.errors import StorageError

LIBRARIES = ("aiobotocore", "botocore", "boto3", "s3fs", "fsspec", "aiohttp", "urllib3")
OPTIONS = ("key", "secret", "token", "username", "password", "account_key", "sas_token")
"""Storage options, and keyword arguments of the client, that are credentials or name one."""
CLIENT_OPTIONS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
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

_hidden: set[str] = set()


class _Hiding:
    """Makes log records as another factory does, without credentials in those of the libraries.

    Not a filter: those of a logger do not see what loggers below it log, and libraries make theirs
    when they please.
    """

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        if record.name.startswith(LIBRARIES):
            with suppress(Exception):  # of a record that is not ours: whoever prints it will say so
                _hide(record)
        return record


def _hide(record: logging.LogRecord) -> None:
    text = record.getMessage()
    _learn(found for match in _PLACES.finditer(text) for found in match.groups() if found)
    shown = text
    # The longest first: one may be the beginning of another.
    for value in sorted(_hidden, key=len, reverse=True):
        shown = shown.replace(value, HIDDEN)
    if shown != text:
        record.msg, record.args = shown, None


def keep_quiet_about(options: Mapping[str, Any], *found: str | None) -> None:
    """Keep credentials out of what the client libraries log, from now on.

    Args:
        options: storage options; the environment's are kept out too.
        *found: credentials that come from elsewhere.
    """
    client = options.get("client_kwargs")
    given = [options.get(name) for name in OPTIONS]
    given += [client.get(name) for name in CLIENT_OPTIONS] if isinstance(client, Mapping) else []
    given += [os.environ.get(name.upper()) for name in CLIENT_OPTIONS]
    _learn([*given, *found])
    make = logging.getLogRecordFactory()
    if not isinstance(make, _Hiding):
        logging.setLogRecordFactory(_Hiding(make))


def _learn(values: Iterable[object]) -> None:
    _hidden.update(
        value
        for value in values
        if isinstance(value, str) and len(value) >= SHORTEST and not _NO_SECRETS.fullmatch(value)
    )


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


_DENIED = (
    "the store refuses the credentials: check key, secret and token (or AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE), and what they are allowed to do in this bucket"
)
_REGION = (
    'the region does not fit the bucket: set it (AWS_REGION, or client_kwargs={"region_name": ...})'
)
_NO_BUCKET = "the bucket does not exist: create it, or correct the URL"
_REMEDIES = {
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": "the bucket's name is not valid: correct the URL",
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "InvalidAccessKeyId": _DENIED,
    "SignatureDoesNotMatch": _DENIED,
    "InvalidToken": _DENIED,
    "ExpiredToken": _DENIED,
    "Forbidden": _DENIED,
    "403": _DENIED,
    "401": _DENIED,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "400": "the store cannot make sense of the request: check region and endpoint",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "503": "the store is overloaded, or down: try again later",
    "404": _NO_BUCKET,
    "SlowDown": "the store is overloaded: save less often, or with fewer requests at a time",
    "QuotaExceeded": "the store's quota is used up: free space, or choose another bucket",
    "EntityTooLarge": "the object is too large for one request: save smaller chunks",
}
_NOT_THERE = "the store says that there is no such place: check the endpoint and the URL"
_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give storage_options"
)
NO_TRUST = (
    "the server's certificate is not trusted (name the file of those that are: AWS_CA_BUNDLE, or "
    "client_kwargs={'verify': FILE})"
)
_DENIED_ELSEWHERE = (
    "the store refuses the credentials: check those of the environment and in storage_options, and "
    "what they are allowed to do there"
)

_OF_READS = {
    "SlowDown": "the store is overloaded: try again later, or with fewer ranks at a time",
}
_READING = ("reading", "looking for", "listing")


def no_answer(url: str) -> str:
    """What to do where the store of a URL does not answer."""
    named = "endpoint_url, or AWS_ENDPOINT_URL" if _is_s3(url) else "in storage_options"
    return f"the store does not answer: check the endpoint ({named}) and the network"


def remedy(code: str | None, doing: str = "") -> str:
    """What to do about an answer of the store.

    Args:
        code: the store's own name for what went wrong, or the HTTP status.
        doing: what was asked for: who reads is not told what to do about saves.
    """
    found = _OF_READS.get(code or "") if doing in _READING else None
    return found or _REMEDIES.get(code or "", "see the store's own words")


def explained(doing: str, url: str, error: BaseException, **about: Any) -> StorageError:
    """What the store's library raised, as an error of ours with a remedy."""
    scrub(error)
    code = code_of(error)
    name = type(error).__name__
    text = (str(error).strip().splitlines() or [name])[0][:300].rstrip(".")
    if code is not None and code in _REMEDIES:
        advice = remedy(code, doing)
    elif name in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        advice = _CREDENTIALS
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        text, advice = "the connection was refused", NO_TRUST
    elif isinstance(error, PermissionError):
        advice = _DENIED if _is_s3(url) else _DENIED_ELSEWHERE
    elif isinstance(error, FileNotFoundError):
        advice = _NOT_THERE
    elif isinstance(error, TypeError):
        advice = "check the names of the storage options, which are those of fsspec's file system"
    elif code is None and (
        isinstance(error, ConnectionError | TimeoutError)
        or any(word in name for word in ("Connect", "Timeout", "Endpoint", "HTTPClient"))
    ):
        advice = no_answer(url)
    else:
        advice = "check the URL and the storage options"
    shown = f"{code}: {text}" if code and code not in text else text
    failure = StorageError(f"{doing} {url} failed: {shown}; {advice}", url=url, **about)
    failure.errno = getattr(error, "errno", None)
    return failure


def _is_s3(url: str) -> bool:
    return url.startswith(("s3://", "s3a://"))


def code_of(error: BaseException | None) -> str | None:
    """Return the store's own name for what went wrong (Amazon S3 API, "Error responses")."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            return None if code is None else str(code)
        error = error.__cause__
    return None


def is_refusal(failure: BaseException) -> bool:
    """Return whether a failed request is taken as one that is not carried out, now or later: the
    store refused its only try (HTTP 4xx), or had too much to do for the last one (``SlowDown``), or
    an operating system refused. All else leaves it open: no answer, one of something on the way
    (HTTP 5xx), or one to a repetition, while the first try may be waiting in the store.

    Args:
        failure: what the store's library raised, or the error of ours that it caused.
    """
    error: BaseException | None = failure
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            if code_of(error) == "SlowDown":
                return True
            about = response.get("ResponseMetadata") or {}
            return _is_4xx(about.get("HTTPStatusCode")) and not about.get("RetryAttempts")
        # adlfs; gcsfs
        if _is_4xx(getattr(error, "status_code", None)) or _is_4xx(getattr(error, "code", None)):
            return True
        last, error = error, error.__cause__
    if isinstance(last, ConnectionError | TimeoutError):
        return False
    return isinstance(last, PermissionError) or getattr(last, "errno", None) is not None


def _is_4xx(status: object) -> bool:
    return isinstance(status, int) and 400 <= status < 500
