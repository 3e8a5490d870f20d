"""The location of a checkpoint, and operations on its small documents.

Local paths use the operating system; all other URLs use fsspec (:mod:`remote`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

from shardstore.errors import ArgumentError, CheckpointingException, StorageError, damaged
from shardstore.storage.runtime.counters import counters

if TYPE_CHECKING:
    from shardstore.storage.stores.remote import RemoteStore

E = TypeVar("E", bound=CheckpointingException)

_FILE = "file://"
# A scheme has at least two letters: a single letter is a Windows drive.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)


_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of reading a file or folder that does not exist, or is of the other kind."""
_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")
_VERSION = re.compile(r"\?(?:.*&)?(?:versionid|generation)=.*", re.DOTALL | re.IGNORECASE)


def shown(place: object) -> str:
    """Return a path or URL for error texts and logs, with the user and password part hidden."""
    return re.sub(r"(?s)(:/+)[^/]*:.*@", r"\1***@", str(place))


def url_of(place: object) -> str:
    """Return an absolute path, or a URL without a slash at its end.

    Args:
        place: a path (``~`` is the home folder) or a URL.

    Raises:
        ArgumentError: ``place`` is neither a path nor a supported URL. The text says what to give.
    """
    # RFC 3986, section 3.1: schemes are case-insensitive.
    url = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:/", lambda found: found[0].lower(), _text(place))
    if url.startswith(_FILE):
        # RFC 8089: an empty host is the local one, as is localhost; escapes stand for bytes.
        url = re.sub("^localhost(?=/)", "", url[len(_FILE) :])
        url = os.fsdecode(unquote_to_bytes(os.fsencode(url)))
        if not url:
            raise _wrong(place, "is empty: give a path or a URL")
    elif parts := _SCHEME.match(url):
        scheme, slashes, rest = parts["scheme"], parts["slashes"], parts["rest"].strip("/")
        has_bucket = scheme in _OF_BUCKETS
        # A secret key may contain slashes; bucket names contain no colon, except for ARNs.
        if has_bucket and re.match(r"(?!arn:)[^/]*:", rest):
            raise _wrong(
                f"{scheme}://***",
                "has a colon where the name of the bucket is expected: credentials are no part of "
                "such a URL; give them as storage_options={'key': ..., 'secret': ...}, or as AWS_* "
                "variables or a profile",
            )
        if not rest and scheme != "memory":  # memory:// has no buckets
            raise _wrong(place, "names no bucket; give a URL such as s3://bucket/run/step-100")
        if has_bucket and not {"", ".", ".."}.isdisjoint(rest.split("/")):
            raise _wrong(
                place,
                "has a part between slashes that is empty, '.' or '..', which not every client of "
                "object stores accepts: leave it out",
            )
        whole = f"{scheme}://{'/' * (scheme == 'file')}{rest}"
        if slashes == "/":
            what = "has lost a slash, as URLs do in pathlib.Path"
            raise _wrong(place, f"{what}: give {whole!r} as a string")
        plain = _VERSION.sub("", whole)
        if plain != whole or (has_bucket and slashes != "//"):
            raise _wrong(
                place,
                "names a version of an object, or has three slashes before the bucket, which not "
                f"every client reads as a part of the name: give {plain!r}",
            )
    if "\0" in url:
        raise _wrong(place, "has a NUL character, which no path may contain")
    # A file system of a chain may answer from a cache, or keep many names in one file, but claims
    # and commits need the store itself.
    if "://" in url and "::" in url:
        raise _wrong(place, "is a chain of URLs, which cannot hold one: give the store's URL")
    if "://" not in url:
        url = os.path.abspath(os.path.expanduser(url))
    scheme, separator, path = url.rpartition("://")
    return f"{scheme}{separator}{path.rstrip('/')}" or "/"


def _text(place: object) -> str:
    try:
        url = os.fspath(place)  # type: ignore[call-overload]
    except TypeError:
        url = None
    if not isinstance(url, str):
        raise ArgumentError(
            f"the place of a checkpoint must be a path or a URL, not a {type(place).__name__} "
            f"({place!r:.100})"
        )
    if not url.strip():
        raise _wrong(place, "is empty: give a path or a URL")
    if url != url.lstrip() and "://" in url:
        raise _wrong(place, "begins with a blank: remove it")
    return url


def _wrong(place: object, what: str) -> ArgumentError:
    return ArgumentError(f"the place of a checkpoint, {shown(place)!r}, {what}", url=shown(place))


_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or choose another place",
    errno.EDQUOT: "the disk quota is used up: free space or choose another place",
    errno.EFBIG: "the file system or a limit of the process (ulimit -f) allows no file that large: "
    "raise the limit or save smaller chunks",
    errno.EXDEV: "it and its parent are on different file systems: save to a folder below it",
    errno.EBUSY: "the folder is in use, as a mount point perhaps: save to a folder below it",
    errno.ENOTDIR: "a file is where a folder should be: choose another place",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "permission is denied: check the owner and mode of the folder",
    errno.EPERM: "the operation is not permitted: check the owner and mode of the folder",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.ELOOP: "a symbolic link leads to itself, or is where a file is to be written: remove it",
    errno.ENXIO: "a FIFO, a device or a socket is where a file is to be written: remove it",
    errno.ENAMETOOLONG: "the path is too long: shorten the key or the folder",
    errno.ENOENT: "the folder does not exist: it cannot be created, or something removed it "
    "while it was in use",
}


