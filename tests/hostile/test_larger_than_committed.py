"""A file that is larger than the commit says: refused before its bytes are taken into memory."""

from __future__ import annotations

import base64
import struct
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.cli.app import run
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server
from tests.helpers.root_documents import about, rewrite
from tests.hostile.test_bombs import bounded

MORE = bytes(128 * 1024**2)
FILES = ["w/c.0", "packed/c.0", "common.pt", "manifest.npz", "o/shard_0_1.pt"]


def state(key: str = "w") -> dict[str, Any]:
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.arange(3000.0)),
        "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
        "step": 3,
    }


def load(place: Location, key: str) -> None:
    shardstore.load(state(key), place.place)


def read_manifest(place: Location, _: str) -> None:
    stored = StoredCheckpoint(place)
    assert stored.root is not None
    assert stored.manifest is not None


def change_commit(place: Location, **changed: object) -> None:
    rewrite(place.place, lambda root: about(root).update(changed), sign=False)


@pytest.fixture(params=["local", "memory"])
def top(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return tmp_path.as_posix() if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def enlarged(
    place: Location, name: str, more: bytes = MORE
) -> tuple[str, Callable[[Location, str], None]]:
    """Save, and enlarge a file; its key and what reads it."""
    key = "packed" if name.startswith("packed") else "w"
    packed = "zstd" if key == "packed" else None
    shardstore.save(state(key), place.place, compression=packed)
    place.write(name, place.read(name) + more)
    return key, read_manifest if name == "manifest.npz" else load


def is_damage(place: Location, name: str) -> None:
    key, read = enlarged(place, name)
    with bounded(len(MORE) // 4), pytest.raises(DamagedCheckpointError, match=r"bytes"):
        read(place, key)
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_larger_than_committed_is_damage_in_a_folder(tmp_path: Path, name: str) -> None:
    is_damage(Location.of(tmp_path / "c"), name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_larger_than_committed_is_damage_in_a_store(name: str) -> None:
    is_damage(Location.of(f"memory://{uuid.uuid4().hex}/c"), name)


def test_a_wrong_size_in_the_commit_is_ignored(top: str) -> None:
    """Such a file has no size in the commit."""
    for number, size in enumerate([-1, -2, 2**62, 2**63, 2**70, 1.5, True, None, "x", []]):
        place = Location.of(f"{top}/{number}")
        shardstore.save(state(), place.place)
        change_commit(place, file_bytes=dict.fromkeys(FILES, size))
        load(place, "w")
        read_manifest(place, "w")


@pytest.mark.parametrize(
    "name", [*FILES[:2], *(pytest.param(name, marks=pytest.mark.long) for name in FILES[2:])]
)
def test_a_file_larger_than_committed_is_damage_on_s3(
    s3_server: S3Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load takes only the bytes that belong to the object; a verification finds the others."""
    place = Location.of(f"s3://{s3_server.new_bucket()}/c", s3_server.storage_options)
    key, _ = enlarged(place, name)
    with bounded(len(MORE) // 4):
        load(place, key)
    for variable, value in s3_server.environment.items():
        monkeypatch.setenv(variable, value)
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
def test_the_commit_has_the_size_of_each_compressed_chunk(top: str, compression: str) -> None:
    """Also of chunks that a base had, and until the array is removed."""

    def check(place: Location) -> None:
        sizes = {}
        for array in StoredCheckpoint(place).arrays.values():
            for number in range(array.grid.size):
                name = array.chunk_name(array.grid.index_at(number))
                sizes[name] = array.expected_size(number)
        assert len(sizes) >= 6
        assert sizes == {name: len(place.read(name)) for name in sizes}

    base, place = Location.of(f"{top}/base"), Location.of(f"{top}/c")
    w, v = torch.randn(40, 20), torch.arange(200.0).reshape(20, 10)
    small = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=512)
    shardstore.save(shardstore.shard({"w": w, "v": v}), base.place, small, compression=compression)
    w[9, 3] += 1
    reused = {"base": base.place, "compression": compression}
    shardstore.save(shardstore.shard({"w": w, "v": v}), place.place, small, **reused)
    check(base)
    check(place)
    StoredCheckpoint(place).remove("v")
    check(place)
    assert "v" not in StoredCheckpoint(place).root.chunk_bytes  # type: ignore[union-attr]
    shardstore.save(shardstore.shard({"w": w}), place.place, overwrite=True)
    (array,) = StoredCheckpoint(place).arrays.values()
    assert array.sizes is None


@pytest.mark.parametrize("more", [-1, 1])
def test_a_chunk_of_another_size_than_in_the_commit(top: str, more: int) -> None:
    """It is intact, and is not what was committed: loads and verifications agree."""
    place = Location.of(f"{top}/c")
    shardstore.save(state("packed"), place.place, compression="zstd")
    size = struct.pack("<I", len(place.read("packed/c.0")) + more)
    change_commit(place, chunk_bytes={"packed": base64.b64encode(size).decode()})
    with pytest.raises(DamagedCheckpointError, match=r"packed.* bytes, not"):
        load(place, "packed")
    assert run(["verify", str(place)]) == 1


def test_a_size_of_a_chunk_that_no_chunk_has() -> None:
    """A root that says 4 GiB does not raise the limit of a read."""
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    enlarged(place, "packed/c.0")
    change_commit(place, chunk_bytes={"packed": base64.b64encode(b"\xff" * 4).decode()})
    with bounded(len(MORE) // 4), pytest.raises(DamagedCheckpointError, match="packed"):
        load(place, "packed")
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
def test_chunks_that_compress_to_less_than_a_part_of_a_request(
    s3_server: S3Server, compression: str
) -> None:
    """Large objects of S3 are read in parts; the parts are those of the compressed chunk."""
    place = Location.of(f"s3://{s3_server.new_bucket()}/c", s3_server.storage_options)
    data = torch.arange(8 << 20, dtype=torch.float32) % 7
    stored = ShardedTensor.from_rank_offsets("w", data)
    shardstore.save({"w": stored}, place.place, compression=compression)
    for part in (0, 1):
        wanted = torch.empty(4 << 20)
        half = ShardedTensor.from_rank_offsets("w", wanted, (0, part, 2))
        found = shardstore.load({"w": half}, place.place, validate_access_integrity=False)["w"]
        assert torch.equal(found, data.chunk(2)[part])


def test_sizes_that_cannot_be_decoded(top: str) -> None:
    """No text, or nested without end: damage, and nothing bare."""
    place = Location.of(f"{top}/c")
    shardstore.save(state(), place.place)
    root = place.read("zarr.json")
    start = root.index(b'"file_bytes"')
    end = root.index(b"}", start)
    flipped = [root[:i] + bytes([root[i] ^ 0x80]) + root[i + 1 :] for i in range(start, end)]
    nested = root[:start] + b'"file_bytes":{"x":' + b"[" * 100_000 + root[start:]
    for text in (*flipped, nested):
        place.write("zarr.json", text)
        with pytest.raises(CheckpointingException):
            load(place, "w")
        with pytest.raises(CheckpointingException):
            shardstore.load_plain_tensors(place.place)


@pytest.mark.parametrize("value", [5, "x", [], None, {"w": 5, "packed": "AA=="}])
@pytest.mark.parametrize("member", ["chunk_bytes", "chunk_crc32c", "file_bytes", "file_crc32c"])
def test_sums_and_sizes_that_are_none(tmp_path: Path, member: str, value: object) -> None:
    """They are ignored or damage, for loads and removals, and nothing bare."""
    place = Location.of(tmp_path / "c")
    shardstore.save({**state(), **state("packed")}, place.place, compression="zstd")
    change_commit(place, **{member: value})
    with suppress(CheckpointingException):
        load(place, "packed")
    with suppress(CheckpointingException):
        StoredCheckpoint(place).remove("w")
    assert run(["verify", str(place)]) in (0, 1)
