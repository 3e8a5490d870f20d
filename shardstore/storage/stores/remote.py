"""Access to object stores through fsspec (s3fs for S3, gcsfs for Google Cloud Storage): small
documents, listing, deletion, copies and create-if-absent.

Every error is a :class:`~shardstore.errors.StorageError`. Requests have a deadline, so that a store
that does not answer blocks a rank for a limited time only.
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain
from types import ModuleType
from typing import Any
from urllib.request import getproxies

import fsspec  # type: ignore[import-untyped]
from fsspec.asyn import AsyncFileSystem, sync  # type: ignore[import-untyped]
from fsspec.dircache import DirCache  # type: ignore[import-untyped]
from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores import gcs, s3
from shardstore.storage.stores.errors import (
    SETTINGS,
    code_of,
    explained,
    keep_quiet_about,
    overload_of,
    too_late,
    was_cut,
)
from shardstore.storage.stores.object_io import LARGE_BYTES, UNKNOWN_BYTES, ObjectIO, Parts

logger = logging.getLogger(__name__)

FIRST_DEADLINE_S = 20.0
"""Deadline of a request to a store that has not yet answered this process. It is short, to detect
a dead endpoint soon."""
DEADLINE_S = 120.0
"""Deadline of a request to a store that has answered before, including retries."""
SLOWEST_BYTES_PER_S = 128 * 1024
"""The deadline grows by the transfer time at this rate."""
DELETE_BATCH = 250
"""Keys in one bulk deletion. S3 allows a thousand (Amazon S3 API, DeleteObjects), but some stores
delete them sequentially before they answer."""
DELETE_REQUESTS = 8
"""Concurrent deletions."""
DELETE_TRIES = 4
WEB_TRIES = 5
MOST_WAIT_S = 300.0
"""Largest time before another request to a web server that is overloaded. The Hugging Face Hub
counts requests for so long (Hub documentation, "Rate limits")."""
WHOLE_BYTES = 64 * 2**20
"""What a web server that sends whole files may send beyond the range that it is asked for."""
TOLD_WAIT_S = 10.0
"""Longer waits are logged."""
_WORTH_ANOTHER_TRY = ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout")

_THERE_ALREADY = ("PreconditionFailed", "ConditionalRequestConflict", "412")

_WRITTEN_AT = ("LastModified", "last_modified", "mtime", "updated", "created")
"""Names that file systems give the time of writing."""

_NO_BULK = (
    *("MissingContentMD5", "InvalidRequest", "InvalidArgument", "MissingArgument"),
    *("NotImplemented", "MethodNotAllowed", "400", "405", "501"),
)
"""Answers of stores that do not take bulk deletions as botocore sends them, without Content-MD5."""

_OF_INSTANCES = ("asynchronous", "loop", "skip_instance_cache")
"""Options that say how a program shares a file system. Those made here are never shared."""

_FROM_LISTINGS = ("exists", "find", "info", "ls")
"""Methods that a file system may answer from cached listings."""

CLIENTS: Mapping[str, ModuleType] = {"s3": s3, "s3a": s3, "gs": gcs, "gcs": gcs}
"""Modules with the settings of the stores that have a driver of TensorStore, by protocol."""

_file_systems: dict[object, tuple[object, Any]] = {}
"""Each file system with the ``surroundings`` at its creation."""
_moved: dict[str, Any] = {}
"""URL of a file in a commit on the Hugging Face Hub -> the signed URL that it redirected to. The
Hub counts requests (Hub documentation, "Rate limits"), and a large file has many ranges."""
_COMMIT = re.compile("https?://.*/resolve/[0-9a-f]{40}/.")
_answered: set[int] = set()
_lock = threading.Lock()
_session_lock = threading.Lock()


def _file_system(url: str, options: Mapping[str, Any]) -> Any:
    """Return the file system of a URL; the same object for equal options and surroundings.

    Raises:
        StorageError: no such protocol, its package is missing, or the options do not fit.
    """
    protocol = url.partition("://")[0]
    client = CLIENTS.get(protocol)
    surroundings = client.surroundings() if client else None
    bucket = "" if client else url.split("/")[2]
    # fsspec's configuration gives what is not given here, also what s3fs_options would give.
    configured = [fsspec.config.conf.get(name, {}) for name in CLIENTS if CLIENTS[name] is client]
    every = chain(*(about.items() for about in (*configured, options)))
    options = {name: value for name, value in every if name not in _OF_INSTANCES}
    own = options.get("client_kwargs") or {}
    if protocol in ("http", "https") and isinstance(own, Mapping):
        # Only with a proxy: aiohttp then refuses a token for a host that is in ~/.netrc too.
        trust = {"trust_env": True} if getproxies() else {}
        options["client_kwargs"] = {**_web(), **trust, **own}
    # The key has the process id: a forked process must not share connections.
    known = (os.getpid(), protocol, bucket, repr(sorted(options.items(), key=str)))
    with _lock:
        made_in, found = _file_systems.get(known, (None, None))
        if found is None or made_in != surroundings:
            found = _made(url, protocol, options, client)
            _file_systems[known] = surroundings, found
        return found


def _made(url: str, protocol: str, options: Mapping[str, Any], client: ModuleType | None) -> Any:
    keep_quiet_about(options, *(client.secrets(options) if client else ()))
    if client and (wrong := client.problem_of(options, os.environ)):
        raise StorageError(f"{url}: the storage options do not fit: {wrong}", url=url)
    given = s3.s3fs_options(options) if client is s3 else options
    try:
        # The root alone: the rest of a URL is a name, and sets no option such as version_aware.
        root = "/".join(url.split("/")[:3])
        if client is gcs:
            made = gcs.file_system(options)
        else:
            made = fsspec.core.url_to_fs(root, skip_instance_cache=True, **given)[0]
        if client is s3:
            made.split_path = partial(_bucket_and_key, made.split_path)
        # A listing of the claims decides who owns a target, so it must not come from a cache. Not
        # all file systems have an option for this.
        made.dircache = DirCache(use_listings_cache=False)
        return made
    except (TypeError, ValueError) as error:
        if "rotocol not known" in str(error):
            what = f"fsspec knows no store {protocol}://: correct the URL, or install its package"
            text = f"{url}: {what}; MinIO, R2 and their like are s3:// with an endpoint_url"
            raise StorageError(text, url=url) from error
        problem = type(error).__name__
    except Exception as error:  # some file systems connect at once
        raise explained("connecting to", url, error) from error
    # Raised outside of the handler: the text of the caught error, which would be the context, could
    # contain credentials.
    raise StorageError(
        f"{url}: the storage options do not fit ({problem}): compare the names and values of "
        f"{sorted(map(str, options))} with those of fsspec's {protocol} file system",
        url=url,
    )


async def _require_range(answer: Any) -> None:
    """Raise :class:`StorageError` if a web server sends other bytes than the range that it was
    asked for, before they are read (RFC 9110, "206 Partial Content"). A small file may come whole
    if its beginning was asked for."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d+)", answer.request_info.headers.get("Range", ""))
    if asked is None or answer.status not in (200, 206):
        return
    first, last = map(int, asked.groups())
    sent = re.match(r"bytes (\d+)-(\d+)/", answer.headers.get("Content-Range", ""))
    start = int(sent[1]) if sent else first if answer.status == 206 else 0
    end = int(sent[2]) if sent else start + (answer.content_length or 1) - 1
    if start != first or end > last + (0 if sent else WHOLE_BYTES):
        url = str((*answer.history, answer)[0].request_info.url.with_query(None))
        text = "the server sends whole files, or other bytes than the range that it is asked for"
        raise StorageError(f"{url}: {text}; download the files, or use another server", url=url)


