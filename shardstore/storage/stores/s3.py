"""Settings of S3: what s3fs is made with, and what botocore finds out of it for TensorStore.

So one URL and one set of storage options, environment and profiles serve both clients. No error
text from here contains a credential.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fsspec.asyn import sync  # type: ignore[import-untyped]

from shardstore.storage.stores.errors import CLIENT_OPTIONS, explained, keep_quiet_about

LIMITS = {"connect_timeout": 5, "read_timeout": 20}
"""Seconds that s3fs waits for a connection, and for an answer or its next piece."""

_TEXTS = ("key", "secret", "token", "profile", "endpoint_url", "region_name")
_DICTS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?/?")
_BUCKET = re.compile(r"(?!.*--x-s3$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Buckets that TensorStore takes; not those of directories, which have sessions of their own."""

for _name, _value in (
    # Without these a silent server holds a request of TensorStore for ever: one that moves less
    # than a byte a second for so many seconds is given up. Read at its first request.
    ("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "15"),
    ("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1"),
    ("TENSORSTORE_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE")),
):
    if _value and "tensorstore" not in sys.modules:
        os.environ.setdefault(_name, _value)

_forked = False


def _in_child() -> None:
    global _forked
    _forked = "tensorstore" in sys.modules


os.register_at_fork(after_in_child=_in_child)


def surroundings() -> object:
    """Return what a client finds beside its options: variables, and the files of profiles, as which
    they are known until they are exchanged."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    files = [variables.get(name, default) for name, default in _FILES.items()]
    stamps = []
    for file in files:
        with suppress(OSError):
            about = os.stat(os.path.expanduser(file))
            stamps.append((file, about.st_ino, about.st_mtime_ns, about.st_size))
    return variables, stamps


def has_forked() -> bool:
    """Whether this process was forked after TensorStore's import: using it would abort."""
    return _forked


def problem_of(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Say what does not fit in storage options, and what to give instead, before the client
    libraries fail in words about their own insides; ``None``: nothing that can be told.

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
    endpoints = {name: value for name, value in given.items() if name.endswith("endpoint_url")}
    if not any(endpoints.values()):
        endpoints = {name: variables.get(name) for name in _ENDPOINTS}
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
    from botocore.config import Config  # type: ignore[import-untyped]

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


def s3fs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of s3fs: those given, with short timeouts, bounded retries, no cache of
    listings, and what stores other than Amazon's need."""
    from botocore.config import Config

    given = {n: v for n, v in options.items() if n not in ("region_name", "endpoint_url")}
    client = dict(given.get("client_kwargs") or {})
    for name in ("region_name", "endpoint_url"):
        if options.get(name):
            client.setdefault(name, options[name])
    if region := os.environ.get("AWS_REGION"):
        # s3fs and botocore look at AWS_DEFAULT_REGION alone.
        client.setdefault("region_name", region)
    config = {
        **LIMITS,
        "retries": {"mode": "standard", "total_max_attempts": 4},
        **(given.get("config_kwargs") or {}),
    }
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        # Newer clients send trailing checksums unasked, which other stores than AWS refuse.
        if name in Config.OPTION_DEFAULTS:
            config.setdefault(name, "when_required")
    named = (client.get("endpoint_url"), *map(os.environ.get, _ENDPOINTS))
    endpoint = next(filter(None, named), None)
    if endpoint and "amazonaws.com" not in endpoint:
        config["s3"] = {"addressing_style": "path", **(config.get("s3") or {})}
    return {
        **given,
        "client_kwargs": client,
        "config_kwargs": config,
        "use_listings_cache": False,
        # One GET a document; with more its size is asked for first.
        "max_concurrency": given.get("max_concurrency", 1),
    }


def profile_secrets() -> list[str]:
    """Return the credentials in the files of profiles; none where those cannot be read."""
    try:
        import botocore.session  # type: ignore[import-untyped]

        profiles = botocore.session.Session().full_config["profiles"].values()
    except Exception:  # whoever needs them says what is wrong with them
        return []
    return [value for about in profiles for name in CLIENT_OPTIONS if (value := about.get(name))]


@dataclass(frozen=True)
class S3Settings:
    """What TensorStore is given, as the client of s3fs has found it out.

    Attributes:
        region: to sign for.
        endpoint: URL of the service.
        credentials: access key, secret key and session token; ``None``: requests are not signed.
        unsupported: what the settings ask for that TensorStore's driver cannot do; empty: nothing.
    """

    region: str
    endpoint: str
    credentials: tuple[str, str, str | None] | None = field(repr=False)
    unsupported: str


def s3_settings(fs: Any, url: str, seconds: float) -> S3Settings:
    """Return the settings of a file system of s3fs for a URL, with the credentials of now: botocore
    gets new ones some minutes before they end.

    Raises:
        StorageError: there are no credentials, or they cannot be got within so many seconds.
    """
    try:
        found: S3Settings = sync(fs.loop, _settings, fs, url, timeout=seconds)
    except Exception as error:
        raise explained("connecting to", url, error) from error
    return found


async def _settings(fs: Any, url: str) -> S3Settings:
    client = await fs.set_session()
    region, found = client.meta.region_name, None
    credentials = client._request_signer._credentials
    if credentials is not None and not fs.anon:
        frozen = credentials.get_frozen_credentials()
        if hasattr(frozen, "__await__"):
            frozen = await frozen
        found = (frozen.access_key, frozen.secret_key, frozen.token or None)
        keep_quiet_about({}, *found)
    return S3Settings(
        region=region if region and not region.startswith("aws-") else "us-east-1",
        endpoint=client.meta.endpoint_url,
        credentials=found,
        unsupported=_unsupported(fs, client, url),
    )


def _unsupported(fs: Any, client: Any, url: str) -> str:
    config = client.meta.config
    s3, verify = config.s3 or {}, client._endpoint.http_session._verify
    endpoint = client.meta.endpoint_url
    tls = endpoint.startswith("https:")
    virtual = s3.get("addressing_style") == "virtual" and "amazonaws.com" not in endpoint
    bundles = {os.environ.get("AWS_CA_BUNDLE"), os.environ.get("TENSORSTORE_CA_BUNDLE")}
    reasons = {
        "arguments of requests": fs.req_kw or fs.s3_additional_kwargs,
        "a proxy": config.proxies,
        "a certificate": tls and verify is not True and {verify} != bundles,
        "a time limit": any(getattr(config, name) != value for name, value in LIMITS.items()),
        "buckets in the host's name": virtual,
        "accelerated transfers": s3.get("use_accelerate_endpoint"),
        "unsigned content": s3.get("payload_signing_enabled") is False,
        "a bucket of this name": not _BUCKET.fullmatch(url.split("/")[2]),
        "a process that was forked after TensorStore's import": _forked,
        "a system without files in memory": not hasattr(os, "memfd_create"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
