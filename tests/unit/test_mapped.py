"""Whole chunks read through a mapping, and when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import ChunkCorruptError
from shardstore.storage import mapped
from shardstore.storage.checksums import crc32c

SIZE = mapped.MIN_MAPPED_BYTES + 12_345


def odd_place(size: int, by: int) -> np.ndarray:
    """Bytes that begin ``by`` after a multiple of 64."""
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + by
    return memory[start : start + size]


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    data = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8).tobytes()
    path = tmp_path / "chunk"
    path.write_bytes(data + b"tail")
    return path, data


@pytest.mark.parametrize("by", [1, 4, 8, 16, 33])
def test_what_is_copied_and_its_checksum(content: tuple[Path, bytes], by: int) -> None:
    path, data = content
    out, tail = odd_place(SIZE, by), bytearray(4)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert mapped.read_mapped(fd, out, tail) == crc32c(data, 0)
    finally:
        os.close(fd)
    assert out.tobytes() == data
    assert bytes(tail) == b"tail"


def test_left_to_ordinary_reads(content: tuple[Path, bytes]) -> None:
    """At good addresses, for small chunks, and where the file is not in memory."""
    path, _ = content
    fd = os.open(path, os.O_RDONLY)
    try:
        assert mapped.read_mapped(fd, odd_place(SIZE, 32), bytearray(4)) is None
        assert mapped.read_mapped(fd, odd_place(1000, 1), bytearray(4)) is None
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        out = odd_place(SIZE, 1)
        assert mapped.read_mapped(fd, out, bytearray(4)) is None
        assert not out.any()
    finally:
        os.close(fd)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_view_into_a_flat_buffer_is_loaded_and_checked(tmp_path: Path, offset: int) -> None:
    """Elements of four bytes at every address that occurs, whichever way they are read."""
    rows, columns = 512, 700
    weight = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    place = tmp_path / "c"
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", weight)}, place)
    buffer = torch.zeros(rows * columns + 8, dtype=torch.int32)
    view = buffer[offset : offset + rows * columns].view(rows, columns)
    shardstore.load({"w": ShardedTensor.from_rank_offsets("w", view)}, place)
    assert torch.equal(view, weight)
    assert not buffer[:offset].any()
    assert not buffer[offset + rows * columns :].any()

    with open(place / "w" / "c.0.0", "r+b") as chunk:
        chunk.seek(rows * columns * 2)
        byte = chunk.read(1)
        chunk.seek(-1, os.SEEK_CUR)
        chunk.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ChunkCorruptError, match="checksum"):
        shardstore.load({"w": ShardedTensor.from_rank_offsets("w", view)}, place)
