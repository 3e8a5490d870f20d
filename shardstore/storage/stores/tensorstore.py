"""TensorStore's key-value stores for our locations, configured from the control plane.

Endpoint, region and credentials are those that the control plane's client has found, so that one
URL and one set of storage options serve both. Credentials reach TensorStore in a file in memory
that only this process has open (``memfd_create``, Linux man-pages memfd_create(2)); they are in no
spec, ``repr`` or error.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
from typing import Any

from shardstore.errors import StorageError
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.s3_settings import S3Settings, s3_settings
from shardstore.storage.stores.tensorstore_environment import BOUNDED, LIMITS

__all__ = ["kvstore_spec", "plain_words", "s3_context"]

PROFILE = "shardstore"
CONCURRENCY = 32
"""Requests to S3 at a time, each process."""

_BODY = re.compile(r"\s*\[(?!http_response_code)[\w-]+='(?:[^'\\]|\\.)*'\]")
_CODE = re.compile(r"<Code>([\w.]+)</Code>")

_lock = threading.Lock()
_files: dict[int, tuple[bytes, int | str]] = {}


def plain_words(text: str) -> str:
    """What TensorStore says of an error, without the store's own answer, which may have the access
    key in it."""
    code = _CODE.search(text)
    shown = (_BODY.sub("", text).splitlines() or [""])[0][:400]
    return shown if code is None or code.group(1) in shown else f"{code.group(1)}: {shown}"


def s3_context() -> dict[str, Any]:
    """Context resources: how many requests at a time, and how often each is tried."""
    return {
        "s3_request_concurrency": {"limit": CONCURRENCY},
        "s3_request_retries": {"max_retries": 8, "initial_delay": "200ms", "max_delay": "5s"},
    }


def kvstore_spec(location: Location) -> dict[str, Any]:
    """Spec of a key-value store at a location (TensorStore documentation, "file Key-Value Store
    driver", "s3 Key-Value Store driver").

    Raises:
        StorageError: TensorStore has no driver for it, was imported too early, or there are no
            credentials.
    """
    if location.is_local:
        return {"driver": "file", "path": f"{location.url}/"}
    if not location.url.startswith(("s3://", "s3a://")):
        raise StorageError(
            f"{location.url}: compressed arrays can be read from local folders and s3:// alone; "
            "copy the checkpoint there",
            url=location.url,
        )
    if not BOUNDED:
        raise StorageError(
            f"{location.url}: tensorstore was imported before shardstore, without "
            f"{' and '.join(LIMITS)} being set, and would wait for a silent server for ever; "
            "import shardstore first, or set them",
            url=location.url,
        )
    bucket, _, path = location.url.partition("://")[2].partition("/")
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": f"{path}/" if path else "",
        **_client_settings(location),
    }


def _client_settings(location: Location) -> dict[str, Any]:
    """Endpoint, region and credentials as the control plane's client has them."""
    found = s3_settings(location).of_now()
    settings: dict[str, Any] = {"aws_region": found.region}
    if not found.of_amazon:
        settings["endpoint"] = found.endpoint
    if found.anonymous:
        settings["aws_credentials"] = {"type": "anonymous"}
    elif found.key is None:
        settings["aws_credentials"] = {"type": "default"}
    else:
        with _lock:
            settings["aws_credentials"] = _profile(id(location.remote.fs), found)
    return settings


def _profile(owner: int, found: S3Settings) -> dict[str, Any]:
    lines = [
        f"[{PROFILE}]",
        f"aws_access_key_id = {found.key}",
        f"aws_secret_access_key = {found.secret}",
    ]
    if found.token:
        lines.append(f"aws_session_token = {found.token}")
    content = ("\n".join(lines) + "\n").encode()
    known = _files.get(owner)
    if known is None or known[0] != content:
        known = _files[owner] = (content, _secret_file(content))
    where = known[1]
    path = f"/proc/self/fd/{where}" if isinstance(where, int) else where
    return {
        "type": "profile",
        "profile": PROFILE,
        "credentials_file": path,
        "config_file": os.devnull,
    }


def _secret_file(content: bytes) -> int | str:
    """A descriptor of a file in memory, or the path of a file that only this user can read."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        fd = os.memfd_create("credentials", os.MFD_CLOEXEC)
        os.write(fd, content)
        return fd
    folder = tempfile.mkdtemp(prefix="shardstore-")  # mode 0700
    atexit.register(_remove, folder, os.getpid())
    path = os.path.join(folder, "credentials")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # and not a child, forked while the parent needs it
        shutil.rmtree(folder, ignore_errors=True)
