"""The two planes to object stores: bytes alike everywhere, limits in time and memory, and errors
that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from scripts.s3_servers import S3Server
from shardstore import ShardedTensor, delete_checkpoint, latest
from shardstore.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    NotACheckpointError,
    StorageError,
)
from shardstore.storage import chunk_bytes, s3_io
from shardstore.storage import object_io as object_io_module
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.chunks import ChunkWrite, RegionRead
from shardstore.storage.counters import counters
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.files import FileMover
from shardstore.storage.grid import Box, Grid
from shardstore.storage.location import Location, StoreUrl
from shardstore.storage.manifest import ChunkRecord
from shardstore.storage.object_io import ObjectIO, object_io, read_objects
from shardstore.storage.object_mover import SMALL_UNCOUNTED_FROM, ObjectMover
from tests.ranks_helper import run_ranks
from tests.store_suite import small_state, tensor

FIRST = 24
"""Small objects before whatever a test is about: more threads come once the first are there."""


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.data(),
    st.sampled_from(["float32", "bfloat16", "bool", "complex128"]),
    st.booleans(),
)
def test_objects_are_the_bytes_that_files_are(
    tmp_path_factory: pytest.TempPathFactory,
    shape: list[int],
    data: st.DataObject,
    dtype: str,
    crc: bool,
) -> None:
    chunk = tuple(data.draw(st.integers(1, n + 1)) for n in shape)
    meta = ArrayMeta("w", "w", Grid(tuple(shape), chunk), dtype, ("crc32c",) if crc else ())
    size = int(np.prod(shape, dtype=np.int64))
    kind = shardstore.storage.dtypes.numpy_dtype(dtype)
    raw = np.random.default_rng(0).integers(0, 2, size * kind.itemsize, dtype=np.uint8)
    array = raw.view(kind).reshape(shape)
    whole = Box((0,) * len(shape), tuple(shape))
    writes = [
        ChunkWrite(meta, index, array[(..., *meta.grid.box(index).slices)])
        for index in meta.grid.overlapping(whole)
    ]
    files = Location.of(tmp_path_factory.mktemp("files"))
    objects = Location.of(f"memory://{uuid.uuid4().hex}/c")
    records: list[dict[tuple[int, ...], ChunkRecord]] = [{}, {}]
    for mover, found in zip((FileMover(files), ObjectMover(objects)), records, strict=True):
        mover.write(writes, lambda item, record, found=found: found.update({item.index: record}))
    assert records[0] == records[1]
    for name in files.listing("w"):
        assert files.read(f"w/{name}") == objects.read(f"w/{name}")
    assert files.listing("w") == objects.listing("w")
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    length = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    out = np.zeros(tuple(reversed(length)), kind).transpose()
    ObjectMover(objects).read([RegionRead(meta, Box(start, length), out)], lambda: None)
    assert out.tobytes() == array[(..., *Box(start, length).slices)].tobytes()
    # With the checksums of the commit small chunks that are wanted whole take a shorter way.
    by_index = {meta.grid.linear(index): record.crc for index, record in records[0].items()}
    crcs = np.array([by_index[number] for number in range(len(by_index))], "<u4").tobytes()
    out = np.zeros(shape, kind)
    known = replace(meta, crcs=crcs)
    before = counters.snapshot()
    ObjectMover(objects).read([RegionRead(known, whole, out)], lambda: None)
    assert out.tobytes() == array.tobytes()
    assert counters.snapshot()["chunks_read"] - before["chunks_read"] == len(writes)


@pytest.mark.parametrize("budget", [1 << 20, 256 << 20], ids=["counted", "uncounted"])
@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (lambda data, other: data[:-1], ChunkCorruptError, "has 4099 bytes, not 4100"),
        (lambda data, other: data + b"x", ChunkCorruptError, "has 4101 bytes, not 4100"),
        (lambda data, other: b"", ChunkCorruptError, "has 0 bytes, not 4100"),
        (lambda data, other: b"\1" + data[1:], ChunkCorruptError, "fails its checksum"),
        (lambda data, other: other, ChunkCorruptError, "not the chunk that was committed"),
        (lambda data, other: None, ChunkMissingError, "is missing"),
    ],
    ids=["short", "long", "empty", "bit", "foreign", "missing"],
)
def test_a_small_chunk_that_is_not_what_was_saved(
    budget: int, damage: Any, kind: type[StorageError], said: str
) -> None:
    place = f"memory://{uuid.uuid4().hex}/c"
    state = {
        f"k{i}": ShardedTensor.from_rank_offsets(f"k{i}", torch.full((1024,), float(i)))
        for i in range(600)
    }
    shardstore.save(state, place)
    location = Location.of(place)
    there, other = location.read("k7/c.0"), location.read("k8/c.0")
    assert there is not None
    spoiled = damage(there, other)
    if spoiled is None:
        location.remote.delete(["k7/c.0"])
    else:
        location.remote.write("k7/c.0", spoiled)
    arrays = StoredCheckpoint(location).arrays
    out = np.full((600, 1024), -1, np.float32)
    reads = [RegionRead(arrays[f"k{i}"], Box((0,), (1024,)), out[i]) for i in range(600)]
    with pytest.raises(kind) as caught:
        ObjectMover(location, budget_bytes=budget).read(reads, lambda: None)
    assert said in str(caught.value)
    assert f"{place}/k7/c.0" in str(caught.value)
    assert (caught.value.key, caught.value.chunk) == ("k7", (0,))
    if budget >= SMALL_UNCOUNTED_FROM:  # it comes in one piece, verified before it goes anywhere
        assert (out[7] == -1).all()


def test_requests_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the object interface: bytes of all requests that are under way."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    flying, peak, most = 0, 0, 0
    lock = threading.Lock()

    class Counting:
        threads = small_threads = 32

        def __init__(self, location: Location) -> None:
            self.inner = object_io_module.object_io(location)

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            with self._count(sum(map(len, parts))):
                return self.inner.put(key, parts, create=create)

        def fetch(
            self, key: str, start: int, stop: int | None, take: Any, size: int = 0
        ) -> int | None:
            with self._count(65540):
                return self.inner.fetch(key, start, stop, take, size)

        @contextmanager
        def _count(self, size: int) -> Iterator[None]:
            nonlocal flying, peak, most
            with lock:
                flying += size
                peak = max(peak, flying)
                most = max(most, flying // size)
            time.sleep(0.01)
            yield
            with lock:
                flying -= size

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr("shardstore.storage.object_mover.object_io", Counting)
    meta = ArrayMeta("w", "w", Grid((64, 16384), (1, 16384)), "float32")
    array = np.random.default_rng(0).random((64, 32768), np.float32)[:, ::2]  # to be gathered
    mover = ObjectMover(place, budget_bytes=1 << 20)
    mover.write(
        [ChunkWrite(meta, (i, 0), array[i : i + 1]) for i in range(64)], lambda item, record: None
    )
    assert flying == 0
    assert most >= 4
    assert peak <= 1 << 20
    peak = most = 0
    out = np.zeros((64, 32768), np.float32)[:, ::2]
    mover.read([RegionRead(meta, Box((0, 0), array.shape), out)], lambda: None)
    assert flying == 0
    assert most >= 4
    assert peak <= 1 << 20
    assert np.array_equal(out, array)


@pytest.mark.parametrize("writing", [True, False])
def test_small_objects_wait_for_no_large_one(
    writing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large objects end only when all small ones have gone."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    changed = threading.Condition()
    small_gone = ended = 0
    watching = False

    class Waiting:
        threads = small_threads = 4

        def __init__(self, location: Location) -> None:
            self.inner = object_io_module.object_io(location)

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            with self._under_way(key):
                return self.inner.put(key, parts, create=create)

        def get(self, key: str) -> bytes | None:
            with self._under_way(key):
                return self.inner.get(key)

        def fetch(
            self, key: str, start: int, stop: int | None, take: Any, size: int = 0
        ) -> int | None:
            with self._under_way(key):
                return self.inner.fetch(key, start, stop, take, size)

        @contextmanager
        def _under_way(self, key: str) -> Iterator[None]:
            nonlocal small_gone, ended
            if not watching:
                yield
                return
            if key.startswith("small"):
                yield
                with changed:
                    small_gone += 1
                    changed.notify_all()
                return
            with changed:
                assert changed.wait_for(lambda: small_gone == 12, timeout=60)
            yield
            with changed:
                ended += 1

        def close(self) -> None:
            self.inner.close()

    monkeypatch.setattr("shardstore.storage.object_mover.object_io", Waiting)
    state = {
        **{f"large{i}": torch.full((512, 512), float(i)) for i in range(3)},
        **{f"small{i}": torch.full((4,), float(i)) for i in range(12)},
    }
    tensors = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}
    watching = writing
    shardstore.save(tensors, place.place)
    watching = not writing
    loaded = shardstore.load(
        {
            key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(value))
            for key, value in state.items()
        },
        place.place,
    )
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    assert ended == 3


@pytest.mark.parametrize("slow", [True, False])
def test_small_objects_have_more_requests_where_answers_are_slow(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads, and six more where the store is slow: then six small objects go together, and
    of large ones two as before."""
    monkeypatch.setattr("shardstore.storage.object_io.SLOW_S", 0.0 if slow else float("inf"))
    changed = threading.Condition()
    in_pairs = threading.Barrier(2)
    under_way = {"large": 0, "small": 0}
    most = {"large": 0, "small": 0}

    class Counting:
        threads, small_threads = 2, 8

        def __init__(self, location: Location) -> None:
            pass

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            kind = key[:5]
            with changed:
                under_way[kind] += 1
                most[kind] = max(most[kind], under_way[kind])
                changed.notify_all()
                if slow and kind == "small" and int(key.rpartition(".")[2]) >= FIRST:
                    assert changed.wait_for(lambda: most["small"] >= 6, timeout=60)
            if kind == "small" and int(key.rpartition(".")[2]) < FIRST:
                in_pairs.wait(60)  # so that the caller's thread has its share
            time.sleep(0.01)
            with changed:
                under_way[kind] -= 1
            return True

        def close(self) -> None:
            pass

    monkeypatch.setattr("shardstore.storage.object_mover.object_io", Counting)
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    small = ArrayMeta("small", "small", Grid((400,), (4,)), "float32")
    large = ArrayMeta("large", "large", Grid((8, 1 << 18), (1, 1 << 18)), "float32")
    writes = [ChunkWrite(small, (i,), np.zeros(4, np.float32)) for i in range(100)]
    writes[50:50] = [
        ChunkWrite(large, (i, 0), np.zeros((1, 1 << 18), np.float32)) for i in range(8)
    ]
    ObjectMover(place).write(writes, lambda item, record: None)
    assert most["large"] <= 2
    assert 6 <= most["small"] <= 8 if slow else most["small"] <= 2


