"""Chunks in files against NumPy, plain zarr and TensorStore: any array, chunk grid and strides."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zarr
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardstore import zarr_dtypes
from shardstore.errors import ChunkCorruptError, ChunkMissingError, StorageError
from shardstore.storage.format import documents, dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid, block_bytes
from shardstore.storage.format.manifest import ChunkRecord, Manifest, RankManifest
from shardstore.storage.format.merge import merge
from shardstore.storage.format.names import node_name
from shardstore.storage.movers import chunk_bytes, files
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead, decompress
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.tensorstore_reader import open_array, read_decoded
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location
from tests.helpers.layouts import DTYPES

assert zarr_dtypes is not None  # teaches zarr bfloat16 and float8

RANK = 7
RELAXED = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

Written = dict[tuple[int, ...], ChunkRecord]


def bits(array: NDArray[Any]) -> bytes:
    """The bytes of an array: NaNs and negative zeros count as what they are."""
    return np.ascontiguousarray(array).tobytes()


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NDArray[Any]:
    """Any bit patterns, but for bool."""
    kind = dtypes.numpy_dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(seed).integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return raw.view(kind).reshape(shape)


def strided(array: NDArray[Any], style: str) -> NDArray[Any]:
    """An array of the same elements that lies otherwise in memory."""
    if style == "transposed":
        return array.transpose().copy(order="C").transpose()
    if style == "strided":
        wide = np.zeros(tuple(2 * n + 1 for n in array.shape), array.dtype)
        view = wide[(..., *(slice(1, 2 * n + 1, 2) for n in array.shape))]
        view[...] = array
        return view
    if style == "reversed":
        turned = array[(..., *(slice(None, None, -1) for _ in array.shape))].copy(order="C")
        return turned[(..., *(slice(None, None, -1) for _ in array.shape))]
    return array.copy(order="C")


STYLES = ("plain", "transposed", "strided", "reversed")
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def make_meta(
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    dtype: str,
    *,
    crc: bool = True,
    v2: bool = False,
    compression: str | None = None,
) -> ArrayMeta:
    key = "layer/0.weight"
    chain = ("crc32c",) if compression is None else (compression, "crc32c")
    return ArrayMeta(
        key,
        node_name(key),
        Grid(shape, chunk),
        dtype,
        codecs=chain if (crc or compression) and not v2 else (),
        zarr_format=2 if v2 else 3,
    )


def write_all(mover: Mover, meta: ArrayMeta, array: NDArray[Any], style: str = "plain") -> Written:
    found: Written = {}
    whole = Box((0,) * len(meta.shape), meta.shape)
    indices = list(meta.grid.overlapping(whole))
    writes = []
    for i, index in enumerate(indices):
        part = strided(array[(..., *meta.grid.box(index).slices)], style)
        writes.append(ChunkWrite(meta, index, part if i % 2 else (lambda part=part: part)))

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        found[item.index] = record

    mover.write(writes, done)
    assert sorted(found) == indices
    return found


def write_with_tensorstore(place: Location, meta: ArrayMeta, array: NDArray[Any]) -> None:
    open_array(place, meta).write(array).result()


def manifest_of(meta: ArrayMeta, written: Written) -> Manifest:
    report = RankManifest(RANK)
    report.add_array(meta, created=True)
    for index, record in written.items():
        report.add_chunk(meta, index, record)
    return merge([report.to_bytes()]).manifest


def stored_files(root: Path, meta: ArrayMeta) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / meta.node).iterdir()}


@contextlib.contextmanager
def folder() -> Iterator[Location]:
    with tempfile.TemporaryDirectory() as name:
        yield Location.of(name)


def none() -> Manifest | None:
    return None


Case = tuple[ArrayMeta, NDArray[Any], str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    chunk = tuple(draw(st.integers(1, n + 2)) for n in shape)
    dtype = draw(st.sampled_from(NAMES))
    v2 = draw(st.booleans()) and draw(st.booleans())
    compression = draw(st.sampled_from([None, None, "zstd", "blosc"]))
    meta = make_meta(shape, chunk, dtype, crc=draw(st.booleans()), v2=v2, compression=compression)
    return meta, random_array(shape, dtype, draw(st.integers(0, 99))), draw(st.sampled_from(STYLES))


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    offset, size = [], []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        offset.append(start)
        size.append(draw(st.integers(1, n - start)))
    return Box(tuple(offset), tuple(size))


@RELAXED
@given(case=cases())
def test_files_are_those_of_tensorstore_and_zarr_and_records_say_what_is_in_them(
    case: Case,
) -> None:
    meta, array, style = case
    with folder() as one, folder() as other:
        by_file = write_all(Mover.of(one, SaveOptions(threads=2)), meta, array, style)
        write_with_tensorstore(other, meta, array)
        assert stored_files(one.path, meta) == stored_files(other.path, meta)
        one.write(f"{meta.node}/{meta.document_name}", documents.array_document(meta).encode())
        opened = zarr.open_array(f"{one.url}/{meta.node}", mode="r")
        assert opened.shape == meta.shape
        assert bits(np.asarray(opened[...])) == bits(array)
        for index, record in by_file.items():
            data = (one.path / meta.chunk_name(index)).read_bytes()
            assert record.stored_bytes == len(data)
            plain = data[:-4] if meta.has_crc else data
            if meta.is_compressed:
                plain = decompress(meta, memoryview(plain))
            assert len(plain) == meta.chunk_bytes
            assert record.crc == crc32c(plain)
            assert record.digest == xxhash.xxh3_128_digest(plain)


@pytest.mark.parametrize("is_small", [False, True], ids=["", "small scratch"])
@RELAXED
@given(case=cases(), data=st.data())
def test_any_region_is_read_into_any_destination(
    is_small: bool, case: Case, data: st.DataObject
) -> None:
    """With slabs of 64 bytes and reads of 60 every boundary is met in a small array."""
    meta, array, style = case
    with folder() as place, pytest.MonkeyPatch.context() as patch:
        if is_small:
            patch.setattr(chunk_bytes, "SCRATCH_BYTES", 64)
            patch.setattr(files, "IO_BYTES", 60)
        manifest = manifest_of(
            meta, write_all(Mover.of(place, SaveOptions(threads=1)), meta, array, style)
        )
        for read in (Mover.of(place, SaveOptions(threads=2)).read, partial(read_decoded, place)):
            for known in (none, lambda: manifest):
                boxes = data.draw(st.lists(regions(meta.shape), min_size=1, max_size=3))
                outs = []
                for box in boxes:
                    empty = np.zeros(box.shape, array.dtype)
                    outs.append(strided(empty, data.draw(st.sampled_from(STYLES))))
                reads = [RegionRead(meta, b, o) for b, o in zip(boxes, outs, strict=True)]
                read(reads, known)
                for box, out in zip(boxes, outs, strict=True):
                    assert bits(out) == bits(array[(..., *box.slices)])


# Chunks of several MiB and odd sizes, where pieces, slabs and blocks end at different places.

LARGE = [
    # shape, chunk shape, data type
    ((9 * 1024 * 1024 + 13,), (9 * 1024 * 1024 + 13,), "uint8"),
    ((2 * 1024 * 1024,), (1024 * 1024 + 5,), "float32"),
    ((1300, 1700), (1300, 1700), "bfloat16"),
    ((1300, 1700), (700, 999), "float32"),
    ((3, 5, 260_000), (3, 4, 200_001), "int16"),
    ((3, 1_200_000), (2, 1_100_000), "float64"),  # one row is more than the scratch memory
]


@pytest.fixture(scope="module", params=LARGE, ids=lambda p: f"{p[2]}-{'x'.join(map(str, p[1]))}")
def large(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ArrayMeta, NDArray[Any], Location, Manifest]:
    shape, chunk, dtype = request.param
    meta, array = make_meta(shape, chunk, dtype), random_array(shape, dtype)
    place = Location.of(tmp_path_factory.mktemp("large"))
    written = write_all(Mover.of(place, SaveOptions(threads=1)), meta, array, "transposed")
    return meta, array, place, manifest_of(meta, written)


Large = tuple[ArrayMeta, NDArray[Any], Location, Manifest]


def test_large_chunks_are_the_same_files_from_any_source(large: Large, tmp_path: Path) -> None:
    meta, array, place, _ = large
    expected = {path.name: path for path in (place.path / meta.node).iterdir()}
    for style in ("plain", "strided", "tensorstore"):
        other = Location.of(tmp_path / style)
        other.path.mkdir()
        if style == "tensorstore":
            write_with_tensorstore(other, meta, array)
        else:
            write_all(Mover.of(other, SaveOptions(threads=2)), meta, array, style)
        found = {path.name: path for path in (other.path / meta.node).iterdir()}
        assert found.keys() == expected.keys()
        for name, path in found.items():
            assert path.read_bytes() == expected[name].read_bytes()


def test_large_running_checksums_are_those_of_the_files(large: Large) -> None:
    meta, _, place, manifest = large
    block = block_bytes(meta.chunk_bytes)
    for linear in range(meta.grid.size):
        index = meta.grid.index_at(linear)
        plain = (place.path / meta.chunk_name(index)).read_bytes()[:-4]
        ends = [*range(block, len(plain), block), len(plain)]
        rows = manifest.rows(meta)
        found = [*rows.running[linear], rows.crc[linear]]
        assert found == [crc32c(plain[:end]) for end in ends]


@settings(
    RELAXED,
    max_examples=settings.default.max_examples // 3,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_any_region_of_large_chunks_is_read(large: Large, data: st.DataObject) -> None:
    meta, array, place, manifest = large
    box = data.draw(regions(meta.shape))
    style = data.draw(st.sampled_from(("plain", "transposed", "strided")))
    for known in (none, lambda: manifest):
        out = strided(np.zeros(box.shape, array.dtype), style)
        Mover.of(place, SaveOptions(threads=2)).read([RegionRead(meta, box, out)], known)
        assert bits(out) == bits(array[box.slices])


def test_large_regions_at_block_boundaries(large: Large) -> None:
    """Rows that begin or end at, just before and just behind a block's boundary."""
    meta, array, place, manifest = large
    mover = Mover.of(place, SaveOptions(threads=1))
    row = meta.chunk_bytes // meta.grid.chunk_shape[0]
    block = block_bytes(meta.chunk_bytes)
    edge = min(meta.shape[0], meta.grid.chunk_shape[0])
    near = {
        r
        for boundary in range(0, edge * row + block, block)
        for r in range(boundary // row - 1, boundary // row + 2)
        if 0 <= r <= edge
    }
    stops = sorted(near)
    for start, stop in pairwise(stops):
        box = Box((start,) + (0,) * (array.ndim - 1), (stop - start, *array.shape[1:]))
        out = np.zeros(box.shape, array.dtype)
        mover.read([RegionRead(meta, box, out)], lambda: manifest)
        assert bits(out) == bits(array[box.slices])


def test_whole_chunks_need_no_manifest(tmp_path: Path) -> None:
    shape = (1000, 1000)
    meta, array = make_meta(shape, (300, 1000), "float32"), random_array(shape, "float32")
    place = Location.of(tmp_path)
    written = write_all(Mover.of(place), meta, array)

    def never() -> Manifest | None:
        raise AssertionError("the manifest was asked for")

    meta.crcs = b"".join(record.crc.to_bytes(4, "little") for _, record in sorted(written.items()))
    for style in ("plain", "transposed"):
        out = strided(np.zeros((900, 1000), np.float32), style)
        Mover.of(place).read([RegionRead(meta, Box((0, 0), (900, 1000)), out)], never)
        assert bits(out) == bits(array[:900])


def test_padding_of_an_edge_chunk_is_not_read(tmp_path: Path) -> None:
    size = 8 * 1024 * 1024
    meta = make_meta((size + 100,), (size,), "uint8")
    array = random_array((size + 100,), "uint8")
    place = Location.of(tmp_path)
    manifest = manifest_of(meta, write_all(Mover.of(place), meta, array))
    before = counters.copy()["bytes_read"]
    out = np.zeros(100, np.uint8)
    Mover.of(place).read([RegionRead(meta, Box((size,), (100,)), out)], lambda: manifest)
    assert bits(out) == bits(array[size:])
    assert counters.copy()["bytes_read"] - before <= block_bytes(size)


def test_memory_stays_small_for_huge_chunks(tmp_path: Path) -> None:
    """A chunk of 80 MiB, written from and read into strided memory."""
    shape = (10, 8 * 1024 * 1024)
    meta = make_meta(shape, shape, "uint8")
    source = np.zeros((10, 2 * shape[1]), np.uint8)[:, ::2]
    source[:, ::4096] = np.arange(2048, dtype=np.uint16).astype(np.uint8)
    place = Location.of(tmp_path)
    out = np.zeros((10, 2 * shape[1]), np.uint8)[:, ::2]
    tracemalloc.start()
    try:
        records: list[ChunkRecord] = []
        writes = [ChunkWrite(meta, (0, 0), source)]
        Mover.of(place).write(writes, lambda _, record: records.append(record))
        Mover.of(place).read([RegionRead(meta, Box((0, 0), shape), out)], none)
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, source)
    assert peak < 32 * 1024 * 1024
    assert left < 1024 * 1024  # the scratch memory of this thread is given back


