"""File systems of fsspec, made once for each set of storage options and environment.

They have short timeouts, bounded retries, no cache of listings, and the settings that stores other
than Amazon's need. Nothing here makes a request, and no error text contains a storage option.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
from fsspec.dircache import DirCache  # type: ignore[import-untyped]

from shardstore.errors import StorageError
from shardstore.storage.stores.errors import PROFILE_VALUES, explained, keep_quiet_about
from shardstore.storage.stores.s3_options import problem_of

__all__ = ["file_system"]

_S3 = ("s3", "s3a")

_file_systems: dict[object, Any] = {}
_lock = threading.Lock()


def file_system(url: str, options: Mapping[str, Any]) -> Any:
    """The file system of a URL; the same one for equal options in the same environment.

    Raises:
        StorageError: no such protocol, its package is missing, or the options do not fit.
    """
    protocol = url.partition("://")[0]
    surroundings = tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))
    bucket = url.partition("://")[2].partition("/")[0] if protocol not in _S3 else ""
    # Kept in this process only; a fork must not share connections.
    known = (os.getpid(), protocol, bucket, repr(sorted(options.items(), key=str)), surroundings)
    with _lock:
        fs = _file_systems.get(known)
        if fs is None:
            if protocol in _S3 and (problem := problem_of(options, os.environ)):
                raise StorageError(f"{url}: the storage options do not fit: {problem}", url=url)
            fs = _file_systems[known] = _made(url, protocol, options)
    return fs


def _made(url: str, protocol: str, options: Mapping[str, Any]) -> Any:
    package = "s3fs (pip install 'shardstore[s3]')" if protocol in _S3 else "the package it names"
    make: Callable[..., Any] = fsspec.filesystem
    keep_quiet_about(options, *(_in_profiles() if protocol in _S3 else ()))
    try:
        given = _s3_options(options) if protocol in _S3 else dict(options)
        if protocol in _S3:
            made = make(protocol, skip_instance_cache=True, **given)
            keep_quiet_about(options)  # of modules, too, that are imported by now
            return made
        if protocol == "local":
            return make(protocol, **{"auto_mkdir": True, **given})
        if not issubclass(fsspec.get_filesystem_class(protocol), AsyncFileSystem):
            return fsspec.core.url_to_fs(url, **given)[0]
        made = fsspec.core.url_to_fs(url, skip_instance_cache=True, **given)[0]
        # Who owns a target is told by a listing of its claims: not by one of a while ago. Options
        # that say so are not taken by all of them.
        made.dircache = DirCache(use_listings_cache=False)
        return made
    except ImportError as error:
        raise StorageError(f"{url}: {protocol}:// needs {package}: {error}", url=url) from error
    except ValueError as error:
        if "rotocol not known" in str(error):
            raise StorageError(f"{url}: fsspec knows no store {protocol}://", url=url) from error
        said = f"the storage options do not fit ({type(error).__name__})"
    except TypeError:
        said = (
            f"the storage options do not fit; they are those of fsspec's {protocol} file system, "
            f"not {sorted(map(str, options))}"
        )
    except Exception as error:  # some file systems connect at once
        raise explained("connecting to", url, error) from error
    # Not while the other is handled: its text, which would be the context, could hold what was
    # given.
    raise StorageError(f"{url}: {said}", url=url)


def _in_profiles() -> list[str]:
    """Credentials in the files of profiles; none where those can not be read."""
    try:
        import botocore.session  # type: ignore[import-untyped]

        profiles = botocore.session.Session().full_config["profiles"].values()
    except Exception:  # whoever needs them says what is wrong with them
        return []
    return [
        value for profile in profiles for name in PROFILE_VALUES if (value := profile.get(name))
    ]


def _s3_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with short timeouts, bounded retries, and no cache of listings."""
    from botocore.config import Config  # type: ignore[import-untyped]

    given = {name: value for name, value in options.items() if name != "region_name"}
    client = dict(given.get("client_kwargs") or {})
    for name in ("region_name", "endpoint_url"):
        if options.get(name):
            client.setdefault(name, options[name])
    given.pop("endpoint_url", None)
    region = os.environ.get("AWS_REGION")
    if region:
        # s3fs and botocore look at AWS_DEFAULT_REGION alone.
        client.setdefault("region_name", region)
    config = {
        "connect_timeout": 5,
        "read_timeout": 20,
        "retries": {"mode": "standard", "total_max_attempts": 4},
        **(given.get("config_kwargs") or {}),
    }
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        # Newer clients send trailing checksums unasked, which other stores than AWS refuse.
        if name in Config.OPTION_DEFAULTS:
            config.setdefault(name, "when_required")
    endpoint = client.get("endpoint_url") or os.environ.get(
        "AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint and "amazonaws.com" not in endpoint:
        s3 = dict(config.get("s3") or {})
        s3.setdefault("addressing_style", "path")
        config["s3"] = s3
    return {
        **given,
        "client_kwargs": client,
        "config_kwargs": config,
        "use_listings_cache": False,
        # One GET a document; with more its size is asked for first.
        "max_concurrency": given.get("max_concurrency", 1),
    }