@contextmanager
def store_errors(doing: str, url: str, *, key: str | None = None) -> Iterator[None]:
    """Convert an operating system error to a :class:`StorageError` that names the operation and the
    remedy."""
    try:
        yield
    except CheckpointingException:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, "check the disk and the system log")
        about = f" for key {key!r}" if key is not None else ""
        text = f"{doing} {url}{about} failed: {os.strerror(error.errno)}; {remedy}"
        failure = StorageError(text, key=key, url=url)
        failure.errno = error.errno
        raise failure from error


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_regular(path: str) -> int:
    """Open a regular file for reading. Refuse a FIFO or a device, because reading it could block
    forever.

    Raises:
        DamagedCheckpointError: the path is a FIFO, a device, a socket or a link to itself.
        IsADirectoryError, OSError: the operating system cannot open it.
    """
    mode = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link to itself, a socket
            raise
    else:
        mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    wrong = "is not a regular file (but a FIFO, a device or a link to itself)"
    raise damaged(path, f"{wrong}, and saves write regular files only: the checkpoint is damaged")


def require_size(data: bytes | memoryview | None, url: str, most: int | None) -> None:
    """Raise :class:`DamagedCheckpointError` if a file or object has more bytes than the commit
    says."""
    if data is not None and most is not None and len(data) > most:
        what = f"has more than {most} bytes, its size in the commit: the checkpoint is damaged"
        raise damaged(url, what)


def fsync(path: str) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class StoreUrl(str):
    """A URL string that carries its storage options.

    ``repr``, ``str`` and a pickle omit the options, because they may contain credentials.
    """

    options: Mapping[str, Any]

    def __new__(cls, url: str, options: Mapping[str, Any]) -> StoreUrl:
        """Return a URL with options."""
        self = super().__new__(cls, url)
        self.options = options
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)


