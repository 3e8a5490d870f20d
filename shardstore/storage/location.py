"""Where a checkpoint is: one URL for both planes, and the small-document verbs of the control
plane.

Local paths go straight to the operating system; anything else goes over fsspec. It knows bytes and
names, not what the documents mean.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.counters import counters

__all__ = ["Location", "store_errors"]

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
    errno.ENAMETOOLONG: "the path is too long: shorten the key or the folder",
    errno.ENOENT: "the folder is gone: something removed it while it was in use",
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
        remedy = _REMEDIES.get(error.errno, "see the cause")
        about = f" for key {key!r}" if key is not None else ""
        failure = StorageError(
            f"{doing} {url}{about} failed: {os.strerror(error.errno)}; {remedy}", key=key, url=url
        )
        failure.errno = error.errno
        raise failure from error


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
        """A location from a path, a URL (``file://``, ``memory://``, ``s3://`` ...) or a
        location."""
        if isinstance(place, Location):
            return place
        url = os.fspath(place)
        if url.startswith("file://"):
            url = url[len("file://") :]
        if "://" not in url:
            url = os.path.abspath(url)
        return cls(url.rstrip("/") or "/", options)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of the operating system."""
        return "://" not in self.url

    def require_local(self) -> None:
        """Raise :class:`StorageError` for a store that checkpoints can not be kept in yet."""
        if not self.is_local:
            raise StorageError(
                f"{self.url}: only local folders can be saved to and loaded from so far; give a "
                "local path",
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
        """The location below this one."""
        return Location("/".join([self.url, *names]), self.options)

    def _fs(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.url, **self.options)
        return fs, path

    def read(self, name: str) -> bytes:
        """Read a small document whole.

        Raises:
            FileNotFoundError: there is none of that name.
            StorageError: the store refused.
        """
        counters.add(documents_read=1)
        if self.is_local:
            try:
                return (self.path / name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                raise FileNotFoundError(f"{self.url}/{name}") from None
            except IsADirectoryError:
                raise FileNotFoundError(f"{self.url}/{name} is a folder") from None
            except OSError as error:
                with store_errors("reading", f"{self.url}/{name}"):
                    raise error
        fs, path = self._fs()
        data: bytes = fs.cat_file(f"{path}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small document whole, folders included.

        Raises:
            StorageError: the store refused.
        """
        if self.is_local:
            file = self.path / name
            with store_errors("writing", str(file)):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            return
        fs, path = self._fs()
        fs.pipe_file(f"{path}/{name}", data)

    def replace(self, name: str, data: bytes) -> None:
        """Replace a small document in one atomic step.

        Raises:
            StorageError: the store refused; the old document is as it was.
        """
        if not self.is_local:
            self.write(name, data)
            return
        path = f"{self.url}/{name}"
        fresh = f"{path}.new-{os.getpid()}"
        with store_errors("replacing", path):
            try:
                with open(fresh, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, path)
            except OSError:
                with suppress(OSError):
                    os.unlink(fresh)
                raise

    def exists(self, name: str = "") -> bool:
        """Whether there is a document or folder of that name (default: this location itself)."""
        if self.is_local:
            return os.path.lexists(os.path.join(self.url, name) if name else self.url)
        fs, path = self._fs()
        return bool(fs.exists(f"{path}/{name}" if name else path))

    def is_dir(self, name: str = "") -> bool:
        """Whether it is a folder (a prefix with something below it)."""
        if self.is_local:
            return os.path.isdir(os.path.join(self.url, name) if name else self.url)
        fs, path = self._fs()
        return bool(fs.isdir(f"{path}/{name}" if name else path))

    def listing(self, name: str = "") -> list[str]:
        """Names directly below; empty where there is nothing."""
        if self.is_local:
            try:
                return sorted(os.listdir(os.path.join(self.url, name) if name else self.url))
            except (FileNotFoundError, NotADirectoryError):
                return []
        fs, path = self._fs()
        try:
            found = fs.ls(f"{path}/{name}" if name else path, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted({entry.rstrip("/").rsplit("/", 1)[-1] for entry in found})

    def delete(self, name: str = "") -> None:
        """Remove a document or a folder with all below it; nothing there is no error."""
        target = f"{self.url}/{name}" if name else self.url
        if self.is_local:
            with store_errors("removing", target):
                if os.path.isdir(target) and not os.path.islink(target):
                    shutil.rmtree(target)
                elif os.path.lexists(target):
                    os.unlink(target)
            return
        fs, path = self._fs()
        target = f"{path}/{name}" if name else path
        if fs.exists(target):
            fs.rm(target, recursive=True)

    def kvstore(self, *names: str) -> dict[str, Any]:
        """TensorStore key-value store spec of a node below (TensorStore documentation, "Key-value
        store")."""
        path = "/".join([self.url, *names]) + "/"
        if self.is_local:
            return {"driver": "file", "path": path}
        scheme, _, rest = path.partition("://")
        if scheme == "memory":
            return {"driver": "memory", "path": rest}
        raise StorageError(f"no data plane for {scheme}:// yet: {self.url}", url=self.url)

    def __str__(self) -> str:
        return self.url
