"""Chunk files read by the compiled part: the right bytes and the right checksum, or no answer.

A durable save has the disk work while it still writes; one that is not leaves the disk alone.
"""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import math
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardstore.errors import StorageError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.storage.movers import files
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.files import WRITEBACK_FROM, start_writeback
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.stores.location import Location
from tests.helpers.writeback import dirty_pages

NO_COMPILER = "no compiler at the installation"


@pytest.fixture(scope="session", params=["installed", "portable"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled reader, and as other processors than x86-64 have it."""
    if request.param == "installed":
        if not files.COMPILED:
            pytest.skip(NO_COMPILER)
        return importlib.import_module("shardstore.storage.movers._copy_crc")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip(NO_COMPILER)
    made = tmp_path_factory.mktemp("portable") / "_copy_crc.abi3.so"
    source = Path(files.__file__).with_name("_copy_crc.c")
    options = ["-O2", "-shared", "-fPIC", "-DSHARDSTORE_PORTABLE", "-DPy_LIMITED_API=0x030B0000"]
    options.append(f"-I{sysconfig.get_paths()['include']}")
    subprocess.run([compiler, *options, str(source), "-o", str(made)], check=True)
    loader = importlib.machinery.ExtensionFileLoader("_copy_crc", str(made))
    spec = importlib.util.spec_from_loader("_copy_crc", loader)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def aligned(shape: tuple[int, ...], dtype: str, at: int = 0) -> NDArray[Any]:
    """Zeros that begin ``at`` bytes behind a whole line of the cache."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + at
    return memory[start : start + size].view(dtype).reshape(shape)


def read_chunk(reader: Any, path: str, size: int, target: Any = None) -> tuple[int, int] | None:
    found: tuple[int, int] | None
    (found,) = reader.read_chunk_files([(path, size, target)])
    return found


def write_chunk(path: Path, values: NDArray[Any]) -> int:
    """A chunk file: its bytes and their checksum, which is returned."""
    data = values.tobytes()
    crc = crc32c(data, 0)
    path.write_bytes(data + crc.to_bytes(4, "little"))
    return crc


def read_into(
    reader: Any, path: Path, values: NDArray[Any], memory: NDArray[Any], target: NDArray[Any]
) -> object:
    """Read a file of these values into a part of a memory of zeros, and nowhere beside it."""
    crc = write_chunk(path, values)
    expected = (crc, crc) if values.nbytes <= reader.MOST_BYTES else None
    assert read_chunk(reader, str(path), values.nbytes, target) == expected
    assert (target == (values if expected else 0)).all()
    target[...] = 0
    assert not memory.any()
    return expected


@given(
    st.one_of(st.integers(0, 3000), st.integers(0, 600_000)),  # less and more than one read
    st.integers(0, 70),
)
def test_bytes_are_copied_and_checksummed(
    reader: Any, tmp_path_factory: pytest.TempPathFactory, size: int, target_at: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "chunk"
    values = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory = np.zeros(target_at + size + 64, np.uint8)
    expected = read_into(reader, path, values, memory, memory[target_at : target_at + size])
    assert read_chunk(reader, str(path), size) == expected


@given(
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from([1, 16, 63, 64, 128, 320, 20_000]),
    st.sampled_from([0, 16, 64, 192]),
    st.sampled_from([0, 16]),
)
def test_bytes_are_spread_over_rows(
    reader: Any,
    tmp_path_factory: pytest.TempPathFactory,
    planes: int,
    rows: int,
    run: int,
    gap: int,
    at: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "chunk"
    values = np.random.default_rng(run).integers(1, 256, (planes, rows, run), np.uint8)
    memory = aligned((planes, rows, run + gap), "u1", at)
    read_into(reader, path, values, memory, memory[:, :, :run])


def test_what_does_not_fit_is_refused(reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "chunk"
    write_chunk(path, np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="3 bytes do not go into 2"):
        read_chunk(reader, str(path), 3, bytearray(2))
    with pytest.raises(BufferError):
        read_chunk(reader, str(path), 3, b"abc")
    with pytest.raises(ValueError, match="null"):
        read_chunk(reader, "a\0b", 3)


@pytest.mark.parametrize(
    ("dtype", "shape", "wanted", "is_read"),
    [
        ("u1", (40, 50), np.s_[:, 3:29], True),
        ("<f4", (40, 50), np.s_[::-1, 3:29], True),
        ("<i8", (7, 300, 64), np.s_[:, ::2, 8:40], True),
        ("<i8", (7, 300, 64), np.s_[2:3, 1:2, 8:40], True),
        ("u1", (3, 5, 8, 64), np.s_[:, :, :, 1:4], True),
        ("<f4", (3, 5, 8, 64), np.s_[:, 1:4], True),
        ("<f4", (900, 704), np.s_[:, :640], True),
        ("<i8", (900, 704), np.s_[:, :640], True),
        ("<f4", (500, 3, 1024), np.s_[:, :2, 64:960], False),  # gaps of two sizes
        ("u1", (7, 300, 64), np.s_[1:6, ::2, 8:40], True),
        ("<f4", (70_000,), np.s_[:], True),
        ("<f4", (), np.s_[...], True),
        ("<f4", (0, 4), np.s_[:], True),
    ],
)
def test_destinations_in_evenly_spaced_rows(
    reader: Any,
    tmp_path: Path,
    dtype: str,
    shape: tuple[int, ...],
    wanted: tuple[slice, ...],
    is_read: bool,
) -> None:
    memory = aligned(shape, dtype)
    out = memory[wanted]
    values = np.random.default_rng(1).integers(1, 100, out.shape).astype(dtype)
    path = tmp_path / "chunk"
    crc = write_chunk(path, values)
    target = out.reshape(-1) if out.flags.c_contiguous else out
    is_read = is_read and out.nbytes <= reader.MOST_BYTES
    found = read_chunk(reader, str(path), out.nbytes, target.view(np.uint8))
    assert found == ((crc, crc) if is_read else None)
    assert (out == (values if is_read else 0)).all()
    out[...] = 0
    assert not memory.any()  # nothing was written beside it


def test_a_file_of_another_size_or_content_is_not_read(reader: Any, tmp_path: Path) -> None:
    out = np.zeros(100, np.uint8)
    for size in (0, 95, 99, 101, 5000):
        path = tmp_path / str(size)
        write_chunk(path, np.ones(size, np.uint8))
        assert read_chunk(reader, str(path), 100, out) is None
    assert read_chunk(reader, str(tmp_path / "none"), 100, out) is None
    assert read_chunk(reader, str(tmp_path), 4092, None) is None  # a folder
    assert read_chunk(reader, str(tmp_path), -1, None) is None
    flipped = tmp_path / "flipped"
    crc = write_chunk(flipped, np.ones(100, np.uint8))
    data = bytearray(flipped.read_bytes())
    data[50] ^= 1
    flipped.write_bytes(data)
    assert read_chunk(reader, str(flipped), 100, out) == (crc32c(data[:100], 0), crc)


@given(st.lists(st.sampled_from(["read", "no target", "rows", "other size", "missing", "-1"])))
def test_each_file_of_a_batch_has_its_own_answer(
    reader: Any, tmp_path_factory: pytest.TempPathFactory, kinds: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    memory = np.zeros((len(kinds), 2, 12), np.uint8)
    requests, expected = list[tuple[str, int, Any]](), []
    for i, kind in enumerate(kinds):
        values = np.full(20, i + 1, np.uint8)
        crc = write_chunk(folder / str(i), values)
        target = memory[i, :, :10] if kind == "rows" else memory.reshape(len(kinds), 24)[i, :20]
        path, size = str(folder / str(i)), {"-1": -1, "other size": 19}.get(kind, 20)
        if kind in ("no target", "-1"):
            target = None
        elif kind == "other size":
            target = target[:19]
        requests.append((path + ("x" if kind == "missing" else ""), size, target))
        expected.append((crc, crc) if kind in ("read", "no target", "rows") else None)
    assert reader.read_chunk_files(requests) == expected
    for i, kind in enumerate(kinds):
        wanted = np.zeros((2, 12), np.uint8)
        if kind == "rows":
            wanted[:, :10] = i + 1
        elif kind == "read":
            wanted.reshape(24)[:20] = i + 1
        assert (memory[i] == wanted).all()


def test_a_request_that_does_not_fit_stops_the_batch_before_it_reads(
    reader: Any, tmp_path: Path
) -> None:
    write_chunk(tmp_path / "one", np.ones(3, np.uint8))
    first = bytearray(3)
    for wrong in [(str(tmp_path / "one"), 3, bytearray(2)), ("a", 3), ("a\0b", 3, None)]:
        with pytest.raises((ValueError, TypeError)):
            reader.read_chunk_files([(str(tmp_path / "one"), 3, first), wrong])
        assert first == bytearray(3)
        first.append(0)  # nothing holds its memory any more
        first.pop()


def test_a_batch_that_changes_while_it_is_read_does_not_crash(reader: Any, tmp_path: Path) -> None:
    crc = write_chunk(tmp_path / "one", np.ones(3, np.uint8))
    requests: list[Any] = []

    class Emptying:
        def __fspath__(self) -> str:
            requests.clear()
            return str(tmp_path / "one")

    requests += [(Emptying(), 3, np.zeros(3, np.uint8)), (str(tmp_path / "one"), 3, None)]
    assert reader.read_chunk_files(requests) == [(crc, crc)] * 2


@pytest.mark.parametrize(
    ("size", "missing", "gap"),
    [
        (1 << 20, None, 0),
        (1 << 20, 0, 64),
        (1 << 20, 17, 0),
        (1 << 20, 17, 64),
        (1 << 20, "all", 0),
        ((5 << 20) + 12, None, 0),
        ((5 << 20) + 12, "all", 64),
    ],
)
def test_large_files_in_memory_or_not(
    reader: Any, tmp_path: Path, size: int, missing: int | str | None, gap: int
) -> None:
    """Mapped, read in pieces, or left to plain reads."""
    path = tmp_path / "chunk"
    values = np.frombuffer(os.urandom(size), np.uint8).reshape(4, -1)
    crc = write_chunk(path, values)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if missing == "all":
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        elif missing is not None:
            os.posix_fadvise(file.fileno(), int(missing) * 4096, 4096, os.POSIX_FADV_DONTNEED)
    memory = np.zeros((4, size // 4 + gap), np.uint8)
    out = memory[:, : size // 4]
    found = read_chunk(reader, str(path), size, out)
    if size > reader.MOST_BYTES:
        assert found is None
    else:
        assert found in ((crc, crc), None if missing in (0, "all") else (crc, crc))
    assert found is None or (out == values).all()
    out[...] = 0
    assert not memory.any()


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
