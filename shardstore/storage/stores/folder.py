"""A folder of a local or shared file system as a store, and what opens files without surprises."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardstore.errors import CheckpointingException, StorageError, damaged
from shardstore.storage.runtime.parallel import default_threads
from shardstore.storage.stores.location import Location

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of reading a file or folder that does not exist, or is of the other kind."""
BYTES_A_THREAD = 32 * 1024 * 1024
"""Size of the buffers for files. Larger buffers are not faster, because new memory is slow."""
READ_BYTES = 64 * 1024 * 1024
"""Smallest work of a thread that reads files."""
SMALL_BYTES = 1024 * 1024
"""One thread reads many files below this size faster than several, which wait for the GIL."""

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or choose another place (if it has space, it has "
    "too many files, see df -i: with pack=True a save writes fewer)",
    errno.EDQUOT: "the disk quota is used up: free space or choose another place",
    errno.EFBIG: "the file system or a limit of the process (ulimit -f) allows no file that large: "
    "raise the limit or save smaller chunks",
    errno.EXDEV: "it cannot be renamed, as a mount point or in a lower layer of an image: "
    "save to a folder below it, or to another name",
    errno.EBUSY: "the folder is in use, as a mount point perhaps: save to a folder below it",
    errno.ENOTDIR: "a file is where a folder should be: choose another place",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "permission is denied: check the owner and mode of the folder",
    errno.EPERM: "the operation is not permitted: check the owner and mode of the folder",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n). A mounted bucket says so "
    "if it renames no folders: save to its URL (gs://, s3://)",
    errno.ELOOP: "a symbolic link leads to itself, or is where a file is to be written: remove it",
    errno.ENXIO: "a FIFO, a device or a socket is where a file is to be written: remove it",
    errno.ENAMETOOLONG: "the path is too long: shorten the key or the folder",
    **dict.fromkeys(
        (errno.ENOSYS, errno.EOPNOTSUPP),
        "the file system lacks an operation of saves, such as to rename a folder: save to another "
        "one, and to a mounted bucket by its URL (s3://, gs://)",
    ),
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


def open_no_link(path: str, flags: int) -> int:
    """Open a file to write, for the ``opener`` of :func:`open`; never through a symbolic link."""
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