async def _remember(_: object, __: object, redirect: Any) -> None:
    """Remember where a file of the Hub comes from, see :data:`_moved`."""
    asked = redirect.url.with_query(None)  # such as that of a copied link, "?download=true"
    target = asked.join(type(asked)(redirect.response.headers.get("Location", "")))
    if _COMMIT.match(str(asked)) and target.host != asked.host:
        keep_quiet_about({}, target.raw_query_string)
        _moved[str(asked)] = target


@cache
def _web() -> dict[str, Any]:
    """Return arguments of aiohttp's session. Ranges of compressed files would be of no use."""
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_remember)
    headers = {"Accept-Encoding": "identity"}
    return {"raise_for_status": _require_range, "headers": headers, "trace_configs": [trace]}


def _bucket_and_key(split: Callable[[str], tuple[str, ...]], path: str) -> tuple[str, str, None]:
    """Return the bucket and the key of a path, as TensorStore and listings have them: s3fs would
    take "?versionId=" for the end of a key."""
    bucket, path = split(path)[0], re.sub("^s3a?://", "", path).lstrip("/")
    return bucket, path[len(bucket) + 1 :], None


class RemoteStore:
    """Documents and objects below a URL.

    Args:
        url: the URL, with its protocol.
        options: storage options of fsspec.

    Attributes:
        fs: the fsspec file system.
        path: the path of the URL in that file system.

    Raises:
        StorageError: no such protocol, its package is missing, or the options do not fit.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        self.fs = _file_system(url, options)
        self.path = self.fs._strip_protocol(url).rstrip("/")

    def is_same_store(self, other: RemoteStore) -> bool:
        """Return whether one request can copy objects from here to the other."""
        # "==" of two file systems also compares their threads.
        one, two = self.fs, other.fs
        return type(one) is type(two) and bool(one.storage_options == two.storage_options)

    # -- documents -----------------------------------------------------------------------------

    def read_range(self, name: str, start: int, stop: int | None, size: int = 0) -> bytes | None:
        """Return bytes ``start:stop`` of a document, fewer if it ends before ``stop``; ``None`` if
        there is no such document. ``size`` is the expected number of bytes, which extends the
        deadline.

        Raises:
            StorageError: the store refused, did not answer, or does not send the range.
        """
        part: dict[str, Any] = {} if (start, stop) == (0, None) else {"start": start, "end": stop}
        try:
            with self.errors("reading", name, absent=True):
                data: bytes = self._cat(self._path(name), size, part)
        except FileNotFoundError:
            return None
        except StorageError as error:
            # The document ends before the range begins. Some answers have only the status.
            if code_of(error) in ("InvalidRange", "416"):
                return b""
            raise
        return data[:stop] if start == 0 else data

    def _cat(self, path: str, size: int, part: Mapping[str, Any]) -> Any:
        """Return bytes of a document; see :data:`_moved`."""
        known = str(self.fs.encode_url(path)) if _COMMIT.match(path) else ""
        # A program's own headers of the session would go to the other server too.
        if known in _moved and self.fs.client_kwargs["headers"] == _web()["headers"]:
            own = {"params", "auth"} & self.fs.kwargs.keys()
            bare: dict[str, Any] = {"headers": {}, **dict.fromkeys(own)}
            with suppress(Exception):  # a signature that has expired, or is for another method
                return self._call("cat_file", _moved[known], size=size, **part, **bare)
        return self.call("cat_file", path, size=size, **part)

    def driver_settings(self) -> s3.S3Settings | gcs.GcsSettings:
        """Return what TensorStore must know of the store, as s3fs or gcsfs determined it.

        Raises:
            StorageError: there are no credentials, or the client cannot get them in time.
        """
        find, seconds = CLIENTS[self.url.partition("://")[0]].settings, FIRST_DEADLINE_S
        with self.errors("connecting to", ""):
            try:
                found: s3.S3Settings | gcs.GcsSettings = sync(
                    self.fs.loop, find, self.fs, self.url, timeout=seconds
                )
            except FSTimeoutError:  # of a program or service that gives credentials
                late = TimeoutError(f"they did not come within {seconds:.0f} s")
                advice = SETTINGS if find is s3.settings else ""
                raise explained("finding credentials of", self.url, late, advice) from None
            return found

    def write(self, name: str, data: bytes) -> None:
        """Write a document, and replace an existing one.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self.errors("writing", name):
            self._pipe(self._path(name), data, create=False)

    def create(self, name: str, data: bytes) -> bool:
        """Write a document if none of its name exists; in one atomic step if the store supports it
        (on S3 a PUT with If-None-Match).

        Returns:
            Whether this call wrote the document. It may be ``False`` after a successful write if
            the answer to an earlier try was lost: read the document to find out.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self.errors("creating", name):
            return unless_there(lambda: self._pipe(self._path(name), data, create=True))

    def copy_from(self, source: RemoteStore, name: str) -> bool:
        """Copy an object within the store if no object of its name exists here. Many stores ignore
        this condition and overwrite. The bytes stay on the server (Amazon S3 API, "CopyObject").

        Args:
            source: location of the object to copy.
            name: its name below ``source``, and that of the copy below this URL.

        Returns:
            Whether the object was copied. ``False`` if an object of that name exists.

        Raises:
            FileNotFoundError: the object to copy does not exist.
            StorageError: the store refused, or did not answer.
        """
        paths = source._path(name), self._path(name)

        def copy() -> None:
            self._make_folder_of(paths[1])
            if hasattr(self.fs, "_copy_basic"):
                self.call("copy_basic", *paths, IfNoneMatch="*")
            else:
                self.call("cp_file", *paths)

        with source.errors("copying", name, absent=True):
            return unless_there(copy)

    def become_copy_of(self, source: RemoteStore) -> None:
        """Copy an object of any size within the store to this URL. This takes a request for the
        size. An object of more than 5 GiB is copied in parts, with no deadline for the whole copy.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self.errors("copying to", ""):
            self._make_folder_of(self.path)
            self.fs.cp_file(source.path, self.path)

    def stream(self, name: str, part_bytes: int) -> Any:
        """Return a file for sequential writing of an object of any size. It uploads parts of
        ``part_bytes`` bytes; the object exists once the file is closed. Wrap writes in
        :meth:`errors`.

        Raises:
            StorageError: the store refused, or did not answer.
        """
        with self.errors("writing", name):
            self._make_folder_of(self._path(name))
            return self.fs.open(self._path(name), "wb", block_size=part_bytes)

    def exists(self, name: str = "") -> bool:
        """Return whether there is a document, or anything below that name."""
        return bool(self._info(name))

    def stamp(self, name: str) -> tuple[int, object] | None:
        """Return the size of a document in bytes, and a value that changes when it is replaced;
        ``None`` if there is none."""
        about = self._info(name)
        tag = about.get("ETag") or about.get("etag")
        return (about.get("size") or 0, repr((tag, _written_at(about)))) if about else None

    def _info(self, name: str) -> Mapping[str, Any]:
        with suppress(FileNotFoundError), self.errors("looking for", name, absent=True):
            found: Mapping[str, Any] = self.call("info", self._path(name))
            return found
        return {}

    # -- listing and deleting ------------------------------------------------------------------

    def listing(self, name: str = "") -> list[str]:
        """Return the names directly below a name; empty if there is none."""
        path, found = self._path(name), []
        with suppress(FileNotFoundError), self.errors("listing", name, absent=True):
            if hasattr(self.fs, "_lsdir"):  # the ls() of s3fs lists the parent of an empty folder
                found = [about["name"] for about in self.call("lsdir", path)]
            else:
                found = self.call("ls", path, detail=False)
        # A listing may include the folder itself, or a document of the same name.
        below = {entry.rstrip("/") for entry in found} - {path, path.lstrip("/")}
        return sorted({entry.rsplit("/", 1)[-1] for entry in below})

    def walk(self, name: str = "") -> list[str]:
        """Return the names of all documents below a name, relative to this store's URL."""
        return [entry for entry, _, _ in self.details(name)]

    def details(self, name: str = "") -> list[tuple[str, int, datetime | None]]:
        """Return name, size in bytes and time of writing of all documents below a name. The names
        are relative to this store's URL; the time is that of the store's clock."""
        found: dict[str, Any] = {}
        with suppress(FileNotFoundError), self.errors("listing", name, absent=True):
            found = self.call("find", self._path(name), detail=True)
            if not isinstance(found, dict):  # some ignore ``detail`` if the path is a document
                found = {path: self.call("info", path) for path in found}
        base = self.path.lstrip("/") + "/"
        return sorted(
            (path.lstrip("/")[len(base) :], about.get("size") or 0, _written_at(about))
            for path, about in found.items()
            if path.lstrip("/").startswith(base)
        )

    def delete(self, names: Sequence[str]) -> None:
        """Delete documents, in bulk requests if the store has them. A missing document is no
        error."""
        paths = [self._path(name) for name in names]
        in_bulk = hasattr(self.fs, "_call_s3")
        work, at_once = (self._delete_keys, DELETE_BATCH) if in_bulk else (self._delete_each, 1)
        with self.errors("deleting below", ""):
            run_batched(paths, work, threads=DELETE_REQUESTS, batch_weight=at_once)
            if in_bulk:
                return
            # These stores have folders: remove the empty ones. A folder that another writer has
            # used in the meantime is not empty, and stays.
            folders = {path.rpartition("/")[0] for path in paths} - {self.path}
            for folder in sorted(folders, key=len, reverse=True):
                with suppress(OSError, NotImplementedError):
                    self.fs.rmdir(folder)

    def _delete_each(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError), self.errors("deleting below", "", absent=True):
                self.call("rm_file", path)

    def _delete_keys(self, paths: Sequence[str]) -> None:
        """Delete many keys with one request (Amazon S3 API, DeleteObjects), and repeat it for keys
        that failed for a transient reason. The answer is HTTP 200 even if it lists refused keys.

        Raises:
            StorageError: the store refused to delete one of them.
        """
        bucket = self.fs.split_path(paths[0])[0]
        left = [self.fs.split_path(path)[1] for path in paths]
        for tried in range(DELETE_TRIES):
            if tried:
                time.sleep(0.2 * 2**tried)
            wanted = {"Objects": [{"Key": key} for key in left], "Quiet": True}
            try:
                answer = self.call("call_s3", "delete_objects", Bucket=bucket, Delete=wanted)
            except OSError as error:
                if code_of(error) not in _NO_BULK:
                    raise
                self._delete_each(paths)
                return
            refused = [e for e in answer.get("Errors") or () if e.get("Code") != "NoSuchKey"]
            if not refused:
                return
            left = [e["Key"] for e in refused]
            if not all(e.get("Code") in _WORTH_ANOTHER_TRY for e in refused):
                break
        first = refused[0]
        raise StorageError(
            f"deleting s3://{bucket}/{first['Key']} was refused: {first.get('Code')} "
            f"({first.get('Message') or 'no reason given'}), as were {len(refused) - 1} more of "
            f"{len(paths)} objects; allow s3:DeleteObject below {self.url}",
            url=self.url,
        )

    # -- how -----------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path

    def _make_folder_of(self, path: str) -> None:
        """Create the folder of a document, if the store has folders."""
        parent = path.rpartition("/")[0]
        if parent and not isinstance(self.fs, AsyncFileSystem):
            self.fs.makedirs(parent, exist_ok=True)

    def _pipe(self, path: str, data: bytes, *, create: bool) -> None:
        mode = "create" if create else "overwrite"
        if isinstance(self.fs, AsyncFileSystem):
            # botocore sends ``bytes`` with "Expect: 100-continue", which takes a round trip.
            is_document = hasattr(self.fs, "_call_s3") and len(data) < LARGE_BYTES
            body = bytearray(data) if is_document else data
            self.call("pipe_file", path, body, size=len(data), mode=mode)
            return
        self._make_folder_of(path)
        if not create:
            self._replace(path, data)
            return
        try:
            file = self.fs.open(path, "xb")
        except (NotImplementedError, ValueError):  # the file system does not support this mode
            self.fs.pipe_file(path, data, mode=mode)
            return
        with file:
            file.write(data)

    def _replace(self, path: str, data: bytes) -> None:
        """Replace a file. On a local file system, write a new file and rename it, because a late
        writer may still have the old file open."""
        if not isinstance(self.fs, LocalFileSystem):
            self.fs.pipe_file(path, data)
            return
        fresh = f"{path}.{secrets.token_hex(4)}.new"
        try:
            self.fs.pipe_file(fresh, data)
            self.fs.mv(fresh, path)
        finally:
            with suppress(OSError):
                self.fs.rm_file(fresh)

    def deadline_s(self, size: int = 0) -> float:
        """Return the deadline in seconds of a request that transfers ``size`` bytes."""
        transfer = size / SLOWEST_BYTES_PER_S
        if id(self.fs) in _answered:
            return DEADLINE_S + transfer
        return max(FIRST_DEADLINE_S, transfer)

    def has_answered(self) -> None:
        """Record that the store answers this process: later requests have the longer deadline."""
        _answered.add(id(self.fs))

    def call(self, method: str, *args: Any, size: int = 0, **kwargs: Any) -> Any:
        """Call a method of the file system that transfers ``size`` bytes. Asynchronous file systems
        have a deadline. A web server that is overloaded is asked again, after the time that it
        gives, and so is one that cut its answer; the clients of other stores do this themselves."""
        for tried in range(1, WEB_TRIES):
            try:
                return self._call(method, *args, size=size, **kwargs)
            except Exception as error:
                answer = overload_of(error)
                if answer is None and not (self.url.startswith("http") and was_cut(error)):
                    raise
                headers = getattr(answer, "headers", None) or {}
            said = headers.get("Retry-After") or re.sub(".*t=", "", headers.get("RateLimit", ""))
            seconds = float(said) if said.isdecimal() else 2**tried * random.uniform(0.2, 0.4)
            if (seconds := min(seconds, MOST_WAIT_S)) > TOLD_WAIT_S:
                logger.warning("%s: the server asks to wait for %.0f s", self.url, seconds)
            time.sleep(seconds)
        return self._call(method, *args, size=size, **kwargs)

    def _call(self, method: str, *args: Any, size: int, **kwargs: Any) -> Any:
        if not isinstance(self.fs, AsyncFileSystem):
            if method in _FROM_LISTINGS:
                self.fs.invalidate_cache()  # others may have written since the cached listing
            return getattr(self.fs, method)(*args, **kwargs)
        seconds, call = self.deadline_s(size), getattr(self.fs, f"_{method}")
        deadline = time.monotonic() + seconds
        try:
            if id(self.fs) not in _answered and hasattr(self.fs, "set_session"):
                with _session_lock:  # concurrent first requests would each create a session
                    if hasattr(self.fs, "_call_s3"):
                        self.driver_settings()
                    else:
                        sync(self.fs.loop, self.fs.set_session, timeout=seconds)
            left = max(0.01, deadline - time.monotonic())  # fsspec takes 0 for no limit
            found = sync(self.fs.loop, call, *args, timeout=left, **kwargs)
        except FSTimeoutError:
            raise too_late(self.url, seconds) from None
        except OSError as error:
            if code_of(error) is not None:
                self.has_answered()
            raise
        self.has_answered()
        return found

    @contextmanager
    def errors(self, doing: str, name: str, *, absent: bool = False) -> Iterator[None]:
        """Convert errors of the store's library to :class:`StorageError`. If ``absent``, raise
        :class:`FileNotFoundError` for a missing document."""
        url = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except CheckpointingException:
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            # A client names a file of this machine that it lacks, such as a credential_process.
            is_of_client = error.filename is not None and isinstance(self.fs, AsyncFileSystem)
            # A listing without keys is no 404.
            refusals = ("NoSuchBucket", "404") if doing == "listing" else ("NoSuchBucket",)
            is_refused = code_of(error) in refusals or overload_of(error)
            if is_refused or is_of_client or not absent:
                raise explained(doing, url, error) from error
            raise FileNotFoundError(url) from None
        except Exception as error:  # the libraries have their own exception types
            raise explained(doing, url, error) from error


