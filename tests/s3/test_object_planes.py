"""The two planes to object stores: bytes alike everywhere, limits in time and memory, and errors
that say what to do."""

from __future__ import annotations

import json
import os
import textwrap
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstore
from shardstore import ShardedTensor, delete_checkpoint, latest
from shardstore.errors import (
    ChunkCorruptError,
    ChunkMissingError,
    NotACheckpointError,
    StorageError,
)
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers.chunks import ChunkWrite, RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location, StoreUrl
from shardstore.storage.stores.remote import RemoteStore
from testing.s3_servers import S3Server
from tests.helpers.programs import run_text
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.store_suite import small_state, tensor


@settings(suppress_health_check=list(HealthCheck))
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
    kind = shardstore.storage.format.dtypes.numpy_dtype(dtype)
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
    for mover, found in zip((Mover.of(files), Mover.of(objects)), records, strict=True):
        mover.write(
            writes,
            lambda item, record, found=found: found.update({item.index: record}),
            [("common.pt", raw.tobytes()), ("w/zarr.json", b"{}")],
        )
        assert mover.location.read("common.pt") == raw.tobytes()
    assert records[0] == records[1]
    for name in files.listing("w"):
        assert files.read(f"w/{name}") == objects.read(f"w/{name}")
    assert files.listing("w") == objects.listing("w")
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    length = tuple(data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    out = np.zeros(tuple(reversed(length)), kind).transpose()
    Mover.of(objects).read([RegionRead(meta, Box(start, length), out)], lambda: None)
    assert out.tobytes() == array[(..., *Box(start, length).slices)].tobytes()
    # With the checksums of the commit small chunks that are wanted whole take a shorter way.
    by_index = {meta.grid.linear(index): record.crc for index, record in records[0].items()}
    crcs = np.array([by_index[number] for number in range(len(by_index))], "<u4").tobytes()
    out = np.zeros(shape, kind)
    known = replace(meta, crcs=crcs)
    before = counters.copy()
    Mover.of(objects).read([RegionRead(known, whole, out)], lambda: None)
    assert out.tobytes() == array.tobytes()
    assert counters.copy()["chunks_read"] - before["chunks_read"] == len(writes)


MANY = 600


@pytest.fixture(scope="module")
def many() -> Location:
    """Many small arrays, in memory."""
    place = f"memory://{uuid.uuid4().hex}/c"
    whole = torch.arange(MANY, dtype=torch.float32)[:, None].expand(MANY, 1024)
    shardstore.save({f"k{i}": tensor(f"k{i}", whole[i].clone()) for i in range(MANY)}, place)
    return Location.of(place)


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
    many: Location, damage: Any, kind: type[StorageError], said: str
) -> None:
    there, other = many.read("k7/c.0"), many.read("k8/c.0")
    assert there is not None
    spoiled = damage(there, other)
    if spoiled is None:
        many.remote.delete(["k7/c.0"])
    else:
        many.remote.write("k7/c.0", spoiled)
    arrays = StoredCheckpoint(many).arrays
    out = np.full((MANY, 1024), -1, np.float32)
    reads = [RegionRead(arrays[f"k{i}"], Box((0,), (1024,)), out[i]) for i in range(MANY)]
    try:
        with pytest.raises(kind) as caught:
            Mover.of(many, SaveOptions(budget_bytes=1 << 20)).read(reads, lambda: None)
    finally:
        many.remote.write("k7/c.0", there)
    assert said in str(caught.value)
    assert f"{many.place}/k7/c.0" in str(caught.value)
    assert (caught.value.key, caught.value.chunk) == ("k7", (0,))
    assert (out[7] == -1).all()  # it is verified before it goes anywhere


