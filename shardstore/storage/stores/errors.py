"""Explains the errors of a store (Amazon S3 API, "Error responses") with a remedy for each, and
keeps credentials out of errors and logs."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from shardstore.errors import StorageError

LIBRARIES = (
    *("aiobotocore", "botocore", "boto3", "s3fs", "fsspec", "aiohttp", "urllib3"),
    *("gcsfs", "google", "requests"),
)
OPTIONS = ("key", "secret", "token", "username", "password", "account_key", "sas_token")
"""Storage options that are credentials. :data:`CLIENT_OPTIONS` are those of the client."""
CLIENT_OPTIONS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
SHORTEST = 8
"""Minimum length of a secret: hiding shorter texts would make logs unreadable."""
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
    # In XML: the answers of the token service.
    rf"|<(?:aws)?(?:{_NAMES})>(?P<element>[^<*]+)<"
    # In JSON, and in the repr of Python dicts.
    rf"|\b(?:aws_)?(?:{_NAMES}|{_HEADERS})[\"']+\s*:\s*b?[\"'](?!AWS4-)(?P<quoted>[^\"'*]+)[\"']"
    # In signed headers, and in query strings.
    rf"|\b(?:{_HEADERS})[:=](?P<plain>[^\s\"'*&,;]+)",
    re.IGNORECASE,
)
_NO_SECRETS = re.compile(r"\d{1,12}")

_TOLD = ("Code", "Message", "Region", "Endpoint", "Bucket", "BucketName", "Key", "Resource")
"""Members of a store's answer that errors may show. Others repeat the access key, the token or the
signed text."""

_hidden: set[str] = set()


def _hidden_record(
    make: Callable[..., logging.LogRecord], *args: Any, **kwargs: Any
) -> logging.LogRecord:
    """Make a log record by another factory, and remove credentials from the records of the client
    libraries.

    A filter does not suffice: the filters of a logger do not see the records of its child loggers,
    and libraries create child loggers at any time.
    """
    record = make(*args, **kwargs)
    if record.name.startswith(LIBRARIES):
        with suppress(Exception):  # a malformed record: its handler reports the error
            _hide(record)
    return record


def _hide(record: logging.LogRecord) -> None:
    if record.name.endswith((".credentials", ".tokens")):
        record.exc_info = None  # the caller gets this error, with a remedy
    text = record.getMessage()
    _learn(found for match in _PLACES.finditer(text) for found in match.groups() if found)
    shown = text
    # The longest first: one secret may be a prefix of another.
    for value in sorted(_hidden, key=len, reverse=True):
        shown = shown.replace(value, HIDDEN)
    if shown != text:
        record.msg, record.args = shown, None


def keep_quiet_about(options: Mapping[str, Any], *found: str | None) -> None:
    """Remove credentials from all later log records of the client libraries.

    Args:
        options: storage options with credentials. Those of the environment are removed too.
        *found: credentials from other sources.
    """
    client = options.get("client_kwargs")
    given = [options.get(name) for name in OPTIONS]
    given += [client.get(name) for name in CLIENT_OPTIONS] if isinstance(client, Mapping) else []
    given += [os.environ.get(name.upper()) for name in CLIENT_OPTIONS]
    _learn([*given, *found])
    make = logging.getLogRecordFactory()
    if getattr(make, "func", None) is not _hidden_record:
        logging.setLogRecordFactory(partial(_hidden_record, make))


def _learn(values: Iterable[object]) -> None:
    _hidden.update(
        value
        for value in values
        if isinstance(value, str) and len(value) >= SHORTEST and not _NO_SECRETS.fullmatch(value)
    )


def scrub(error: BaseException) -> None:
    """Remove everything that repeats credentials from an error of a client library, and from its
    causes and contexts."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += [one.__cause__, one.__context__]
        vars(one).pop("doc", None)  # of a JSONDecodeError: what a credential_process printed
        asked: Any = getattr(one, "request_info", None)
        if hasattr(asked, "real_url"):  # of aiohttp: it repeats the query string
            url = asked.url.with_query(None)
            vars(one)["request_info"] = asked._replace(url=url, real_url=url, headers={})
        response = getattr(one, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            said = response["Error"]
            response["Error"] = {name: said[name] for name in _TOLD if name in said}


_DENIED = (
    "the store refuses the credentials: check key, secret and token (or AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE), and what they are allowed to do in this bucket; without "
    "s3:ListBucket, a store answers 403 also for what is absent"
)
_DENIED_BY_GOOGLE = (
    "the store refuses the credentials: check GOOGLE_APPLICATION_CREDENTIALS, those of gcloud "
    "(gcloud auth application-default login) or storage_options={'token': FILE}, and what they are "
    "allowed to do in this bucket"
)
_DENIED_BY_WEB = (
    "the server refuses the credentials, or demands some: those in the URL (has it expired?), or "
    "for hf:// a token (HF_TOKEN, or `hf auth login`) of an account that may read the model, and "
    "that has accepted its conditions on the Hub"
)
REGION = (
    'the region does not fit the bucket: set it (AWS_REGION, or client_kwargs={"region_name": ...})'
)
_NO_BUCKET = "the bucket does not exist: create it, or correct the URL"
_THROTTLED = ("SlowDown", "TooManyRequests", "429")
_REMEDIES = {
    "NoSuchBucket": _NO_BUCKET,
    "404": f"the endpoint is of another server, or {_NO_BUCKET}",
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "Forbidden", "401", "403"), _DENIED),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch"), _DENIED),
    "InvalidToken": _DENIED,
    "ExpiredToken": "the session token has expired: get another, or use a profile or a role, whose "
    "tokens are renewed",
    **dict.fromkeys(("AuthorizationHeaderMalformed", "PermanentRedirect", "301"), REGION),
    "IllegalLocationConstraintException": REGION,
    "InvalidRequest": "the bucket demands more of a request: if it has an object lock, give "
    "storage_options={'s3_additional_kwargs': {'ChecksumAlgorithm': 'SHA256'}}",
    "InvalidObjectState": "the object is archived: restore it (aws s3api restore-object), and keep "
    "checkpoints out of the bucket's rules for archives",
    "NotImplemented": "the store does not know this request or a header of it, such as "
    "If-None-Match: use a store that honours conditional writes",
    "NoSuchUpload": "another export to this place ended the uploads (ranks that write one model "
    "need init_process_group()), or a rule of the bucket did: export again",
    "InvalidBucketName": "the bucket's name is not valid: correct the URL",
    "400": "the store rejects the request as invalid: check region and endpoint",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    **dict.fromkeys(
        ("502", "503", "504", "ServiceUnavailable"),
        "the store is overloaded, or down: try again later",
    ),
    **dict.fromkeys(
        _THROTTLED, "the store is overloaded: save less often, or with fewer requests at a time"
    ),
    **dict.fromkeys(
        ("QuotaExceeded", "XMinioStorageFull", "507"),
        "the store is full, or its quota used up: free space, or choose another bucket",
    ),
    "413": "a proxy before the store refuses so large requests: raise its limit "
    "(client_max_body_size of nginx), or save smaller chunks",
    "500": "the store failed, or the endpoint is of another server: check it, or try again later",
    "InternalError": "the store failed: try again later",
    "EntityTooLarge": "the object is too large for one request: save smaller chunks",
}
_NOT_THERE = "the store has nothing at this URL: check the endpoint and the URL"
SETTINGS = (
    "check the storage options, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE and "
    "AWS_REGION; with single sign-on, log in again (aws sso login); run credential_process by hand"
)
NO_TRUST = (
    "the server's certificate is not trusted (set AWS_CA_BUNDLE, or client_kwargs={'verify': "
    "FILE}, to a file of trusted certificates)"
)
_DENIED_ELSEWHERE = (
    "the store refuses the credentials: check those of the environment and in storage_options, and "
    "what they are allowed to do there"
)