class FileSystemIO(ObjectIO):
    """Puts and gets objects through an fsspec file system."""

    requests = small_requests = 8

    def __init__(self, store: RemoteStore) -> None:
        self._store = store

    def put(self, key: str, parts: Parts, *, create: bool) -> bool:
        """See :meth:`ObjectIO.put`."""
        data = b"".join(parts)
        if create:
            return self._store.create(key, data)
        self._store.write(key, data)
        return True

    def get(
        self, key: str, start: int = 0, stop: int | None = None, *, size: int = UNKNOWN_BYTES
    ) -> bytes | memoryview | None:
        """See :meth:`ObjectIO.get`."""
        return self._store.read_range(key, start, stop, size)


def unless_there(write: Callable[[], None]) -> bool:
    """Call ``write`` and return ``True``; ``False`` if an object of that name exists."""
    try:
        write()
    except FileExistsError:
        return False
    except Exception as error:  # the libraries have their own exception types
        if code_of(error) in _THERE_ALREADY:
            return False
        raise
    return True


def _written_at(about: Mapping[str, Any]) -> datetime | None:
    when = next((about[name] for name in _WRITTEN_AT if about.get(name)), None)
    if isinstance(when, int | float):
        return datetime.fromtimestamp(when, UTC)
    if not isinstance(when, datetime):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
