"""When what was written goes to the disk: soon, where somebody is going to wait for it.

Answers for the calls of the operating system that Python has no name for. Knows files and folders,
nothing of what is in them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import partial

from shardstore.errors import StorageError
from shardstore.storage.movers.parallel import Jobs
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["WRITEBACK_FROM", "Writeback", "start_writeback", "sync_file_system"]

WRITEBACK_FROM = 1024 * 1024
"""Smaller files are left to the one sync at the end, which writes neighbours together."""
MOST_WAITING = 64
"""Files that are open and wait for a disk that can not keep up."""
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def start_writeback(fd: int, size: int) -> None:
    """Have a file's pages sent to the disk from now on, without waiting for them (man-pages
    sync_file_range(2), Linux; elsewhere nothing happens).

    The disk then works while other files are still being written, and the sync at the end finds
    little left to do. That sync is what makes them durable, and what reports errors of the disk.

    Args:
        fd: an open file.
        size: its bytes.
    """
    if size >= WRITEBACK_FROM and _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


class Writeback:
    """Files on their way to the disk. The call that sends one waits where the disk's queue is full,
    so it is made by a thread of its own, and who writes goes on. Some file systems tell only when a
    file is closed that they could not take it (man-pages close(2)).
    """

    def __init__(self) -> None:
        self._jobs = Jobs(1, "shardstore-writeback")
        self._room = threading.Semaphore(MOST_WAITING)
        self._error: StorageError | None = None

    def take(self, fd: int, size: int, path: str, key: str) -> None:
        """Send a file and close it, now or soon.

        Args:
            fd: an open file, which is the caller's no more.
            size: its bytes.
            path: of the file, for an error.
            key: of the tensor that it belongs to.

        Raises:
            OSError: it was closed at once, and could not be written.
        """
        if size < WRITEBACK_FROM:
            os.close(fd)
        elif self._room.acquire(blocking=False):
            self._jobs.add(partial(self._send, fd, size, path, key))
        else:
            start_writeback(fd, size)
            os.close(fd)

    def finish(self) -> None:
        """Wait until all files are on their way. Called once.

        Raises:
            StorageError: one of them could not be written.
        """
        self._jobs.finish()
        if self._error is not None:
            raise self._error

    def _send(self, fd: int, size: int, path: str, key: str) -> None:
        # Raises nothing: the other files have to be closed too.
        start_writeback(fd, size)
        try:
            with store_errors("writing", path, key=key):
                os.close(fd)
        except StorageError as error:
            self._error = self._error or error
        finally:
            self._room.release()


def sync_file_system(location: Location) -> None:
    """Wait until all that was written to a folder's file system is on the disk: one ``syncfs``
    (man-pages sync(2)).

    One call, not an fsync a file: the journal is committed once. Errors of the disk are reported
    (Linux 5.8 and later).
    """
    with store_errors("syncing", location.url):
        fd = os.open(location.url, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if hasattr(_libc, "syncfs"):
                if _libc.syncfs(fd) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number), location.url)
            else:
                os.sync()
        finally:
            os.close(fd)
