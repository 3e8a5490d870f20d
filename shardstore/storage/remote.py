"""The control plane of stores that are no local folder: small documents, listing, deleting and
create-if-absent, over fsspec (s3fs for S3).

What goes wrong is said in our own words, with the remedy, and within a deadline: a store that does
not answer never holds a rank for long. It knows names and bytes below one URL; not what a
checkpoint is, and nothing of chunks. No text that it makes has a storage option in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem, sync  # type: ignore[import-untyped]
from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]

from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.parallel import run_batched
from shardstore.storage.redaction import keep_quiet_about, scrub

__all__ = ["NO_ANSWER", "RemoteStore", "explained", "remedy", "remote_store"]

FIRST_DEADLINE_S = 20.0
"""For a request to a store that never answered this process: a dead endpoint shows soon."""
DEADLINE_S = 120.0
"""For a request to a store that did answer before, its retries included."""
DELETE_BATCH = 250
"""Keys in one request for deletion. S3 takes a thousand (Amazon S3 API, DeleteObjects), but some
stores delete one after the other before they answer."""
DELETE_REQUESTS = 8
"""Deletions at a time."""

READING = "reading"

_THERE_ALREADY = ("PreconditionFailed", "ConditionalRequestConflict", "412")

_S3 = ("s3", "s3a")
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
NO_ANSWER = (
    "the store does not answer: check the endpoint (endpoint_url, or AWS_ENDPOINT_URL) and the "
    "network"
)
_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give storage_options"
)

_file_systems: dict[object, Any] = {}
_answered: set[int] = set()
_lock = threading.Lock()
_session_lock = threading.Lock()


class RemoteStore:
    """Small documents below a URL.

    Args:
        url: where, with its protocol.
        fs: the fsspec file system.
        path: the URL as that file system names it.
    """

    def __init__(self, url: str, fs: Any, path: str) -> None:
        self.url = url
        self.fs = fs
        self.path = path.rstrip("/")

    # -- documents -----------------------------------------------------------------------------

    def read(self, name: str) -> bytes:
        """A document's content.

        Raises:
            FileNotFoundError: there is none of that name.
            StorageError: the store refused, or did not answer.
        """
        with self._errors(READING, name):
            data: bytes = self._call("cat_file", self._path(name))
            return data

    def read_range(self, name: str, start: int, stop: int | None) -> bytes | None:
        """Bytes ``start:stop`` of a document, fewer where it ends before; ``None``: there is none.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        whole = start == 0 and stop is None
        try:
            if whole:
                return self.read(name)
            with self._errors(READING, name):
                data: bytes = self._call("cat_file", self._path(name), start=start, end=stop)
                return data
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a document, in the place of one that is there.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self._errors("writing", name):
            self._pipe(self._path(name), data, create=False)

    def create(self, name: str, data: bytes) -> bool:
        """Write a document unless there is one of its name, in one atomic step where the store
        can (on S3 a PUT with If-None-Match).

        Returns:
            Whether this call wrote it. ``False`` too where the answer to an earlier try of the
            same call was lost: read it back to know.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self._errors("creating", name):
            try:
                self._pipe(self._path(name), data, create=True)
            except FileExistsError:
                return False
            except OSError as error:
                if _code(error) in _THERE_ALREADY:
                    return False
                raise
            return True

    def copy_from(self, source: RemoteStore, from_name: str, name: str, *, create: bool) -> bool:
        """Copy an object of another place in the same store, which moves the bytes on its own side
        (Amazon S3 API, "CopyObject").

        Args:
            source: where it is.
            from_name: its name there.
            name: its name here.
            create: ask for the copy only if there is no object of that name. Many stores take no
                notice of it and overwrite.

        Returns:
            Whether it was copied; ``False``: the store says that there is one of that name.

        Raises:
            FileNotFoundError: there is nothing to copy.
            StorageError: the store refused, or did not answer.
        """
        with self._errors(READING, name):
            paths = (source._path(from_name), self._path(name))
            try:
                if hasattr(self.fs, "_copy_basic"):
                    self._call("copy_basic", *paths, **({"IfNoneMatch": "*"} if create else {}))
                else:
                    if not isinstance(self.fs, AsyncFileSystem):
                        self.fs.makedirs(paths[1].rsplit("/", 1)[0], exist_ok=True)
                    self._call("cp_file", *paths)
            except FileExistsError:
                return False
            except OSError as error:
                if _code(error) in _THERE_ALREADY:
                    return False
                raise
        return True

    def stream(self, name: str, part_bytes: int) -> Any:
        """A file to write an object of any size to, from its beginning to its end: an upload in
        parts of so many bytes, which is there once it is closed. Wrap writing in :meth:`errors`.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self._errors("writing", name):
            if not isinstance(self.fs, AsyncFileSystem):
                self.fs.makedirs(self._path(name).rsplit("/", 1)[0], exist_ok=True)
            return self.fs.open(self._path(name), "wb", block_size=part_bytes)

    def copy(self, name: str, url: str) -> None:
        """Copy an object to another URL of the same store, which does it by itself where it can.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self._errors("copying", name):
            self.fs.copy(self._path(name), self.fs._strip_protocol(url))

    def errors(self, doing: str, name: str) -> AbstractContextManager[None]:
        """What the store's library raises inside, as :class:`StorageError` in our words."""
        return self._errors(doing, name)

    def exists(self, name: str = "") -> bool:
        """Whether there is a document, or anything below that name."""
        with self._errors("looking for", name):
            try:
                return bool(self._call("info", self._path(name)))
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return False

    def is_dir(self, name: str = "") -> bool:
        """Whether there is anything below that name."""
        return bool(self.listing(name)) if name else True

    # -- listing and deleting ------------------------------------------------------------------

    def listing(self, name: str = "") -> list[str]:
        """Names directly below; empty where there is nothing."""
        with self._errors("listing", name):
            path = self._path(name)
            try:
                found = self._names(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return []
        # A store may name the folder itself, or a document of the same name.
        below = {entry.rstrip("/") for entry in found} - {path, path.lstrip("/")}
        return sorted({entry.rsplit("/", 1)[-1] for entry in below})

    def _names(self, path: str) -> list[str]:
        if not hasattr(self.fs, "_lsdir"):
            found: list[str] = self._call("ls", path, detail=False, refresh=True)
            return found
        # Of an empty folder its ls() lists the parent too.
        return [about["name"] for about in self._call("lsdir", path, refresh=True)]

    def walk(self, name: str = "") -> list[str]:
        """Names of all documents below, relative to this store's URL."""
        return [entry for entry, _, _ in self.details(name)]

    def details(self, name: str = "") -> list[tuple[str, int, datetime | None]]:
        """Name, relative to this store's URL, size in bytes, and time of writing by the store's
        clock, of all documents below."""
        with self._errors("listing", name):
            try:
                found = self._call("find", self._path(name), detail=True)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return []
        base = self.path.lstrip("/") + "/"
        return sorted(
            (path.lstrip("/")[len(base) :], about.get("size") or 0, _written_at(about))
            for path, about in found.items()
            if path.lstrip("/").startswith(base)
        )

    def delete(self, names: Sequence[str]) -> None:
        """Delete documents, many with one request where the store can; those that are not there do
        not count."""
        with self._errors("deleting below", ""):
            paths = [self._path(name) for name in names]
            bulk = isinstance(self.fs, AsyncFileSystem) and hasattr(self.fs, "_bulk_delete")

            def work(batch: Sequence[str]) -> None:
                if bulk:
                    self._call("bulk_delete", list(batch))
                    return
                for path in batch:
                    try:
                        self._call("rm_file", path)
                    except FileNotFoundError:
                        continue

            run_batched(
                paths,
                work,
                threads=DELETE_REQUESTS,
                weight=lambda _: 1,
                batch_weight=DELETE_BATCH if bulk else 16,
            )
            if bulk:
                return
            # Such stores have folders, which would stay behind empty.
            folders = {path.rpartition("/")[0] for path in paths} - {self.path}
            for folder in sorted(folders, key=len, reverse=True):
                with suppress(OSError, NotImplementedError):
                    self.fs.rmdir(folder)

    def delete_tree(self, name: str = "") -> None:
        """Delete a document, or everything below a name."""
        names = self.walk(name)
        if not names and name and self.exists(name):
            names = [name]
        if names:
            self.delete(names)

    # -- how -----------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _pipe(self, path: str, data: bytes, *, create: bool) -> None:
        mode = "create" if create else "overwrite"
        if isinstance(self.fs, AsyncFileSystem):
            self._call("pipe_file", path, data, mode=mode)
            return
        parent = path.rsplit("/", 1)[0]
        if parent:
            self.fs.makedirs(parent, exist_ok=True)
        if not create:
            self.fs.pipe_file(path, data)
            return
        try:
            file = self.fs.open(path, "xb")
        except (NotImplementedError, ValueError):
            self.fs.pipe_file(path, data, mode=mode)
            return
        with file:
            file.write(data)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the file system, within the deadline where it can have one."""
        if not isinstance(self.fs, AsyncFileSystem):
            kwargs.pop("refresh", None)
            return getattr(self.fs, method)(*args, **kwargs)
        first = id(self.fs) not in _answered
        seconds = FIRST_DEADLINE_S if first else DEADLINE_S
        try:
            if first and hasattr(self.fs, "set_session"):
                with _session_lock:  # first requests at a time would each make a session
                    sync(self.fs.loop, self.fs.set_session, timeout=seconds)
            found = sync(
                self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=seconds, **kwargs
            )
        except FSTimeoutError:
            raise StorageError(
                f"{self.url}: no answer within {seconds:g} s; {NO_ANSWER}", url=self.url
            ) from None
        except OSError as error:
            if _code(error) is not None:
                _answered.add(id(self.fs))
            raise
        _answered.add(id(self.fs))
        return found

    @contextmanager
    def _errors(self, doing: str, name: str) -> Iterator[None]:
        url = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except CheckpointingException:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            if _code(error) == "NoSuchBucket" or doing != READING:
                raise explained(doing, url, error) from error
            raise FileNotFoundError(url) from None
        except Exception as error:  # a store's library raises errors of its own
            raise explained(doing, url, error) from error


def _written_at(about: Mapping[str, Any]) -> datetime | None:
    when = about.get("LastModified") or about.get("mtime") or about.get("created")
    if isinstance(when, int | float):
        return datetime.fromtimestamp(when, UTC)
    if not isinstance(when, datetime):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def remedy(code: str | None) -> str:
    """What to do about an answer of the store.

    Args:
        code: the store's own name for what went wrong, or the HTTP status.
    """
    return _REMEDIES.get(code or "", "see the store's own words")


def explained(doing: str, url: str, error: BaseException, **about: Any) -> StorageError:
    """What the store's library raised, as an error of ours with a remedy."""
    scrub(error)
    code = _code(error)
    name = type(error).__name__
    text = (str(error).strip().splitlines() or [name])[0][:300]
    if code is not None and code in _REMEDIES:
        advice = _REMEDIES[code]
    elif name in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"):
        advice = _CREDENTIALS
    elif isinstance(error, PermissionError):
        advice = _DENIED
    elif isinstance(error, FileNotFoundError):
        advice = _NOT_THERE
    elif isinstance(error, TypeError):
        advice = "check the names of the storage options, which are those of fsspec's file system"
    elif code is None and (
        isinstance(error, ConnectionError | TimeoutError)
        or any(word in name for word in ("Connect", "Timeout", "Endpoint", "HTTPClient"))
    ):
        advice = NO_ANSWER
    else:
        advice = "see the cause"
    shown = f"{code}: {text}" if code and code not in text else text
    failure = StorageError(f"{doing} {url} failed: {shown}; {advice}", url=url, **about)
    failure.errno = getattr(error, "errno", None)
    return failure


def _code(error: BaseException | None) -> str | None:
    """The store's own name for what went wrong (Amazon S3 API, "Error responses")."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            code = response.get("Error", {}).get("Code")
            return None if code is None else str(code)
        error = error.__cause__
    return None


def remote_store(url: str, options: Mapping[str, Any]) -> RemoteStore:
    """The store at a URL. File systems are made once for each set of options and environment.

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
            fs = _file_systems[known] = _file_system(url, protocol, options)
    return RemoteStore(url, fs, fs._strip_protocol(url))


def _file_system(url: str, protocol: str, options: Mapping[str, Any]) -> Any:
    package = "s3fs (pip install 'shardstore[s3]')" if protocol in _S3 else "the package it names"
    make: Callable[..., Any] = fsspec.filesystem
    keep_quiet_about(options)
    try:
        given = _s3_options(options) if protocol in _S3 else dict(options)
        if protocol in _S3:
            return make(protocol, skip_instance_cache=True, **given)
        if protocol == "local":
            return make(protocol, **{"auto_mkdir": True, **given})
        return fsspec.core.url_to_fs(url, **given)[0]
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
