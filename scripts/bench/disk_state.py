"""State of the disk around a sample: one sync, a cold cache, and nothing left behind.

Knows files and the kernel's page cache; knows no client and no ranks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)


def sync_file_system(path: Path) -> None:
    """Write every dirty page of the file system that holds `path` (Linux `syncfs`)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.syncfs(handle) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(handle)


def files_under(path: Path) -> Iterator[Path]:
    """Every plain file at or below `path`."""
    if path.is_file():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)


def drop_from_cache(path: Path) -> None:
    """Take all files below `path` out of the page cache, after a sync made their pages clean."""
    sync_file_system(path)
    for file in files_under(path):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def remove(path: Path, root: Path) -> None:
    """Delete a sample's files and wait until the file system has forgotten them.

    The sync keeps the journal and the discards of one client's deletion out of the next client's
    sample.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    sync_file_system(root)


def usage(path: Path) -> tuple[int, int]:
    """Number of files below `path`, and the sum of their sizes in bytes."""
    sizes = [file.stat().st_size for file in files_under(path)]
    return len(sizes), sum(sizes)
