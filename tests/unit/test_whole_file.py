"""Chunk files read at once by the compiled part: the right bytes, the right checksum, or no."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardstore import ShardedTensor, load, save
from shardstore.errors import ChunkCorruptError
from shardstore.storage.movers import files
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.counters import counters

compiled = pytest.mark.skipif(
    not files.COMPILED, reason="no compiler at the installation, or not Linux on x86-64"
)


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(files, "COMPILED", False)
    elif not files.COMPILED:
        pytest.skip("no compiler at the installation, or not Linux on x86-64")
    return str(request.param)


def aligned(shape: tuple[int, ...], dtype: str, at: int = 0) -> NDArray[Any]:
    """Zeros that begin ``at`` bytes behind a whole line of the cache."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + at
    return memory[start : start + size].view(dtype).reshape(shape)


def read_whole_files(
    paths: list[str], outs: list[NDArray[Any]], crcs: list[int | None]
) -> list[int]:
    from shardstore.storage.movers import _copy_crc

    views = [o.reshape(-1) if o.flags.c_contiguous else o for o in outs]
    return _copy_crc.read_chunks(paths, [view.view(np.uint8) for view in views], crcs)


def write_chunk(path: Path, values: NDArray[Any]) -> int:
    """A chunk file: its bytes and their checksum, which is returned."""
    data = values.tobytes()
    crc = crc32c(data, 0)
    path.write_bytes(data + crc.to_bytes(4, "little"))
    return crc


@compiled
@given(
    st.integers(0, 3000),
    st.integers(0, 70),
    st.integers(0, 70),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_kernels_copy_and_carry_the_checksum(
    size: int, source_at: int, target_at: int, crc: int, data: st.DataObject
) -> None:
    from shardstore.storage.movers import _copy_crc

    kernel = data.draw(st.sampled_from(_copy_crc.KERNELS))
    memory = np.random.default_rng(size).integers(0, 256, source_at + size, np.uint8)
    target = np.zeros(target_at + size + 64, np.uint8)
    found = _copy_crc.copy_crc32c(
        memory[source_at:], target[target_at : target_at + size], crc, kernel
    )
    assert found == crc32c(memory[source_at:].tobytes(), crc)
    assert (target[target_at : target_at + size] == memory[source_at:]).all()
    assert not target[:target_at].any()
    assert not target[target_at + size :].any()


@compiled
@given(
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from([1, 16, 63, 64, 128, 320]),
    st.sampled_from([0, 16, 64, 192]),
    st.sampled_from([0, 16]),
    st.data(),
)
def test_kernels_spread_over_rows(
    planes: int, rows: int, run: int, gap: int, at: int, data: st.DataObject
) -> None:
    from shardstore.storage.movers import _copy_crc

    kernel = data.draw(st.sampled_from(_copy_crc.KERNELS))
    values = np.random.default_rng(run).integers(1, 256, (planes, rows, run), np.uint8)
    memory = aligned((planes, 2 * rows, run + gap), "u1", at)
    target = memory[:, :rows, :run]
    assert _copy_crc.copy_crc32c(values.tobytes(), target, 7, kernel) == crc32c(values.tobytes(), 7)
    assert (target == values).all()
    target[...] = 0
    assert not memory.any()  # nothing was written beside it


@compiled
def test_kernels_refuse_what_does_not_fit() -> None:
    from shardstore.storage.movers import _copy_crc

    with pytest.raises(ValueError, match="3 bytes do not go into 2"):
        _copy_crc.copy_crc32c(b"abc", bytearray(2))
    with pytest.raises(ValueError, match="no kernel sse17"):
        _copy_crc.copy_crc32c(b"abc", bytearray(3), 0, "sse17")
    with pytest.raises(ValueError, match="last axis"):
        _copy_crc.read_chunks(["/"], [np.zeros((4, 4), np.uint8)[:, ::2]], [None])
    with pytest.raises(ValueError, match="2 paths, 1 targets, 0 checksums"):
        _copy_crc.read_chunks(["/", "/"], [np.zeros(4, np.uint8)], [])


@compiled
@pytest.mark.parametrize("dtype", ["<f4", "<i8", "u1"])
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((40, 50), np.s_[:, 3:29]),
        ((7, 300, 64), np.s_[1:6, ::2, 8:40]),
        ((3, 5, 8, 64), np.s_[:, 1:4]),
        ((900, 700), np.s_[:, :640]),
        ((900, 704), np.s_[:, :640]),
        ((500, 3, 1024), np.s_[:, :2, 64:960]),
        ((70_000,), np.s_[:]),
        ((), np.s_[...]),
        ((0, 4), np.s_[:]),
    ],
)
def test_any_destination_gets_its_rows(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], wanted: tuple[slice, ...]
) -> None:
    memory = aligned(shape, dtype)
    out = memory[wanted]
    values = np.random.default_rng(1).integers(1, 100, out.shape).astype(dtype)
    path = tmp_path / "chunk"
    crc = write_chunk(path, values)
    other, second = tmp_path / "other", np.zeros(9, np.uint8)
    write_chunk(other, np.arange(9, dtype=np.uint8))
    left = read_whole_files([str(path), str(other)], [out, second], [crc, None])
    assert (second == np.arange(9)).all()
    assert left == []
    assert (out == values).all()
    out[...] = 0
    assert not memory.any()  # nothing was written beside it