def test_after_an_error_none_that_waits_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large objects may go at a time, six threads wait with others: these stay where they are,
    or each would try for as long as the first."""
    monkeypatch.setattr("shardstore.storage.object_io.SLOW_S", 0.0)
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    begun: list[str] = []
    both = threading.Barrier(2)

    class Refusing:
        threads, small_threads = 2, 8

        def __init__(self, location: Location) -> None:
            self.url = location.url

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            if not key.startswith("large"):
                both.wait(60)  # so that the caller's thread has its share
                return True
            begun.append(key)
            both.wait(60)
            time.sleep(0.05)  # the others do come to wait
            raise StorageError(f"{self.url}/{key} is refused", url=self.url)

        def close(self) -> None:
            pass

    monkeypatch.setattr("shardstore.storage.object_mover.object_io", Refusing)
    large = ArrayMeta("large", "large", Grid((20, 1 << 18), (1, 1 << 18)), "float32")
    small = ArrayMeta("small", "small", Grid((400,), (4,)), "float32")
    writes = [ChunkWrite(small, (i,), np.zeros(4, np.float32)) for i in range(FIRST)]
    writes += [ChunkWrite(large, (i, 0), np.zeros((1, 1 << 18), np.float32)) for i in range(20)]
    with pytest.raises(StorageError, match="is refused") as caught:
        ObjectMover(place).write(writes, lambda item, record: None)
    assert caught.value.key == "large"
    assert len(begun) == 2


def test_gathered_chunks_keep_no_memory_of_threads_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a chunk with gaps is gathered in is given back before it is sent."""
    kept: list[bool] = []

    class Looking:
        threads = small_threads = 2

        def __init__(self, location: Location) -> None:
            pass

        def put(self, key: str, parts: Sequence[bytes | memoryview], *, create: bool) -> bool:
            kept.append("scratch" in chunk_bytes._local.__dict__)
            return True

        def close(self) -> None:
            pass

    monkeypatch.setattr("shardstore.storage.object_mover.object_io", Looking)
    meta = ArrayMeta("w", "w", Grid((4, 1 << 18), (1, 1 << 18)), "float32")
    data = np.zeros((4, 1 << 19), np.float32)[:, ::2]
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    writes = [ChunkWrite(meta, (i, 0), data[i : i + 1]) for i in range(4)]
    ObjectMover(place).write(writes, lambda item, record: None)
    assert kept == [False] * 4


