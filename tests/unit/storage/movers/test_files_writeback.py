"""A durable save has the disk work while it still writes; one that is not leaves the disk alone."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardstore.errors import StorageError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.files import WRITEBACK_FROM, start_writeback
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from tests.helpers.writeback import dirty_pages


def written(folder: Path, size: int, *, durable: bool) -> Path:
    """A chunk of ``size`` bytes, by the mover for files."""
    folder.mkdir()
    (folder / "w").mkdir()
    meta = ArrayMeta("w", "w", Grid((size,), (size,)), "uint8")
    data = np.arange(size, dtype=np.uint32).astype(np.uint8)
    Mover.of(Location.of(folder), SaveOptions(durable=durable)).write(
        [ChunkWrite(meta, (0,), data)], lambda _item, _record: None
    )
    return folder / meta.chunk_name((0,))


def test_the_disk_begins_at_once_where_a_sync_will_wait_for_it(tmp_path: Path) -> None:
    lazy = written(tmp_path / "lazy", 4 * WRITEBACK_FROM, durable=False)
    if dirty_pages(lazy) == 0:
        pytest.skip("this file system holds nothing back")
    assert dirty_pages(written(tmp_path / "small", WRITEBACK_FROM // 2, durable=True)) > 0
    assert dirty_pages(written(tmp_path / "durable", 4 * WRITEBACK_FROM, durable=True)) == 0


def test_a_file_that_fails_when_it_is_closed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def full(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if name.endswith("/w/c.0"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", full)
    with pytest.raises(StorageError, match=r"/w/c\.0.*'w'"):
        written(tmp_path / "full", 10, durable=True)


def test_writers_of_one_chunk_do_not_fail_on_each_other(tmp_path: Path) -> None:
    """Ranks whose shards overlap write the same file; only the commit finds out and says so."""
    (tmp_path / "w").mkdir()
    meta = ArrayMeta("w", "w", Grid((8,), (8,)), "uint8")
    write = ChunkWrite(meta, (0,), np.arange(8, dtype=np.uint8))

    def rewrite() -> None:
        for _ in range(500):
            Mover.of(Location.of(tmp_path), SaveOptions(threads=1)).write([write], lambda *_: None)

    with ThreadPoolExecutor(4) as writers:
        for writer in [writers.submit(rewrite) for _ in range(4)]:
            writer.result()


def test_what_cannot_be_sent_is_left_to_the_sync(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        start_writeback(writing)  # refused: it has no pages of its own
    finally:
        os.close(reading)
        os.close(writing)
