"""What a store's refusals mean, in our own words, each with its remedy.

It knows the names that stores and their clients give to errors (Amazon S3 API, "Error responses");
it makes no request, and no text of its own has a storage option in it.
"""

from __future__ import annotations

from typing import Any

from shardstore.errors import StorageError
from shardstore.storage.redaction import scrub

__all__ = ["NOT_RENEWED", "code_of", "explained", "is_refusal", "no_answer", "remedy"]

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
    "400": "the store can not make sense of the request: check region and endpoint",
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
NOT_RENEWED = (
    "look at what gives them: the profile (AWS_PROFILE), the container's or the machine's role, or "
    "the program that the profile names"
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
    """The store's own name for what went wrong (Amazon S3 API, "Error responses")."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            return None if code is None else str(code)
        error = error.__cause__
    return None


def is_refusal(failure: BaseException) -> bool:
    """Whether a failed request is taken as one that is not carried out, now or later: the store
    refused its only try (HTTP 4xx), or had too much to do for the last one (``SlowDown``), or an
    operating system refused. All else leaves it open: no answer, one of something on the way
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