@pytest.mark.parametrize(
    ("seconds", "said", "tries"),
    [
        (512, "kind: Timeout", 1),  # who has waited for long does not do so again
        (32, "kind: Timeout", 3),
        (512, "connection reset", 2),  # it came, for long, and broke off
        (32, "connection reset", 4),
        (512, "status code: 503", 2),
        (1, "status code: 403", 1),
    ],
)
def test_for_how_long_a_request_is_tried(
    seconds: int, said: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test's own, which goes on while something is tried, and not in between."""
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    monkeypatch.setattr(s3_io, "time", clock)
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}
    io = s3_io.S3IO(Location.of("s3://bucket/place", **options))
    asked = []

    def work() -> None:
        asked.append(now[0])
        now[0] += seconds
        raise OSError(said)

    with pytest.raises(StorageError, match="writing s3://bucket/place/w/c"):
        io._tried("writing", "w/c", work)
    assert len(asked) == tries


def test_who_waits_for_its_source_holds_nothing_of_the_budget() -> None:
    """Sources that are ready only when all before them, but a few, are gone: as staged in a ring.
    Those that wait would hold what those need that they wait for."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    meta = ArrayMeta("w", "w", Grid((200, 1024), (1, 1024)), "float32")
    changed = threading.Condition()
    gone: set[int] = set()

    class Source:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            before = range(self.number - 2)
            with changed:
                assert changed.wait_for(lambda: all(n in gone for n in before), timeout=60)

        def __call__(self) -> np.ndarray[Any, Any]:
            self.wait()
            return np.full((1, 1024), float(self.number), np.float32)

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        with changed:
            gone.add(item.index[0])
            changed.notify_all()

    writes = [ChunkWrite(meta, (i, 0), Source(i)) for i in range(200)]
    ObjectMover(place, budget_bytes=100_000).write(writes, done)
    assert len(gone) == 200


def test_an_object_io_creates_once_and_reads_ranges(s3_server: S3Server) -> None:
    where = f"{s3_server.new_bucket()}/io"
    large = np.random.default_rng(0).bytes(3 << 20)
    for place in (
        Location.of(f"memory://{where}"),
        Location.of(f"s3://{where}", **s3_server.storage_options),
    ):
        io = object_io(place)

        def part(key: str, start: int, stop: int | None, io: ObjectIO = io) -> bytes | None:
            found = bytearray()

            def take(position: int, piece: memoryview) -> None:
                assert position == len(found)
                found.extend(piece)

            size = io.fetch(key, start, stop, take)
            assert size is None or size == len(found)
            return None if size is None else bytes(found)

        assert io.put("a/b", [b"01234", memoryview(b"56789")], create=True)
        assert not io.put("a/b", [b"other"], create=True)
        assert io.get("a/b") == b"0123456789"
        assert part("a/b", 2, 5) == b"234"
        assert part("a/b", 8, 20) in (b"89", b"")
        assert part("a/b", 30, 40) == b""
        assert io.get("none") is None
        assert part("none", 2, 5) is None
        assert io.put("a/b", [b"new"], create=False)
        assert io.put("large", [large], create=True)
        assert part("large", 0, None) == large
        assert part("large", 5, 2 << 20) == large[5 : 2 << 20]
        for name in ("layers%2F0.b~x", "%5F_a", "\u00e4 b"):
            assert io.put(name, [name.encode()], create=True)
            assert place.read(name) == io.get(name) == name.encode()
        io.close()
        assert read_objects(place, ["a/b", "none", "a/b"]) == [b"new", None, b"new"]
        assert read_objects(place, []) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"url": "s3://no-such-bucket-here/step"}, "the bucket does not exist"),
        ({"key": "AKNOBODY000000000000"}, "refuses the credentials"),
        ({"client_kwargs": {"endpoint_url": "http://127.0.0.1:9"}}, "does not answer"),
        ({"bogus": 1}, "storage options"),
        ({"profile": "no-such-profile", "key": None, "secret": None}, "AWS_PROFILE"),
    ],
)
@pytest.mark.parametrize("verb", ["save", "load", "check", "latest", "delete"])
def test_what_is_wrong_with_the_store_is_said_soon(
    s3_server: S3Server, verb: str, change: dict[str, Any], text: str
) -> None:
    options = {**s3_server.storage_options, **change}
    url = options.pop("url", None) or f"s3://{s3_server.new_bucket()}/step"
    calls = {
        "save": lambda: shardstore.save(small_state(), url, storage_options=options),
        "load": lambda: shardstore.load(small_state(), url, storage_options=options),
        "check": lambda: shardstore.check_is_distributed_checkpoint(url, storage_options=options),
        "latest": lambda: latest(url, storage_options=options),
        "delete": lambda: delete_checkpoint(url, storage_options=options),
    }
    started = time.monotonic()
    with pytest.raises(StorageError, match=text):
        calls[verb]()
    assert time.monotonic() - started < 30


def test_a_bucket_without_a_checkpoint_is_no_error_of_the_store(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.new_bucket()}/step"
    with pytest.raises(NotACheckpointError, match="is not a distributed checkpoint"):
        shardstore.load(small_state(), url, storage_options=s3_server.storage_options)
    assert latest(url, storage_options=s3_server.storage_options) is None


def test_tensorstore_without_limits_is_refused(s3_server: S3Server) -> None:
    """What TensorStore alone reads; chunks of ours do not go through it."""
    program = """
        import sys, tensorstore
        import shardstore, torch
        from shardstore import ShardedTensor
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
        shardstore.save(state, sys.argv[1], overwrite=True)
        stored = shardstore.storage.checkpoint.StoredCheckpoint(
            shardstore.storage.location.Location.of(sys.argv[1]), mover="tensorstore"
        )
        from shardstore.storage.chunks import RegionRead
        from shardstore.storage.grid import Box
        out = torch.zeros(3).numpy()
        try:
            stored.read([RegionRead(stored.arrays["w"], Box((0,), (3,)), out)])
        except shardstore.CheckpointingException as error:
            print("refused:", error)
        else:
            assert out.tolist() == [1, 1, 1]
    """
    environment = {**os.environ, **s3_server.environment}
    for name in list(environment):
        if name.startswith("TENSORSTORE_CURL"):
            del environment[name]
    url = f"s3://{s3_server.new_bucket()}/step"

    def run() -> str:
        command = [sys.executable, "-c", textwrap.dedent(program), url]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    said = run()
    assert said.startswith("refused:")
    assert "import shardstore first" in said
    environment["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"] = "10"
    environment["TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES"] = "1"
    assert run() == ""


def test_a_url_keeps_its_options_on_the_way(tmp_path: Path) -> None:
    place = Location.of("s3://bucket//run/step", key="k").place
    assert isinstance(place, StoreUrl)
    assert place == "s3://bucket//run/step"
    assert Location.of(place).options == {"key": "k"}
    assert Location.of(Location.of(place), secret="s").options == {"key": "k", "secret": "s"}
    assert Location.of(str(tmp_path)).place == tmp_path
    assert json.dumps({"url": place}) == '{"url": "s3://bucket//run/step"}'


def _memory_of_many(rank: int, world_size: int) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world_size))}
    with pytest.raises(StorageError, match="memory of one process"):
        shardstore.save(state, "memory://bucket/step")


def test_ranks_can_not_share_the_memory_of_one() -> None:
    run_ranks(_memory_of_many, 2)


def test_many_arrays_are_one_document(s3_server: S3Server) -> None:
    """Counted by what it costs: no array's own document is asked for."""
    url = f"s3://{s3_server.new_bucket()}/step"
    options = s3_server.storage_options
    state = {f"k{i}": tensor(f"k{i}", torch.full((2,), float(i))) for i in range(60)}
    shardstore.save(state, url, storage_options=options)
    where = Location.of(url, **options)
    where.remote.delete([f"k{i}/zarr.json" for i in range(60)])
    assert len(shardstore.load_tensors_metadata(url, storage_options=options)) == 60
    assert shardstore.load(state, url, storage_options=options)["k7"][0] == 7.0