@compiled
@given(st.integers(0, 5000), st.integers(0, 9))
def test_a_file_is_checksummed_up_to_its_tail(
    tmp_path_factory: pytest.TempPathFactory, size: int, rest: int
) -> None:
    size = size * 100 + rest  # on both sides of where files are mapped
    path = tmp_path_factory.getbasetemp() / "checksummed"
    data = np.random.default_rng(size).integers(0, 256, size + rest, np.uint8).tobytes()
    path.write_bytes(data)
    tail = bytearray(rest)
    from shardstore.storage.movers._copy_crc import checksum_file

    assert checksum_file(str(path), size, tail) == crc32c(data[:size], 0)
    assert tail == data[size:]
    assert checksum_file(str(path), size + 1, tail) is None
    assert checksum_file(f"{path}.not", size, tail) is None


@compiled
def test_another_size_content_or_no_file_is_left_to_others(tmp_path: Path) -> None:
    out, paths = np.zeros(100, np.uint8), [str(tmp_path / "none"), str(tmp_path)]
    for size in (0, 99, 101, 5000):
        path = tmp_path / str(size)
        write_chunk(path, np.ones(size, np.uint8))
        paths.append(str(path))
    flipped = tmp_path / "flipped"
    crc = write_chunk(flipped, np.ones(100, np.uint8))
    data = bytearray(flipped.read_bytes())
    data[50] ^= 1
    flipped.write_bytes(data)
    whole = tmp_path / "whole"
    assert write_chunk(whole, np.ones(100, np.uint8)) == crc
    # Of the last three one is sound, one another than was committed, one the one that was.
    paths += [str(flipped), str(whole), str(whole), str(whole)]
    expected = [None] * (len(paths) - 2) + [crc ^ 1, crc]
    left = read_whole_files(paths, [out] * len(paths), expected)
    assert left == [*range(len(paths) - 3), len(paths) - 2]
    assert read_whole_files([], [], []) == []


@compiled
def test_a_large_file_that_is_not_in_memory_is_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    size = 1 << 20
    write_chunk(path, np.frombuffer(os.urandom(size), np.uint8))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    out = np.zeros(size, np.uint8)
    left = read_whole_files([str(path)], [out], [None])
    # A file system in memory keeps it there.
    assert left == [0] or (out == np.fromfile(path, np.uint8)[:size]).all()


@compiled
@pytest.mark.parametrize("missing", [None, 0, 17, 255])
@pytest.mark.parametrize("size", [1 << 20, (5 << 20) + 12])
def test_a_large_file_of_which_few_pages_or_none_are_not_in_memory(
    tmp_path: Path, missing: int | None, size: int
) -> None:
    path = tmp_path / "chunk"
    data = np.frombuffer(os.urandom(size), np.uint8)
    crc = write_chunk(path, data)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if missing is not None:
            os.posix_fadvise(file.fileno(), missing * 4096, 4096, os.POSIX_FADV_DONTNEED)
    out = np.zeros(size, np.uint8)
    assert read_whole_files([str(path)], [out], [crc]) == []
    assert (out == data).all()


def _state(values: torch.Tensor) -> dict[str, ShardedTensor]:
    """A tensor in the columns of a wider one, cut along them."""
    return {"w": ShardedTensor.from_rank_offsets("w", values, (1, 0, 1))}


@pytest.mark.parametrize("columns", [64, 60, 1])
def test_loads_into_columns_of_a_wider_tensor(tmp_path: Path, way: str, columns: int) -> None:
    values = torch.randn(3000, columns)
    save(_state(values), str(tmp_path / "c"), durable=False)
    wide = torch.zeros(3000, columns + 16)
    before = counters.snapshot()["bytes_read"]
    load(_state(wide[:, 8 : 8 + columns]), str(tmp_path / "c"))
    assert torch.equal(wide[:, 8 : 8 + columns], values)
    assert not wide[:, :8].any()
    assert not wide[:, 8 + columns :].any()
    assert counters.snapshot()["bytes_read"] - before == values.nbytes + 4


@pytest.mark.parametrize("at", [0, 100_001, -5, -1])
def test_a_flipped_byte_is_found(tmp_path: Path, way: str, at: int) -> None:
    values = torch.randn(500, 512)
    save(_state(values), str(tmp_path / "c"), durable=False)
    (chunk,) = (tmp_path / "c" / "w").glob("c.*")
    data = bytearray(chunk.read_bytes())
    data[at] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ChunkCorruptError, match="checksum"):
        load(_state(torch.zeros(500, 512)), str(tmp_path / "c"))
