"""Settings of Google Cloud Storage: the options of gcsfs, and which of them TensorStore follows.

TensorStore's driver takes no settings of a store. It reads the endpoint from the environment, and
finds credentials once in a process: in the file that ``GOOGLE_APPLICATION_CREDENTIALS`` names, in
gcloud's file, or on the machine's metadata server (TensorStore documentation, "gcs Key-Value Store
driver"). gcsfs moves the chunks too if it determined anything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardstore.storage.stores.s3 import file_stamps, has_forked, wrong_endpoint

GOOGLE = "https://storage.googleapis.com"
ENDPOINT = "TENSORSTORE_GCS_HTTP_URL"
"""Environment variable from which TensorStore takes the endpoint."""

_VARIABLES = ("CLOUDSDK_", "GOOGLE_", "STORAGE_EMULATOR_HOST", ENDPOINT)
_SECRETS = ("private_key", "client_secret", "refresh_token")
"""Members of a token that is a dict."""
_TEXTS = ("endpoint_url", "project", "access")
_FOREIGN = ("key", "secret", "client_kwargs", "config_kwargs", "region_name", "profile")
"""Options of s3fs, which gcsfs would ignore."""
_KINDS = ("oauth2.credentials", "oauth2.service_account", "auth.compute_engine")
"""Modules of Google's packages with the credentials that TensorStore can use."""
_BUCKET = re.compile(r"(?!goog)[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")

_first: dict[str, object] = {}
"""The credentials files when TensorStore was first used."""


def surroundings() -> object:
    """Return a value that changes when the environment variables or the credentials files change,
    which a client reads in addition to its options."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return variables, _stamps()


def _stamps() -> list[tuple[object, ...]]:
    """Return the stamps of the files of default credentials, in the order in which clients look."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    return file_stamps((named, os.path.join(folder, "application_default_credentials.json")))


def secrets(options: Mapping[str, Any]) -> Iterator[str]:
    """Return the secrets in a token that is a dict."""
    token = options.get("token")
    return (token[name] for name in _SECRETS if isinstance(token, Mapping) and name in token)


def problem_of(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Return what is wrong with storage options and how to correct it; ``None`` if no problem is
    found.

    Args:
        options: storage options, with the names of gcsfs.
        variables: environment variables.
    """
    if foreign := next((name for name in _FOREIGN if name in options), None):
        return f"{foreign} is an option of S3: give token=FILE for gs://, or leave it out"
    for name in _TEXTS:
        if not isinstance(options.get(name), str | None):
            return f"{name} must be a text, not of type {type(options[name]).__name__}"
    token = options.get("token")
    if isinstance(token, str) and re.search(r"[/\\]|\.json$", token) and not os.path.exists(token):
        return "token names a file that does not exist"  # gcsfs would send it as a token
    name, url = "endpoint_url", options.get("endpoint_url") or ""
    if not url and "://" in variables.get("STORAGE_EMULATOR_HOST", ""):
        name, url = "STORAGE_EMULATOR_HOST", variables["STORAGE_EMULATOR_HOST"]
    wrong = wrong_endpoint(url) if url else None
    return f"{name} {wrong}" if wrong else None


def file_system(options: Mapping[str, Any]) -> Any:
    """Return a file system of gcsfs for flat and hierarchical buckets.

    The class that fsspec finds asks the server by gRPC for the kind of each bucket. An emulator
    does not answer this for a minute.
    """
    from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

    return GCSFileSystem(**options, skip_instance_cache=True)


@dataclass(frozen=True)
class GcsSettings:
    """What TensorStore must know, as gcsfs determined it.

    Attributes:
        endpoint: URL of the service.
        unsupported: a setting that TensorStore's driver does not support; empty if there is none.
    """

    endpoint: str
    unsupported: str


async def settings(fs: Any, url: str) -> GcsSettings:
    """Return the settings of a file system of gcsfs for a URL."""
    endpoint = fs._location.rstrip("/")
    return GcsSettings(endpoint, _unsupported(fs, url, endpoint))


def _unsupported(fs: Any, url: str, endpoint: str) -> str:
    found, stamps = fs.credentials, _stamps()
    if found.method == "google_default":
        follows = type(found.credentials).__module__.removeprefix("google.").startswith(_KINDS)
    else:  # without a file, TensorStore asks the metadata server, or sends no credentials
        follows = found.method in ("anon", "cloud") and not stamps
    reasons = {
        f"an endpoint that is not the one of {ENDPOINT}": endpoint
        != os.environ.get(ENDPOINT, GOOGLE).rstrip("/"),
        "credentials that are not this machine's default ones": not follows,
        "requester_pays": fs.requester_pays,
        "session_kwargs": fs.session_kwargs,
        "a time limit": fs.requests_timeout,
        "a client certificate": fs._use_client_cert,
        "a bucket of this name": not _BUCKET.fullmatch(url.split("/")[2]),
        "a process that was forked after TensorStore's import": has_forked(),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if not why and _first.setdefault("credentials", stamps) != stamps:
        return "credentials that changed after its first request"
    return why