@dataclass(frozen=True)
class Location:
    """A folder on a disk, or a prefix in an object store.

    Attributes:
        url: as given; a plain path for local disks.
        options: storage options of fsspec. ``repr`` omits them: they may contain credentials.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, place: str | os.PathLike[str] | Location, options: Mapping[str, Any] | None = None
    ) -> Location:
        """Return a location from a path, a URL (``file://``, ``memory://``, ``s3://`` ...) or a
        location. A leading ``~`` is the home folder.

        Args:
            place: path, URL or location.
            options: storage options of fsspec, in addition to those of ``place``.

        Raises:
            ArgumentError: ``place`` is neither a path nor a supported URL, or ``options`` is not a
                mapping.
        """
        if not isinstance(options, Mapping | None):
            raise ArgumentError(
                # The text does not show the value, which may contain a secret.
                f"storage_options must be a dict, such as {{'endpoint_url': 'http://host:9000'}}, "
                f"not of type {type(options).__name__}"
            )
        own = place.options if isinstance(place, Location | StoreUrl) else {}
        url = place.url if isinstance(place, Location) else url_of(place)
        return cls(url, {**own, **(options or {})})

    @property
    def is_local(self) -> bool:
        """Whether the location is a folder of the operating system."""
        return "://" not in self.url

    @property
    def is_s3(self) -> bool:
        """Whether the location is a prefix in an S3 bucket."""
        return self.url.startswith(("s3://", "s3a://"))

    @property
    def place(self) -> str | Path:
        """The local folder, or the URL with its options; the argument of strategies."""
        return Path(self.url) if self.is_local else StoreUrl(self.url, self.options)

    @property
    def remote(self) -> RemoteStore:
        """The store of this location, over fsspec. Not for local folders.

        Raises:
            StorageError: fsspec does not know the store, or its package is missing.
        """
        # Imported here: local checkpoints do not need fsspec and its dependencies.
        from shardstore.storage.stores.remote import RemoteStore

        return RemoteStore(self.url, self.options)

    def error(self, text: str, kind: type[E] = StorageError) -> E:  # type: ignore[assignment]
        """Return an error about this location. Its message is the URL, followed by ``text``."""
        return kind(f"{self.url}{text}", url=self.url)

    def require_no_file(self) -> None:
        """Raise :class:`StorageError` if the location is a file instead of a folder."""
        if self.is_local and os.path.isfile(self.url):
            raise self.error(" is a file; give the folder below which checkpoints are saved")

    def require_shared(self, processes: int) -> None:
        """Raise :class:`StorageError` if several processes cannot all see the location."""
        if processes > 1 and self.url.startswith("memory://"):
            raise self.error(
                f" is the memory of one process, but {processes} ranks save; give a folder or an "
                "object store that all of them see"
            )

    @property
    def path(self) -> Path:
        """The local folder."""
        return Path(self.url)

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return self.url.rsplit("/", 1)[-1]

    def child(self, *names: str) -> Location:
        """Return the location below this one."""
        return Location("/".join([self.url, *names]), self.options)

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the content of a small document, of at most ``most`` bytes.

        Raises:
            FileNotFoundError: there is no such document.
            DamagedCheckpointError: a FIFO, a device or a socket has its name, or it is too large.
            StorageError: the store failed.
        """
        found = self.read_if_there(name, most)
        if found is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        return found

    def read_if_there(self, name: str, most: int | None = None) -> bytes | None:
        """See :meth:`read`; ``None`` if there is no such document."""
        counters.add(documents_read=1)
        found = self.read_range(name, 0, None if most is None else most + 1)
        require_size(found, f"{self.url}/{name}", most)
        return found

    def read_range(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return bytes ``start:stop`` of a file, fewer if it ends before ``stop``; ``None`` if
        there is no such file. Raises the other errors of :meth:`read`."""
        if not self.is_local:
            return self.remote.read_range(name, start, stop, (stop or start) - start)
        path = f"{self.url}/{name}"
        with store_errors("reading", path), suppress(*_ABSENT):
            fd = open_regular(path)
            with open(fd, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(start, size))
                return file.read(max(0, (size if stop is None else min(stop, size)) - start))
        return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small document and create its folders. Never write through a symbolic link.

        Raises:
            StorageError: the store failed.
        """
        if self.is_local:
            path = self._own_path(name)
            with store_errors("writing", path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb", opener=_open_no_link) as file:
                    file.write(data)
            return
        self.remote.write(name, data)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small document in one atomic step.

        Raises:
            StorageError: the store refused; the old document is unchanged.
        """
        if not self.is_local:
            self.write(name, data)
            return
        path = self._own_path(name)
        fresh = f"{path}.new-{os.getpid()}"
        with store_errors("replacing", path):
            try:
                with open(fresh, "wb", opener=_open_no_link) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, path)
                fsync(os.path.dirname(path))
            finally:
                with suppress(OSError):
                    os.unlink(fresh)

    def stamp(self, name: str) -> tuple[int, object] | None:
        """Return the size of a file in bytes, and a value that changes when the file is replaced;
        ``None`` if there is no such file.

        Raises:
            StorageError: the store failed.
        """
        if not self.is_local:
            return self.remote.stamp(name)
        with suppress(OSError):
            found = os.stat(f"{self.url}/{name}")
            return found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns)
        return None

    def exists(self, name: str = "") -> bool:
        """Return whether there is a document or folder of that name (default: this location
        itself)."""
        if self.is_local:
            return os.path.lexists(os.path.join(self.url, name) if name else self.url)
        return self.remote.exists(name)

    def is_dir(self) -> bool:
        """Return whether this location is a folder of the operating system."""
        return self.is_local and os.path.isdir(self.url)

    def listing(self, name: str = "") -> list[str]:
        """Return the names directly below a folder; empty if there is none.

        Raises:
            StorageError: the store refused.
        """
        if self.is_local:
            path = os.path.join(self.url, name) if name else self.url
            with store_errors("listing", path), suppress(*_ABSENT):
                return sorted(os.listdir(path))
            return []
        return self.remote.listing(name)

    def walk(self, name: str = "") -> list[str]:
        """Return the names of all files below a folder, relative to this location. Symbolic links
        to folders are not followed."""
        if not self.is_local:
            return self.remote.walk(name)
        top = os.path.join(self.url, "")
        found = os.walk(top + name)
        paths = (os.path.join(above, file) for above, _, files in found for file in files)
        return [path.removeprefix(top) for path in paths]

    def delete(self, name: str = "") -> None:
        """Remove a document, or a folder with its content. Remove a symbolic link itself, not its
        target. A missing name is no error.

        Raises:
            StorageError: the store refused, or a folder above the name is a symbolic link.
        """
        if self.is_local:
            target = self._own_path(name)
            with store_errors("removing", target):
                if os.path.isdir(target) and not os.path.islink(target):
                    shutil.rmtree(target)
                elif os.path.lexists(target):
                    os.unlink(target)
            return
        store = self.remote
        store.delete(store.walk(name))

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link."""
        return self.is_local and os.path.islink(f"{self.url}/{name}")

    def require_no_link_to(self, name: str) -> None:
        """Raise :class:`StorageError` if a folder between this location and a name below it is a
        symbolic link: saves and deletions do not follow symbolic links."""
        parts = name.split("/")
        for above in ("/".join(parts[:n]) for n in range(1, len(parts))):
            if self.is_link(above):
                raise self.child(above).error(
                    " is a symbolic link, and nothing is written or removed behind one: put the "
                    f"folder that it leads to in its place, or remove {above}"
                )

    def _own_path(self, name: str) -> str:
        """Return the local path of a name to write or remove, after :meth:`require_no_link_to`."""
        self.require_no_link_to(name)
        return f"{self.url}/{name}" if name else self.url

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[object, ...]:
        # As with StoreUrl, a pickle omits the storage options, which may contain credentials.
        return Location, (self.url,)