def test_an_object_io_creates_once_and_reads_ranges(s3_server: S3Server) -> None:
    where = f"{s3_server.new_bucket()}/io"
    large = np.random.default_rng(0).bytes(3 << 20)
    for place in (
        Location.of(f"memory://{where}"),
        Location.of(f"s3://{where}", s3_server.storage_options),
    ):
        io = place.io()
        assert io.put("a/b", [b"01234", memoryview(b"56789")], create=True)
        assert not io.put("a/b", [b"other"], create=True)
        assert io.get("a/b") == b"0123456789"
        assert io.get("a/b", 2, 5) == b"234"
        assert io.get("a/b", 8, 20) == b"89"
        assert io.get("a/b", 30, 40) == b""
        assert io.get("none") is None
        assert io.get("none", 2, 5) is None
        assert io.put("a/b", [b"new"], create=False)
        assert io.put("large", [large], create=True)
        assert io.get("large", 0, None) == large
        assert io.get("large", 5, 2 << 20) == large[5 : 2 << 20]
        # Read in parts, and some of them are not there.
        assert io.get("large", size=40 << 20) == large
        assert io.get("large", 5, 40 << 20, size=40 << 20) == large[5:]
        assert io.get("none", size=40 << 20) is None
        assert io.put("larger", [large] * 12, create=True)
        assert io.get("larger", size=36 << 20) == large * 12
        assert io.get("larger", 5, (36 << 20) - 5, size=36 << 20) == (large * 12)[5:-5]
        for name in ("layers%2F0.b~x", "%5F_a", "\u00e4 b"):
            assert io.put(name, [name.encode()], create=True)
            assert place.read(name) == io.get(name) == name.encode()
        assert place.read_many(["a/b", "none", "a/b"]) == [b"new", None, b"new"]
        assert place.read_many([]) == []


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
def test_an_error_of_the_store_is_raised_soon(
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
    with pytest.raises(StorageError, match=text):
        calls[verb]()


def test_a_bucket_without_a_checkpoint_is_no_error_of_the_store(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.new_bucket()}/step"
    with pytest.raises(NotACheckpointError, match="is not a distributed checkpoint"):
        shardstore.load(small_state(), url, storage_options=s3_server.storage_options)
    assert latest(url, storage_options=s3_server.storage_options) is None


def test_a_program_may_import_tensorstore_first(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of ours, and what TensorStore alone reads: with all limits of time."""
    program = """
        import sys, tensorstore
        import shardstore, torch
        from shardstore import ShardedTensor
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
        shardstore.save(state, sys.argv[1], overwrite=True)
        location = shardstore.storage.stores.location.Location.of(sys.argv[1])
        stored = shardstore.storage.checkpoint.StoredCheckpoint(location)
        from shardstore.storage.movers.tensorstore_reader import read_decoded
        from shardstore.storage.movers.chunks import RegionRead
        from shardstore.storage.format.grid import Box
        out = torch.zeros(3).numpy()
        read = RegionRead(stored.arrays["w"], Box((0,), (3,)), out)
        read_decoded(location, [read])
        assert out.tolist() == [1, 1, 1]
    """
    for name in list(os.environ):
        if name.startswith("TENSORSTORE_CURL"):
            monkeypatch.delenv(name)
    url = f"s3://{s3_server.new_bucket()}/step"
    ended = run_text(textwrap.dedent(program), url, **s3_server.environment)
    assert ended.returncode == 0, ended.stderr


def test_a_url_keeps_its_options_on_the_way(tmp_path: Path) -> None:
    place = Location.of("memory://bucket//run/step", {"key": "k"}).place
    assert isinstance(place, StoreUrl)
    assert place == "memory://bucket//run/step"
    assert Location.of(place).options == {"key": "k"}
    assert Location.of(Location.of(place), {"secret": "s"}).options == {"key": "k", "secret": "s"}
    assert Location.of(str(tmp_path)).place == tmp_path
    assert json.dumps({"url": place}) == '{"url": "memory://bucket//run/step"}'


def _memory_of_many(rank: int, world_size: int) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world_size))}
    with pytest.raises(StorageError, match="memory of one process"):
        shardstore.save(state, "memory://bucket/step")


def test_memory_urls_are_refused_on_several_ranks() -> None:
    run_ranks(_memory_of_many, 2)


def test_a_store_that_ignores_the_range_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"memory://{uuid.uuid4().hex}/c"
    whole = torch.arange(1 << 18, dtype=torch.float32)
    shardstore.save({"w": tensor("w", whole)}, place)
    stored = StoredCheckpoint(Location.of(place))
    read = RemoteStore.read_range
    monkeypatch.setattr(RemoteStore, "read_range", lambda self, name, *_: read(self, name, 0, None))
    out = np.empty(16, np.float32)
    with pytest.raises(ChunkCorruptError, match="came as 1048580 bytes where 32768"):
        stored.read([RegionRead(stored.arrays["w"], Box((0,), (16,)), out)])