_OF_GCSFS = re.compile(r"(Forbidden: )|b/[^/]+/o$")
"""Errors that have no class in gcsfs: HTTP 403, and the listing of an absent bucket."""
_OVERLOADED = (429, 502, 503, 504)
_CUTS = ("ClientPayloadError", "ServerDisconnectedError", "ClientOSError")
_READING = ("reading", "looking for", "listing")


def no_answer(url: str) -> str:
    """Return the advice for a store that does not answer."""
    named = "in storage_options"
    if variables := {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}.get(_kind_of(url)):
        named = f"endpoint_url, or {variables}"
    return f"the store does not answer: check the endpoint ({named}) and the network"


def too_late(url: str, seconds: float) -> StorageError:
    """Return the error for a request that had no answer within its deadline."""
    return StorageError(f"{url}: no answer within {seconds:.0f} s; {no_answer(url)}", url=url)


def remedy(code: str | None, doing: str = "", url: str = "") -> str:
    """Return the advice for an error that the store returned.

    Args:
        code: the store's error code, or the HTTP status.
        doing: the operation that failed. Reads get no advice about saves.
        url: URL of the document or object; its protocol decides which credentials are named.
    """
    if _kind_of(url) == "gs" and code in ("401", "403"):
        return _DENIED_BY_GOOGLE
    if code in _THROTTLED and doing in _READING:
        return "the store is overloaded: try again later, or with fewer ranks at a time"
    return _REMEDIES.get(code or "", "see the store's error message")


