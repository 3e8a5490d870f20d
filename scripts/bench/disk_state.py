"""State of the disk around a sample: one sync, a cold cache, and no space left behind.

Knows files and the kernel's page cache; knows no client and no ranks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

ATTIC = ".retired"

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


def retire(path: Path, root: Path) -> None:
    """Give a sample's space back, but keep its empty files until the benchmark ends.

    An ext4 without a journal steps over each inode that was freed in the last minutes before it
    takes a new one: creating files soon after deleting many was seen to take ten to thirty times as
    long. Deleting one client's files would be paid for by the next client. The sync keeps the
    discards of the freed space out of the next sample.
    """
    if not os.path.lexists(path):
        return
    attic = root / ATTIC
    attic.mkdir(exist_ok=True)
    kept = attic / f"{path.name}-{len(os.listdir(attic))}"
    path.rename(kept)
    for file in files_under(kept):
        if file.stat().st_size:
            os.truncate(file, 0)
    sync_file_system(root)


def usage(path: Path) -> tuple[int, int]:
    """Number of files below `path`, and the sum of their sizes in bytes."""
    sizes = [file.stat().st_size for file in files_under(path)]
    return len(sizes), sum(sizes)
