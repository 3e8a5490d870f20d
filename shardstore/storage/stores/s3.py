"""Settings of S3: the options of s3fs, and the settings that botocore determines for TensorStore.

One URL and one set of storage options, environment variables and profiles configure both clients.
No error text of this module contains a credential.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from shardstore.errors import ArgumentError, StorageError
from shardstore.storage.stores.errors import CLIENT_OPTIONS, SETTINGS, explained, keep_quiet_about

LIMITS = {"connect_timeout": 5, "read_timeout": 20}
"""Seconds that s3fs waits for a connection, and for an answer or its next bytes."""

_TEXTS = ("key", "secret", "token", "profile", "endpoint_url", "region_name")
_DICTS = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
_NOT_PLAIN = (
    "has a character that no request may have, such as a line break at its end: remove it from the "
    "option, variable, profile or program that it comes from"
)
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]+)?/?")
_BUCKET = re.compile(r"(?!.*--x-s3$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""Bucket names that TensorStore accepts. Directory buckets need a different authentication."""

for _name, _value in (
    # Without these a silent server blocks a request of TensorStore forever. TensorStore aborts a
    # request that transfers less than one byte per second for this many seconds. It reads the
    # variables at its first request.
    ("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "15"),
    ("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1"),
    ("TENSORSTORE_CA_BUNDLE", os.environ.get("AWS_CA_BUNDLE")),
):
    if _value and "tensorstore" not in sys.modules:
        os.environ.setdefault(_name, _value)

_inherited: set[str] = set()
"""Modules that were imported before this process was forked."""

os.register_at_fork(after_in_child=lambda: _inherited.update(sys.modules))


def surroundings() -> object:
    """Return a value that changes when the AWS environment variables or the profile files change,
    which a client reads in addition to its options."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    files = (variables.get(name, default) for name, default in _FILES.items())
    return variables, file_stamps(map(os.path.expanduser, files))


def file_stamps(files: Iterable[str]) -> list[tuple[object, ...]]:
    """Return those of the files that exist, with values that change when a file does."""
    stamps: list[tuple[object, ...]] = []
    for file in files:
        with suppress(OSError):
            about = os.stat(file)
            stamps.append((file, about.st_ino, about.st_mtime_ns, about.st_size))
    return stamps


def has_forked() -> bool:
    """Return whether this process was forked after the import of TensorStore, which would abort the
    process when used."""
    return "tensorstore" in _inherited


def problem_of(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Return what is wrong with storage options and how to correct it; ``None`` if no problem is
    found. The client libraries would fail later, with errors about their internals.

    Args:
        options: storage options, with the names of s3fs.
        variables: environment variables.
    """
    for name in _DICTS:
        if not isinstance(options.get(name), Mapping | None):
            return f"{name} must be a dict, not {_kind(options[name])}"
    for name, value in chain(*((options.get(d) or {}).items() for d in _DICTS), options.items()):
        if isinstance(value, str) and not value.isprintable():
            return f"{name} {_NOT_PLAIN}"
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
        if endpoint and (wrong := wrong_endpoint(endpoint)):
            return f"{name} {wrong}"
    return _wrong_config(options.get("config_kwargs") or {})


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def wrong_endpoint(url: str) -> str | None:
    """Return what is wrong with the URL of a server; ``None`` if nothing is."""
    if "@" in url:
        return (
            "has credentials in it, which no client takes from there: give http://HOST:PORT, and "
            "the credentials (key and secret, or token) beside it"
        )
    if not url.startswith(("http://", "https://")):
        such = f"http://{url} or https://{url}" if _HOST.fullmatch(url) else "http://host:9000"
        return f"must begin with http:// or https://: give {such}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (it raises)
    except ValueError:
        return "is no URL: give one such as http://host:9000"
    if parts.query or parts.fragment or "//" in parts.path:
        return "has a query, a fragment or two slashes after its host, which no server has there"
    return None if parts.hostname else "names no host: give a URL such as http://host:9000"


def _wrong_config(config: Mapping[str, Any]) -> str | None:
    from botocore.config import Config

    for name, value in config.items():
        try:
            Config(**{name: value})
        except Exception as error:
            if name not in Config.OPTION_DEFAULTS:
                return f"config_kwargs.{name} is unknown to botocore's Config"
            # The error's text may repeat the value, and the URL of a proxy may have a password.
            return (
                f"config_kwargs.{name} has a value, {_kind(value)}, that botocore's Config refuses "
                f"({type(error).__name__})"
            )
    return None


def s3fs_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of s3fs: the given ones, short timeouts, bounded retries, and the settings
    that stores other than Amazon's need."""
    given = dict(options)
    short = {name: given.pop(name, None) for name in ("region_name", "endpoint_url")}
    # s3fs and botocore read AWS_DEFAULT_REGION only.
    short["region_name"] = short["region_name"] or os.environ.get("AWS_REGION")
    client = {name: value for name, value in short.items() if value}
    client |= given.get("client_kwargs") or {}
    return {
        **given,
        "client_kwargs": client,
        "config_kwargs": config_options(**(given.get("config_kwargs") or {})),
        # One GET per document; a higher value requests the size first.
        "max_concurrency": given.get("max_concurrency", 1),
    }


def config_options(**given: Any) -> dict[str, Any]:
    """Return the options of botocore's ``Config``: the given ones, and those that every client
    has."""
    from botocore.config import Config

    # Newer clients send trailing checksums by default, which stores other than AWS refuse.
    checksums = ("request_checksum_calculation", "response_checksum_validation")
    needed = {name: "when_required" for name in checksums if name in Config.OPTION_DEFAULTS}
    # The mode "standard" does not repeat what the stores of Oracle and Cloudflare answer with 429.
    return {**LIMITS, "retries": {"mode": "legacy", "total_max_attempts": 4}, **needed, **given}


def secrets(options: Mapping[str, Any]) -> list[str]:
    """Return the credentials in the profile files, whatever the options are; an empty list if they
    cannot be read."""
    try:
        import botocore.session

        profiles = botocore.session.Session().full_config["profiles"].values()
    except Exception:  # a client that needs the files reports the error
        return []
    return [value for about in profiles for name in CLIENT_OPTIONS if (value := about.get(name))]


@dataclass(frozen=True)
class S3Settings:
    """Settings for TensorStore, as the client of s3fs determined them.

    Attributes:
        region: region of the signatures.
        endpoint: URL of the service.
        credentials: access key, secret key and session token; ``None``: requests are not signed.
        in_host: the bucket is a part of the host's name, not of the path.
        is_unsigned: signatures of uploads leave the content out.
        unsupported: a setting that TensorStore's driver does not support; empty if there is none.
    """

    region: str
    endpoint: str
    credentials: tuple[str, str, str | None] | None = field(repr=False)
    in_host: bool
    is_unsigned: bool
    unsupported: str


async def settings(fs: Any, url: str) -> S3Settings:
    """Return the settings of an s3fs file system for a URL, with the current credentials. botocore
    renews them some minutes before they expire.

    Raises:
        ArgumentError: the endpoint of the profile is none.
        StorageError: the profile, its program or a token service gives no credentials, or a value
            has a character that no request can have.
    """
    found = None
    try:
        client = await fs.set_session()
        credentials = client._request_signer._credentials
        if credentials is not None and not fs.anon:
            frozen = credentials.get_frozen_credentials()
            if hasattr(frozen, "__await__"):
                frozen = await frozen
            found = (frozen.access_key, frozen.secret_key, frozen.token or None)
            keep_quiet_about({}, *found)
    except Exception as error:  # of botocore, of the program, or of the operating system
        raise explained("finding region and credentials of", url, error, SETTINGS) from error
    endpoint, style = client.meta.endpoint_url, client.meta.config.s3 or {}
    if wrong := wrong_endpoint(endpoint):  # that of a profile
        raise ArgumentError(f"{url}: endpoint_url of the profile {wrong}")
    if urlsplit(endpoint).path.rstrip("/").endswith(bucket := "/" + url.split("/")[2]):
        server = endpoint.rstrip("/").removesuffix(bucket)
        text = f"endpoint_url {endpoint} ends with the bucket, which the URL names: give {server}"
        raise ArgumentError(f"{url}: {text}")
    region = client.meta.region_name
    names = ("access key", "secret key", "session token", "region")
    for name, value in zip(names, (*(found or ("", "", "")), region), strict=True):
        if value and not value.isprintable():
            raise StorageError(f"{url}: the {name} {_NOT_PLAIN}", url=url)
    return S3Settings(
        region=region if region and not region.startswith("aws-") else "us-east-1",
        endpoint=endpoint.rstrip("/"),
        credentials=found,
        # TensorStore knows the hosts of Amazon.
        in_host=style.get("addressing_style") == "virtual" and "amazonaws.com" not in endpoint,
        is_unsigned=style.get("payload_signing_enabled") is False,
        unsupported=_unsupported(fs, client, url),
    )


def _unsupported(fs: Any, client: Any, url: str) -> str:
    from botocore import UNSIGNED

    config = client.meta.config
    s3, verify = config.s3 or {}, client._endpoint.http_session._verify
    tls = client.meta.endpoint_url.startswith("https:")
    bundles = {os.environ.get("AWS_CA_BUNDLE"), os.environ.get("TENSORSTORE_CA_BUNDLE")}
    # With requester_pays, TensorStore 0.1.86 sends x-amz-requester-payer; S3 reads
    # x-amz-request-payer (Amazon S3 user guide, "Downloading objects from Requester Pays buckets").
    reasons = {
        "arguments of requests": fs.req_kw or fs.s3_additional_kwargs,
        "a proxy": config.proxies,
        "a certificate": tls and verify is not True and {verify} != bundles,
        "a time limit": any(getattr(config, name) != value for name, value in LIMITS.items()),
        "accelerated transfers": s3.get("use_accelerate_endpoint"),
        "signatures of this version": config.signature_version not in ("s3v4", UNSIGNED),
        "a bucket of this name": not _BUCKET.fullmatch(url.split("/")[2]),
        "a process that was forked after TensorStore's import": has_forked(),
        "a system without files in memory": not hasattr(os, "memfd_create"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
