"""The two planes to object stores: bytes alike everywhere, limits in time and memory, and errors
that say what to do."""

from __future__ import annotations

import os
import textwrap
import uuid
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.errors import ChunkCorruptError, ChunkMissingError, StorageError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import FileSystemIO, RemoteStore
from shardstore.storage.stores.tensorstore import KvStoreIO
from testing.s3_servers import S3Server
from tests.helpers.programs import run_text
from tests.helpers.store_suite import Target, tensor

MANY = 100


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
            Mover.of(many, SaveOptions(budget_bytes=1 << 18)).read(reads, lambda: None)
    finally:
        many.remote.write("k7/c.0", there)
    assert said in str(caught.value)
    assert f"{many.place}/k7/c.0" in str(caught.value)
    assert (caught.value.key, caught.value.chunk) == ("k7", (0,))
    assert (out[7] == -1).all()  # it is verified before it goes anywhere


@pytest.mark.parametrize(
    ("target", "options", "client", "times"),
    [
        ("memory", {}, FileSystemIO, 12),
        ("s3", {}, KvStoreIO, 12),
        ("gs", {}, KvStoreIO, 12),
        ("gs", {"requests_timeout": 60}, FileSystemIO, 18),  # gcsfs sends parts of 50 MiB
    ],
    indirect=["target"],
    ids=["memory", "s3", "gs", "gcsfs"],
)
def test_an_object_io_creates_once_and_reads_ranges(
    target: Target, options: dict[str, Any], client: type, times: int
) -> None:
    place = Location.of(target("io"), options)
    io, large = place.io(), np.random.default_rng(0).bytes(3 << 20)
    assert isinstance(io, client)
    assert io.put("a/b", [b"01234", memoryview(b"56789")], create=True)
    assert not io.put("a/b", [b"other"], create=True)
    for bounds, wanted in (
        ((), b"0123456789"),
        ((2, 5), b"234"),
        ((8, 20), b"89"),
        ((30, 40), b""),
    ):
        assert io.get("a/b", *bounds) == wanted
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
    assert io.put("larger", [large] * times, create=True)
    size = times * len(large)
    assert io.get("larger", size=size) == large * times
    assert io.get("larger", 5, size - 5, size=size) == (large * times)[5:-5]
    assert not io.put("larger", [large] * times, create=True)
    for name in ("layers%2F0.b~x", "%5F_a", "ä b", "a#1", "a?generation=1"):
        assert io.put(name, [name.encode()], create=True)
        assert place.read(name) == io.get(name) == name.encode()
    assert place.read_many(["a/b", "none", "a/b"]) == [b"new", None, b"new"]
    assert place.read_many([]) == []
    place.delete()
    assert place.walk() == []


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
