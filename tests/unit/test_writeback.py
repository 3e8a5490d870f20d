"""A durable save has the disk work while it still writes; one that is not leaves the disk alone."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from shardstore.errors import StorageError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.files import FileMover
from shardstore.storage.movers.writeback import WRITEBACK_FROM, Writeback, start_writeback
from shardstore.storage.stores.location import Location

CACHESTAT = 451
"""Its number on every architecture (Linux 6.5 and later)."""


def dirty_pages(path: Path) -> int:
    """Pages of a file that nobody has begun to send to the disk."""
    span = (ctypes.c_uint64 * 2)(0, 0)
    found = (ctypes.c_uint64 * 5)()
    fd = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(CACHESTAT, fd, ctypes.byref(span), ctypes.byref(found), 0) != 0:
            pytest.skip(f"no cachestat here: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    return int(found[1])


def written(folder: Path, size: int, *, durable: bool) -> Path:
    """A chunk of ``size`` bytes, by the mover for files."""
    folder.mkdir()
    (folder / "w").mkdir()
    meta = ArrayMeta("w", "w", Grid((size,), (size,)), "uint8")
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    FileMover(Location.of(folder), durable=durable).write(
        [ChunkWrite(meta, (0,), data)], lambda _item, _record: None
    )
    return folder / "w" / meta.chunk_key((0,))


def test_the_disk_begins_at_once_where_a_sync_will_wait_for_it(tmp_path: Path) -> None:
    lazy = written(tmp_path / "lazy", 4 * WRITEBACK_FROM, durable=False)
    if dirty_pages(lazy) == 0:
        pytest.skip("this file system holds nothing back")
    assert dirty_pages(written(tmp_path / "small", WRITEBACK_FROM // 2, durable=True)) > 0
    assert dirty_pages(written(tmp_path / "durable", 4 * WRITEBACK_FROM, durable=True)) == 0


def test_a_file_that_fails_when_it_is_closed_is_named_and_the_others_are_closed(
    tmp_path: Path,
) -> None:
    lost, good = (os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY) for name in ("lost", "good"))
    os.close(lost)  # closing it again is an error, as it is where a server has no room left
    writeback = Writeback()
    writeback.take(lost, WRITEBACK_FROM, "place/w/c.0", "w")
    writeback.take(good, WRITEBACK_FROM, "place/w/c.1", "w")
    with pytest.raises(StorageError, match=r"place/w/c\.0.*'w'"):
        writeback.finish()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(good)


def test_without_a_thread_to_be_had_everything_is_done_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    writeback = Writeback()
    files = [os.open(tmp_path / str(n), os.O_CREAT | os.O_WRONLY) for n in range(3)]
    for fd in files:
        writeback.take(fd, WRITEBACK_FROM, "place", "w")
    writeback.finish()
    for fd in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_what_cannot_be_sent_is_left_to_the_sync(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        start_writeback(writing, WRITEBACK_FROM)  # refused: it has no pages of its own
    finally:
        os.close(reading)
        os.close(writing)
