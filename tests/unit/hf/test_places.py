"""The files of an export in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardstore.hf.files import FileLayout
from shardstore.hf.places import FolderFiles
from shardstore.storage.format.documents import array_of_one_chunk
from shardstore.storage.movers.files import WRITEBACK_FROM
from tests.helpers.writeback import dirty_pages

SIZE = 4 * WRITEBACK_FROM


def created(folder: Path, *, durable: bool = False) -> tuple[FolderFiles, Path]:
    folder.mkdir()
    array = array_of_one_chunk("w", (SIZE,), "uint8")
    layout = FileLayout.of([array], SIZE, {}, "model.safetensors")
    files = FolderFiles(str(folder), durable=durable)
    files.create(layout)
    path = folder / "model.safetensors"
    assert path.stat().st_size == layout.sizes[path.name]
    return files, path


def test_the_space_of_a_file_is_taken_before_its_content(tmp_path: Path) -> None:
    _, path = created(tmp_path / "files")
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(SIZE))
    if plain.stat().st_blocks == 0:
        pytest.skip("this file system gives out space later")
    assert path.stat().st_blocks * 512 >= SIZE


def test_the_disk_begins_at_once_if_a_sync_follows(tmp_path: Path) -> None:
    data = memoryview(b"x" * (SIZE // 2))
    lazy, path = created(tmp_path / "lazy")
    lazy.write(path.name, SIZE // 4, data)
    if dirty_pages(path) == 0:
        pytest.skip("this file system holds nothing back")
    eager, path = created(tmp_path / "eager", durable=True)
    before = dirty_pages(path)
    eager.write(path.name, SIZE // 4, data)
    assert dirty_pages(path) <= before
