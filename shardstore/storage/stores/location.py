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
from typing import TYPE_CHECKING, Any

from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    DamagedCheckpointError,
    StorageError,
)
from shardstore.storage.movers.counters import counters

if TYPE_CHECKING:
    from shardstore.storage.stores.remote import RemoteStore

_FILE = "file://"
# Of two letters at least, for drives of Windows have one.
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/+)(?P<rest>.*)", re.DOTALL)


_OF_BUCKETS = ("s3", "s3a", "gs", "gcs")


def shown(place: object) -> str:
    """Return a place as texts may name it: what stands where a URL has a user and a password is
    hidden."""
    return re.sub(r"(?s)(:/+)[^/]*:.*@", r"\1***@", str(place))


def url_of(place: object) -> str:
    """Return an absolute path, or a URL without a slash at its end.

    Args:
        place: a path (``~`` is the home folder) or a URL.

    Raises:
        ArgumentError: no path and no URL; says what it is, and what to give.
    """
    # RFC 3986, section 3.1: schemes do not mind capitals.
    url = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:/", lambda found: found[0].lower(), _text(place))
    if url.startswith(_FILE):
        # RFC 8089: an empty host is this one, as is localhost.
        url = re.sub("^localhost(?=/)", "", url[len(_FILE) :])
        _require(bool(url), place, "is empty: give a path or a URL")
    elif parts := _SCHEME.match(url):
        scheme, rest = parts["scheme"], parts["rest"].strip("/")
        # A secret key may have slashes in it; names of buckets have no colon (but for ARNs).
        has_credentials = scheme in _OF_BUCKETS and bool(re.match(r"(?!arn:)[^/]*:", rest))
        if has_credentials:
            raise ArgumentError(
                f"the place of a checkpoint, {scheme}://***, has a colon where the name of the "
                "bucket is expected: credentials are no part of such a URL; give them as "
                "storage_options={'key': ..., 'secret': ...}, or as AWS_* variables or a profile",
                url=f"{scheme}://***",
            )
        named = bool(rest) or scheme == "memory"  # which has no buckets
        _require(named, place, "names no bucket; give a URL such as s3://bucket/run/step-100")
        parts_wrong = scheme in _OF_BUCKETS and not {"", ".", ".."}.isdisjoint(rest.split("/"))
        _require(
            not parts_wrong,
            place,
            "has a part between slashes that is empty, '.' or '..', which not every client of such "
            "a store takes: leave it out",
        )
        whole = f"{scheme}://{'/' * (scheme == 'file')}{rest}"
        _require(
            len(parts["slashes"]) > 1,
            place,
            f"has lost a slash, as URLs do in pathlib.Path: give {whole!r} as a string",
        )
    # What is between us and the store may answer from a cache, or keep many names in one file:
    # claims and commits need the store itself.
    is_chain = "://" in url and "::" in url
    _require(not is_chain, place, "is a chain of URLs, which can hold none: give the store's own")
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
            f"the place of a checkpoint is a path or a URL, not of type {type(place).__name__} "
            f"({place!r:.100})"
        )
    _require(bool(url.strip()), place, "is empty: give a path or a URL")
    _require("\0" not in url, place, "has a NUL character, which no path has")
    _require(url == url.lstrip() or "://" not in url, place, "begins with a blank: take it away")
    return url


def _require(condition: bool, place: object, what: str) -> None:
    if not condition:
        raise ArgumentError(
            f"the place of a checkpoint, {shown(place)!r}, {what}", url=shown(place)
        )


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
    errno.ENOENT: "the folder is not there: it cannot be made, or something removed it "
    "while it was in use",
}


@contextmanager
def store_errors(doing: str, url: str, *, key: str | None = None) -> Iterator[None]:
    """Turn an operating system error into a :class:`StorageError` that says what was being done,
    and the remedy."""
    try:
        yield
    except CheckpointingException:
        raise
    except OSError as error:
        if error.errno is None:
            raise
        remedy = _REMEDIES.get(error.errno, "check the disk, and the messages of the system")
        about = f" for key {key!r}" if key is not None else ""
        failure = StorageError(
            f"{doing} {url}{about} failed: {os.strerror(error.errno)}; {remedy}", key=key, url=url
        )
        failure.errno = error.errno
        raise failure from error


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_regular(path: str) -> int:
    """Open a file for reading. Whoever waits for a writer that there is not, or reads a device that
    never ends, does not end either.

    Raises:
        DamagedCheckpointError: a FIFO, a device or the like has its name.
        IsADirectoryError, OSError: of the system.
    """
    mode = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
    raise DamagedCheckpointError(
        f"{path} is no regular file (a FIFO, a device, a link to itself), and no save writes such: "
        "the checkpoint is damaged; load an earlier one",
        url=path,
    )


def fsync(path: str) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def given_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Storage options as callers give them, which may be none.

    Raises:
        ArgumentError: no mapping.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(
            # Not what it is: there may be a secret in it.
            f"storage_options must be a dict, such as {{'endpoint_url': 'http://host:9000'}}, "
            f"not of type {type(options).__name__}"
        )
    return dict(options or {})