# Damage.


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Large:
    shape, chunk = (700, 300), (400, 300)  # 480,000 bytes a chunk, blocks of 16 KiB
    meta, array = make_meta(shape, chunk, "float32"), random_array(shape, "float32")
    place = Location.of(tmp_path_factory.mktemp("sound"))
    return meta, array, place, manifest_of(meta, write_all(Mover.of(place), meta, array))


@contextlib.contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    before = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        yield
    finally:
        path.write_bytes(before)


Read = Callable[[Sequence[RegionRead], Callable[[], Manifest | None]], None]


def with_files(place: Location) -> Read:
    return Mover.of(place).read


def with_tensorstore(place: Location) -> Read:
    return partial(read_decoded, place)


def read_with(
    read: Read, meta: ArrayMeta, box: Box, manifest: Manifest | None, *, turned: bool = False
) -> NDArray[Any]:
    out = np.zeros(box.shape, np.float32)
    if turned:
        out = strided(out, "transposed")
    read([RegionRead(meta, box, out)], lambda: manifest)
    return out


@settings(RELAXED, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_flipped_byte_is_found_by_every_read_that_touches_its_block(
    sound: Large, data: st.DataObject
) -> None:
    meta, array, place, manifest = sound
    path = place.path / meta.chunk_name((0, 0))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, meta.chunk_bytes - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    row, block = 300 * 4, block_bytes(meta.chunk_bytes)
    start = data.draw(st.integers(0, 399))
    count = data.draw(st.integers(1, 400 - start))
    box = Box((start, 0), (count, 300))
    first, last = start * row // block, ((start + count) * row - 1) // block
    touched = first <= position // block <= last
    turned = data.draw(st.booleans())
    read = Mover.of(place, SaveOptions(threads=1)).read
    with damaged(path, bytes(content)):
        if touched or count == 400:
            with pytest.raises(ChunkCorruptError) as caught:
                read_with(read, meta, box, manifest, turned=turned)
            error = caught.value
            assert (error.key, error.chunk, error.rank) == (meta.key, (0, 0), RANK)
            assert error.url == str(path)
            assert f"rank {RANK}" in str(error)
            assert repr(meta.key) in str(error)
        else:
            out = read_with(read, meta, box, manifest, turned=turned)
            assert bits(out) == bits(array[box.slices])
        # Without a manifest, and through TensorStore, the whole chunk is verified.
        for other in (read, with_tensorstore(place)):
            with pytest.raises(ChunkCorruptError) as caught:
                read_with(other, meta, box, None, turned=turned)
            assert (caught.value.key, caught.value.chunk) == (meta.key, (0, 0))


ROWS, PART = Box((0, 0), (700, 300)), Box((390, 7), (20, 2))


def with_other_checksum(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("kind", "box", "other"),
    [
        (with_files, ROWS, with_other_checksum),
        (with_files, PART, lambda content: content + b"x"),  # blocks are verified by the manifest
        (with_tensorstore, ROWS, with_other_checksum),
        (with_tensorstore, PART, with_other_checksum),
    ],
)
def test_a_chunk_of_other_bytes_is_an_error(
    sound: Large, kind: Callable[[Location], Read], box: Box, other: Callable[[bytes], bytes]
) -> None:
    meta, _, place, manifest = sound
    path = place.path / meta.chunk_name((1, 0))
    content = path.read_bytes()
    for wrong in (*(content[:n] for n in (0, 1, 4096, 479_999, 480_003)), other(content)):
        with damaged(path, wrong), pytest.raises(ChunkCorruptError) as caught:
            read_with(kind(place), meta, box, manifest)
        assert (caught.value.key, caught.value.chunk) == (meta.key, (1, 0))
        assert (caught.value.rank, caught.value.url) == (RANK, str(path))


@pytest.mark.parametrize("kind", [with_files, with_tensorstore])
def test_a_missing_chunk_is_an_error(sound: Large, kind: Callable[[Location], Read]) -> None:
    meta, _, place, manifest = sound
    path = place.path / meta.chunk_name((1, 0))
    with damaged(path, None):
        with pytest.raises(ChunkMissingError) as caught:
            read_with(kind(place), meta, Box((0, 0), (700, 300)), manifest)
        assert isinstance(caught.value, FileNotFoundError)
        read_with(kind(place), meta, Box((0, 0), (400, 300)), manifest)
    error = caught.value
    assert (error.key, error.chunk, error.rank, error.url) == (meta.key, (1, 0), RANK, str(path))


def test_tensorstore_names_the_right_one_of_many_chunks(tmp_path: Path) -> None:
    """Chunk 1 is not taken for chunk 11, of whose name its own is the end or the beginning."""
    for v2 in (False, True):
        meta = make_meta((24,), (2,), "int32", v2=v2)
        place = Location.of(tmp_path / str(v2))
        place.path.mkdir()
        write_all(Mover.of(place), meta, random_array((24,), "int32"))
        (place.path / meta.chunk_name((11,))).unlink()
        out = np.zeros(24, np.int32)
        with pytest.raises(ChunkMissingError) as caught:
            read_decoded(place, [RegionRead(meta, Box((0,), (24,)), out)])
        assert caught.value.chunk == (11,)


def test_a_store_that_refuses_is_not_reported_as_damage(tmp_path: Path) -> None:
    meta = make_meta((4,), (4,), "int32")
    place = Location.of(tmp_path)
    meta = replace(meta, node="n" * 300)  # longer than the file system allows
    with pytest.raises(StorageError) as caught:
        Mover.of(place).read([RegionRead(meta, Box((0,), (4,)), np.zeros(4, np.int32))], none)
    assert caught.value.key == meta.key


def test_the_first_error_stops_the_others(tmp_path: Path) -> None:
    meta = make_meta((64, 1024 * 1024), (1, 1024 * 1024), "float32")
    row = np.zeros((1, 1024 * 1024), np.float32)
    started: list[int] = []

    def source(i: int) -> NDArray[Any]:
        started.append(i)
        if i == 3:
            raise ValueError("the device is gone")
        return row

    writes = [ChunkWrite(meta, (i, 0), lambda i=i: source(i)) for i in range(64)]
    with pytest.raises(ValueError, match="the device is gone"):
        Mover.of(Location.of(tmp_path), SaveOptions(threads=2)).write(writes, lambda *_: None)
    assert len(started) <= 3 + 1 + 2


def test_a_source_of_the_wrong_shape_or_type_is_refused(tmp_path: Path) -> None:
    meta = make_meta((5, 4), (2, 4), "float32")
    place = Location.of(tmp_path)
    mover = Mover.of(place)
    for wrong in (np.zeros((2, 3), "f4"), np.zeros((2, 4), "i4"), np.zeros((4, 2), "f4")):
        with pytest.raises(ValueError, match=r"layer/0\.weight"):
            mover.write([ChunkWrite(meta, (0, 0), wrong)], lambda *_: None)
    with pytest.raises(ValueError, match="shape"):
        mover.write([ChunkWrite(meta, (2, 0), np.zeros((2, 4), "f4"))], lambda *_: None)


def test_a_destination_of_the_wrong_shape_or_type_is_refused() -> None:
    meta = make_meta((5, 4), (2, 4), "float32")
    for wrong in (np.zeros((2, 3), "f4"), np.zeros((2, 4), "i4"), np.zeros((1, 2, 4), "f4")):
        with pytest.raises(ValueError, match=r"layer/0\.weight"):
            RegionRead(meta, Box((0, 0), (2, 4)), wrong)


def test_the_folder_of_a_swept_attempt_does_not_come_back(tmp_path: Path) -> None:
    meta = make_meta((4,), (4,), "int32")
    place = Location.of(tmp_path / "swept")
    with pytest.raises(StorageError, match="removed it while it was in use"):
        write_all(Mover.of(place), meta, random_array((4,), "int32"))
    assert not os.path.exists(place.url)


def test_short_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system may move less than it was asked to; here it moves 1,000 bytes."""
    real_read, real_write = os.preadv, os.write

    def short(buffers: Sequence[Any]) -> list[memoryview]:
        out, left = [], 1000
        for buffer in buffers:
            out.append(memoryview(buffer)[:left])
            left -= len(out[-1])
        return out

    monkeypatch.setattr(os, "preadv", lambda fd, b, o: real_read(fd, short(b), o))
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, memoryview(data)[:1000]))
    meta, array = make_meta((30, 100), (20, 100), "float32"), random_array((30, 100), "float32")
    place = Location.of(tmp_path)
    manifest = manifest_of(meta, write_all(Mover.of(place), meta, array))
    for known in (None, manifest):
        for box in (Box((0, 0), (30, 100)), Box((3, 10), (20, 30)), Box((1, 0), (18, 100))):
            assert bits(read_with(with_files(place), meta, box, known)) == bits(array[box.slices])
