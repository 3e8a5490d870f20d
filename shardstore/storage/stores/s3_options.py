"""What is wrong with storage options for S3, told before anything is asked with them.

The client libraries take what does not fit and fail later, in words about their own insides. No
text from here has a credential in it. It knows options and variables, and makes no request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from shardstore.storage.stores.errors import CLIENT_OPTIONS

__all__ = ["ENCRYPTION", "problem_of"]

ENCRYPTION = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
"""Arguments of requests that name an encryption, and obstore's names for them."""

_TEXTS = ("key", "secret", "token", "profile", "endpoint_url", "region_name")
_DICTS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?/?")


def problem_of(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """What does not fit, and what to give instead; ``None``: nothing that can be told.

    Args:
        options: storage options, by the names of s3fs.
        variables: of the environment.
    """
    for name in _DICTS:
        if not isinstance(options.get(name), Mapping | None):
            return f"{name} must be a dict, not {_kind(options[name])}"
    client = options.get("client_kwargs") or {}
    given = {name: options.get(name) for name in _TEXTS}
    named = ("endpoint_url", "region_name", *CLIENT_OPTIONS)
    given |= {f"client_kwargs.{name}": client.get(name) for name in named}
    for name, value in given.items():
        if not isinstance(value, str | None):
            return f"{name} must be a text, not {_kind(value)}"
    for first, second in (("key", "secret"), ("secret", "key")):
        if options.get(first) and not options.get(second):
            return f"{first} is given without {second}: give both, or neither"
    arguments = options.get("s3_additional_kwargs") or {}
    for name in sorted(set(arguments) - {*ENCRYPTION, "RequestPayer"}):
        return (
            f"s3_additional_kwargs.{name} would hold for documents, and not for chunks, which "
            "another client sends: leave it out, and set it for the bucket; "
            f"{', '.join(ENCRYPTION)} and RequestPayer hold for all"
        )
    endpoints = {name: value for name, value in given.items() if name.endswith("endpoint_url")}
    if not any(endpoints.values()):
        endpoints = {name: variables.get(name) for name in _VARIABLES}
    for name, endpoint in endpoints.items():
        if endpoint and (wrong := _wrong_endpoint(endpoint)):
            return f"{name} {wrong}"
    return _wrong_config(options.get("config_kwargs") or {})


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _wrong_endpoint(url: str) -> str | None:
    if "@" in url:
        return (
            "has credentials in it, which no client takes from there: give http://HOST:PORT, and "
            "key and secret (or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) beside it"
        )
    if not url.startswith(("http://", "https://")):
        such = f"http://{url} or https://{url}" if _HOST.fullmatch(url) else "http://host:9000"
        return f"must begin with http:// or https://: give {such}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises)
    except ValueError:
        return "is no URL: give one such as http://host:9000"
    return None if parts.hostname else "names no host: give a URL such as http://host:9000"


def _wrong_config(config: Mapping[str, Any]) -> str | None:
    if not config:
        return None
    try:
        from botocore.config import Config  # type: ignore[import-untyped]
    except ImportError:  # which the file system tells with what to install
        return None
    for name, value in config.items():
        try:
            Config(**{name: value})
        except Exception as error:
            if name not in Config.OPTION_DEFAULTS:
                return f"config_kwargs.{name} is unknown to botocore's Config"
            # Its text may repeat the value, and a proxy's URL has a password.
            return (
                f"config_kwargs.{name} has a value, {_kind(value)}, that botocore's Config refuses "
                f"({type(error).__name__})"
            )
    return None