class StoreUrl(str):
    """A URL that takes its storage options along wherever a plain string is passed on.

    Neither ``repr``, ``str`` nor a pickle has them: they may hold credentials.
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
        options: storage options of fsspec, not shown by ``repr``: they may hold credentials.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, place: str | os.PathLike[str] | Location, **options: Any) -> Location:
        """Return a location from a path, a URL (``file://``, ``memory://``, ``s3://`` ...) or a
        location; ``options`` are storage options of fsspec. A leading ``~`` is the home folder.

        Raises:
            ArgumentError: nothing of that kind.
        """
        if isinstance(place, Location):
            return cls(place.url, {**place.options, **options}) if options else place
        if isinstance(place, StoreUrl):
            options = {**place.options, **options}
        return cls(url_of(place), options)

    @classmethod
    def given(
        cls, place: str | os.PathLike[str] | Location, options: Mapping[str, Any] | None
    ) -> Location:
        """Return the same with the options as callers give them, which may be none.

        Raises:
            ArgumentError: the place is none, or ``options`` is no mapping.
        """
        return cls.of(place, **given_options(options))

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of the operating system."""
        return "://" not in self.url

    @property
    def is_s3(self) -> bool:
        """Whether it is a prefix of a bucket of S3."""
        return self.url.startswith(("s3://", "s3a://"))

    @property
    def place(self) -> str | Path:
        """What strategies are given: the local folder, or the URL with its options."""
        return Path(self.url) if self.is_local else StoreUrl(self.url, self.options)

    @property
    def remote(self) -> RemoteStore:
        """The control plane of a store that is no local folder.

        Raises:
            StorageError: fsspec does not know the store, or its package is missing.
        """
        # fsspec and what it brings are of no use to local checkpoints.
        from shardstore.storage.stores.remote import remote_store

        return remote_store(self.url, self.options)

    def require_local(self, what: str) -> None:
        """Raise :class:`StorageError` for an object store.

        Args:
            what: what needs a local folder, for the error text.
        """
        if not self.is_local:
            raise StorageError(
                f"{what} takes local folders only, not {self.url}: copy it to a disk first",
                url=self.url,
            )

    def require_no_file(self) -> None:
        """Raise :class:`StorageError` for a file where a folder of checkpoints is expected."""
        if self.is_local and os.path.isfile(self.url):
            raise StorageError(
                f"{self.url} is a file; give the folder below which checkpoints are saved",
                url=self.url,
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

    def read(self, name: str) -> bytes:
        """Read a small document whole.

        Raises:
            FileNotFoundError: there is none of that name.
            StorageError: the store failed.
        """
        counters.add(documents_read=1)
        if self.is_local:
            try:
                with open(open_regular(f"{self.url}/{name}"), "rb") as file:
                    return file.read()
            except (FileNotFoundError, NotADirectoryError):
                raise FileNotFoundError(f"{self.url}/{name}") from None
            except IsADirectoryError:
                raise FileNotFoundError(f"{self.url}/{name} is a folder") from None
            except DamagedCheckpointError:
                raise
            except OSError as error:
                with store_errors("reading", f"{self.url}/{name}"):
                    raise error
        return self.remote.read(name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small document whole, folders included, and never through a symbolic link.

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
            StorageError: the store refused; the old document is as it was.
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
            except OSError:
                with suppress(OSError):
                    os.unlink(fresh)
                raise

    def stamp(self, name: str) -> object | None:
        """Something that is another once a document was replaced; ``None``: there is none.

        Raises:
            StorageError: the store failed.
        """
        if not self.is_local:
            return self.remote.stamp(name)
        try:
            found = os.stat(f"{self.url}/{name}")
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size

    def exists(self, name: str = "") -> bool:
        """Return whether there is a document or folder of that name (default: this location
        itself)."""
        if self.is_local:
            return os.path.lexists(os.path.join(self.url, name) if name else self.url)
        return self.remote.exists(name)

    def is_dir(self, name: str = "") -> bool:
        """Return whether it is a folder (a prefix with something below it)."""
        if self.is_local:
            return os.path.isdir(os.path.join(self.url, name) if name else self.url)
        return self.remote.is_dir(name)

    def listing(self, name: str = "") -> list[str]:
        """Return the names directly below; empty where there is nothing."""
        if self.is_local:
            try:
                return sorted(os.listdir(os.path.join(self.url, name) if name else self.url))
            except (FileNotFoundError, NotADirectoryError):
                return []
        return self.remote.listing(name)

    def delete(self, name: str = "") -> None:
        """Remove a document or a folder with all below it; nothing there is no error. Of a symbolic
        link the link itself is removed.

        Raises:
            StorageError: the store refused, or a symbolic link leads to it.
        """
        if self.is_local:
            target = self._own_path(name)
            with store_errors("removing", target):
                if os.path.isdir(target) and not os.path.islink(target):
                    shutil.rmtree(target)
                elif os.path.lexists(target):
                    os.unlink(target)
            return
        self.remote.delete_tree(name)

    def is_link(self, name: str) -> bool:
        """Return whether a name is a symbolic link of the operating system."""
        return self.is_local and os.path.islink(f"{self.url}/{name}")

    def require_no_link_to(self, name: str) -> None:
        """Raise :class:`StorageError` if a folder between this location and a name below it is a
        symbolic link: nothing is written or removed behind one."""
        parts = name.split("/")
        for above in ("/".join(parts[:n]) for n in range(1, len(parts))):
            if self.is_link(above):
                raise StorageError(
                    f"{self.url}/{above} is a symbolic link, and nothing is written or removed "
                    f"behind one: put the folder that it leads to in its place, or remove {above}",
                    url=f"{self.url}/{name}",
                )

    def _own_path(self, name: str) -> str:
        """Local path of what is written or removed; errors as :meth:`require_no_link_to`."""
        self.require_no_link_to(name)
        return f"{self.url}/{name}" if name else self.url

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple[object, ...]:
        # A pickle has no storage options, as that of a StoreUrl: they may hold credentials.
        return Location, (self.url,)