def explained(doing: str, url: str, error: BaseException, advice: str = "") -> StorageError:
    """Return a :class:`StorageError` with a remedy for an error of a store's library.

    Args:
        doing: the operation that failed, such as ``reading``.
        url: URL of the document or object.
        error: the error of the library; its credentials are removed.
        advice: the remedy; empty: the one for the error.
    """
    scrub(error)
    code = code_of(error)
    name = type(error).__name__
    # Some stores give no message, of which clients make "None".
    said = str(error).strip()
    first, *more = re.sub("(^|: )None$", "", said).splitlines() or [code or name]
    text = f"{first} {more[0].strip()}" if more and first.endswith(":") else first
    text = text[:300].rstrip(".")
    # botocore's text leaves out why there is no connection.
    reason = getattr(error, "kwargs", {}).get("error")
    if isinstance(reason, OSError) and reason.errno and str(reason) not in said:
        text += f" ({os.strerror(reason.errno) if reason.errno > 0 else reason.strerror})"
    if errno.EMFILE in (getattr(error, "errno", None), getattr(reason, "errno", None)):
        advice = "the process may open no more files: raise the limit (ulimit -n)"
    if advice:
        pass
    elif code in _REMEDIES:
        advice = remedy(code, doing, url)
    elif any(word in name for word in ("Credential", "Profile", "SSO", "TokenRetrieval")):
        advice = SETTINGS
    elif getattr(error, "status", None) in (401, 403):  # of a web server
        advice = _DENIED_BY_WEB
    elif "CERTIFICATE_VERIFY_FAILED" in str(error):
        text, advice = "the connection was refused", NO_TRUST
    elif isinstance(error, PermissionError):
        advice = _DENIED if _kind_of(url) == "s3" else _DENIED_ELSEWHERE
    elif isinstance(error, ImportError):
        gcs = "gs:// needs gcsfs: pip install gcsfs"
        advice = gcs if _kind_of(url) == "gs" else "install the package that this store needs"
    elif isinstance(error, FileNotFoundError):
        # The file system names a file of this machine, such as that of a web identity.
        advice = _NOT_THERE if error.filename is None else SETTINGS
    elif isinstance(error, NotImplementedError) or getattr(error, "status", None) in (405, 501):
        advice = "such a store is only read: choose a folder or an object store"
    elif code is None and (
        isinstance(error, ConnectionError | TimeoutError)
        or any(word in name for word in ("Connect", "Timeout", "Endpoint", "HTTPClient", *_CUTS))
    ):
        advice = no_answer(url)
    else:
        advice = remedy(code) if code else "check the URL and the storage options"
    shown = f"{code}: {text}" if code and code not in text else text
    failure = StorageError(f"{doing} {url} failed: {shown}; {advice}", url=url)
    failure.errno = getattr(error, "errno", None)
    return failure


def _kind_of(url: str) -> str:
    """Return "s3", "gs", or the protocol of another store."""
    protocol = url.partition("://")[0]
    return {"s3a": "s3", "gcs": "gs"}.get(protocol, protocol)


def code_of(error: BaseException | None) -> str | None:
    """Return the store's error code (Amazon S3 API, "Error responses"), or the HTTP status of an
    error of gcsfs; ``None`` if the error has none."""
    answer = _answer(error)
    code = answer.get("Error", {}).get("Code")  # a page that is XML has none
    code = code or answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    for one in _causes(error):
        if type(one).__module__ == "gcsfs.retry":
            code = code or getattr(one, "code", None)
        elif isinstance(one, OSError) and (found := _OF_GCSFS.match(str(one))):
            code = code or (403 if found[1] else 404)
    if code is None and (answer := overload_of(error)):
        code = answer.status
    return None if code is None else str(code)


def overload_of(error: BaseException | None) -> Any:
    """Return aiohttp's error for the answer of a web server that is overloaded, or ``None``."""
    for one in _causes(error):
        if type(one).__module__.startswith("aiohttp.") and hasattr(one, "status"):
            return one if one.status in _OVERLOADED else None
    return None


def was_cut(error: BaseException | None) -> bool:
    """Return whether aiohttp lost the connection in the middle of an answer, or before it."""
    return any(type(one).__name__ in _CUTS for one in _causes(error))


def _answer(error: BaseException | None) -> dict[str, Any]:
    """Return the store's answer, which botocore keeps in its error; empty if there is none."""
    answers = (getattr(one, "response", None) for one in _causes(error))
    return next((answer for answer in answers if isinstance(answer, dict)), {})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def is_refusal(failure: BaseException) -> bool:
    """Return whether the store certainly does not carry out a failed request, now or later.

    True if the store refused the only try (HTTP 4xx), if it was too busy for the last try, or if
    the operating system refused. False if the outcome is unknown: no answer, an answer of a server
    in between (HTTP 5xx), or a refusal of a repeated request whose first try may still be pending
    in the store.

    Args:
        failure: the error of the store's library, or the :class:`StorageError` that it caused.
    """
    if answer := _answer(failure):
        about = answer.get("ResponseMetadata") or {}
        is_last = _is_4xx(about.get("HTTPStatusCode")) and not about.get("RetryAttempts")
        return is_last or code_of(failure) in _THROTTLED
    for last in _causes(failure):
        # adlfs; gcsfs
        if _is_4xx(getattr(last, "status_code", None)) or _is_4xx(getattr(last, "code", None)):
            return True
    if code_of(failure) == "403":
        return True
    if isinstance(last, ConnectionError | TimeoutError):
        return False
    return isinstance(last, PermissionError) or getattr(last, "errno", None) is not None


def _is_4xx(status: object) -> bool:
    return isinstance(status, int) and 400 <= status < 500