def fsync(path: str) -> None:
    """Wait until a file, or the entries of a folder, are on the disk. Nothing is waited for if the
    file system has no sync of folders (Linux man-pages fsync(2), EINVAL), as some of networks."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


class LocalFolder(Location):
    """A folder of the operating system, on a local or shared file system."""

    copied = "linked"

    @property
    def driver(self) -> str:
        """See :attr:`Location.driver`."""
        return "file"

    @property
    def place(self) -> Path:
        """See :attr:`Location.place`."""
        return Path(self.url)

    def read_range(self, name: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """See :meth:`Location.read_range`."""
        path = f"{self.url}/{name}"
        with store_errors("reading", path), suppress(*_ABSENT):
            fd = open_regular(path)
            with open(fd, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(start, size))
                return file.read(max(0, (size if stop is None else min(stop, size)) - start))
        return None

    def read_many(
        self, names: Sequence[str], sizes: Sequence[int | None] = ()
    ) -> list[bytes | None]:
        """See :meth:`Location.read_many`."""
        return list(map(self.read_if_there, names, sizes or [None] * len(names)))

    def threads(self, size_bytes: int = 0, count: int = 1) -> int:
        """See :meth:`Location.threads`."""
        if size_bytes < max(READ_BYTES, SMALL_BYTES * count):
            return 1
        return min(default_threads(), 1 + size_bytes // READ_BYTES)

    def buffer_bytes(self, budget_bytes: int) -> int:
        """See :meth:`Location.buffer_bytes`."""
        return min(budget_bytes, BYTES_A_THREAD * default_threads())

    def exists(self, name: str = "") -> bool:
        """See :meth:`Location.exists`."""
        path = self._path(name)
        with store_errors("looking for", path), suppress(*_ABSENT):
            os.lstat(path)
            return True
        return False

    def is_dir(self) -> bool:
        """See :meth:`Location.is_dir`."""
        return os.path.isdir(self.url)

    def is_file(self) -> bool:
        """See :meth:`Location.is_file`."""
        return os.path.isfile(self.url)

    def is_missing(self) -> bool:
        """See :meth:`Location.is_missing`."""
        return not os.path.exists(self.url)

    def is_link(self, name: str = "") -> bool:
        """See :meth:`Location.is_link`."""
        return os.path.islink(self._path(name))

    def stamp(self, name: str) -> tuple[int, object] | None:
        """See :meth:`Location.stamp`."""
        path = f"{self.url}/{name}"
        with store_errors("looking for", path), suppress(*_ABSENT):
            found = os.stat(path)
            return found.st_size, (found.st_dev, found.st_ino, found.st_mtime_ns)
        return None

    def listing(self, name: str = "") -> list[str]:
        """See :meth:`Location.listing`."""
        path = self._path(name)
        with store_errors("listing", path), suppress(*_ABSENT):
            return sorted(os.listdir(path))
        return []

    def walk(self, name: str = "", *, strict: bool = True) -> list[str]:
        """See :meth:`Location.walk`."""
        top = os.path.join(self.url, "")

        def failed(error: OSError) -> None:
            with store_errors("listing", str(error.filename)), suppress(*_ABSENT):
                raise error

        found = os.walk(top + name, onerror=failed if strict else None)
        paths = (os.path.join(above, file) for above, _, files in found for file in files)
        return [path.removeprefix(top) for path in paths]

    def walk_all(self) -> list[str]:
        """See :meth:`Location.walk_all`."""
        return [
            name for entry in self.listing() for name in self.walk(entry, strict=False) or [entry]
        ]

    def is_within(self, other: Location) -> bool:
        """See :meth:`Location.is_within`."""
        path = self.path.resolve()
        with suppress(OSError):  # ``other`` does not exist, or is a URL
            # A mount gives a folder a second name.
            return any(p.samefile(other.url) for p in (path, *path.parents) if p.exists())
        return False

    def device(self) -> int | None:
        """See :meth:`Location.device`."""
        path = self.url
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return os.stat(path).st_dev

    def write(self, name: str, data: bytes) -> None:
        """See :meth:`Location.write`."""
        path = self._own_path(name)
        with store_errors("writing", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb", opener=open_no_link) as file:
                file.write(data)

    def replace(self, name: str, data: bytes) -> None:
        """See :meth:`Location.replace`."""
        path = self._own_path(name)
        fresh = f"{path}.new-{os.getpid()}"
        with store_errors("replacing", path):
            try:
                with open(fresh, "wb", opener=open_no_link) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, path)
                fsync(os.path.dirname(path))
            finally:
                with suppress(OSError):
                    os.unlink(fresh)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Location.create`."""
        path = self._own_path(name)
        with store_errors("creating", path), suppress(FileExistsError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
            return True
        return False

    def is_free(self, last: str) -> bool:
        """See :meth:`Location.is_free`."""
        return not self.exists() or (self.is_dir() and not self.listing())

    def staging(self, work: Location, last: str) -> Location:
        """See :meth:`Location.staging`."""
        return work

    def make_empty_folder(self) -> None:
        """See :meth:`Location.make_empty_folder`."""
        self.delete()
        with store_errors("creating", self.url):
            os.makedirs(self.url)

    def publish(self, made: Location) -> None:
        """See :meth:`Location.publish`."""
        os.rename(made.url, self.url)

    def delete(self, name: str = "") -> None:
        """See :meth:`Location.delete`."""
        target = self._own_path(name)
        with store_errors("removing", target):
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target, ignore_errors=True)  # all but what is in use or not permitted
                if os.path.lexists(target):
                    shutil.rmtree(target)
            elif os.path.lexists(target):
                os.unlink(target)

    def delete_all(self, names: Sequence[str], folders: Sequence[str] = ()) -> None:
        """See :meth:`Location.delete_all`."""
        for name in names:
            self.delete(name)
        for folder in folders:
            if self.is_link(folder) or not self.walk(folder):
                self.delete(folder)

    def copy_from(self, source: Location, name: str) -> bool:
        """Make a hard link. Symbolic links are not copied: they may lead out of the source. See
        :meth:`Location.copy_from`."""
        target = f"{self.url}/{name}"
        with suppress(FileExistsError):  # another thread or rank created it first
            os.mkdir(os.path.dirname(target))
        try:
            os.link(f"{source.url}/{name}", target, follow_symlinks=False)
        except FileExistsError:
            return False
        if stat.S_ISREG(os.lstat(target).st_mode):
            return True
        self.delete(name)
        return False

    def kvstore(self, document: str | None = None) -> dict[str, Any]:
        """See :meth:`Location.kvstore`."""
        return {"driver": self.driver, "path": f"{self.url}/"}

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _own_path(self, name: str) -> str:
        """Return the path of a name to write or remove, after :meth:`require_no_link_to`."""
        self.require_no_link_to(name)
        return self._path(name)
