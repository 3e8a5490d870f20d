"""A file that is larger than the commit says: refused before its bytes are taken into memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from scripts.s3_servers import S3Server
from shardstore import ShardedObject, ShardedTensor
from shardstore.cli.app import run
from shardstore.errors import CheckpointingException, DamagedCheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.hostile.test_bombs import bounded

MORE = bytes(256 * 1024**2)
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


def enlarged(place: Location, name: str) -> tuple[str, Callable[[Location, str], None]]:
    """Save, and enlarge a file; its key and what reads it."""
    key = "packed" if name.startswith("packed") else "w"
    packed = "zstd" if key == "packed" else None
    shardstore.save(state(key), place.place, compression=packed)
    place.write(name, place.read(name) + MORE)
    return key, read_manifest if name == "manifest.npz" else load


@pytest.mark.parametrize("name", FILES)
def test_in_a_folder(tmp_path: Path, name: str) -> None:
    place = Location.of(tmp_path / "c")
    key, read = enlarged(place, name)
    with bounded(len(MORE) // 4), pytest.raises(DamagedCheckpointError, match=r"bytes"):
        read(place, key)
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("name", FILES)
def test_in_a_store(name: str) -> None:
    place = Location.of(f"memory://{uuid.uuid4().hex}/c")
    key, read = enlarged(place, name)
    with bounded(len(MORE) // 4), pytest.raises(DamagedCheckpointError, match=r"bytes"):
        read(place, key)
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("size", [-1, -2, 2**62, 2**63, 2**70, 1.5, True, None, "x", []])
@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_size_that_is_none(tmp_path: Path, store: str, size: object) -> None:
    """Such a file has no size in the commit."""
    folder = tmp_path / "c" if store == "local" else f"memory://{uuid.uuid4().hex}/c"
    place = Location.of(folder)
    shardstore.save(state(), place.place)
    document = json.loads(place.read("zarr.json"))
    about = document["attributes"]["shardstore"]
    del about["root_crc32c"]
    about["file_bytes"] = dict.fromkeys(FILES, size)
    place.write("zarr.json", json.dumps(document, separators=(",", ":")).encode())
    load(place, "w")
    read_manifest(place, "w")


@pytest.mark.parametrize("name", FILES)
def test_on_s3(s3_server: S3Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load takes only the bytes that belong to the object, or the first of ``common.pt``; a
    verification finds the others."""
    place = Location.of(f"s3://{s3_server.new_bucket()}/c", **s3_server.storage_options)
    key, _ = enlarged(place, name)
    refused = pytest.raises(DamagedCheckpointError) if name == "common.pt" else nullcontext()
    with bounded(len(MORE) // 4), refused:
        load(place, key)
    for variable, value in s3_server.environment.items():
        monkeypatch.setenv(variable, value)
    with bounded(len(MORE) // 4):
        assert run(["verify", str(place)]) == 1


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
@pytest.mark.parametrize("store", ["local", "memory"])
def test_the_commit_has_the_size_of_each_compressed_chunk(
    tmp_path: Path, store: str, compression: str
) -> None:
    """Also of chunks that a base had, and until the array is removed."""

    def state(**arrays: torch.Tensor) -> dict[str, Any]:
        return {key: ShardedTensor.from_rank_offsets(key, data) for key, data in arrays.items()}

    def check(place: Location) -> None:
        sizes = {}
        for array in StoredCheckpoint(place).arrays.values():
            for number in range(array.grid.size):
                name = array.chunk_name(array.grid.index_at(number))
                sizes[name] = array.expected_size(number)
        assert len(sizes) >= 6
        assert sizes == {name: place.size(name) for name in sizes}

    top = tmp_path.as_posix() if store == "local" else f"memory://{uuid.uuid4().hex}"
    base, place = Location.of(f"{top}/base"), Location.of(f"{top}/c")
    w, v = torch.randn(40, 20), torch.arange(200.0).reshape(20, 10)
    small = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=512)
    shardstore.save(state(w=w, v=v), base.place, small, compression=compression)
    w[9, 3] += 1
    reused = {"base": base.place, "compression": compression}
    shardstore.save(state(w=w, v=v), place.place, small, **reused)
    check(base)
    check(place)
    StoredCheckpoint(place).remove("v")
    check(place)
    assert "v" not in StoredCheckpoint(place).root.chunk_bytes  # type: ignore[union-attr]
    shardstore.save(state(w=w), place.place, overwrite=True)
    (array,) = StoredCheckpoint(place).arrays.values()
    assert array.sizes is None


@pytest.mark.parametrize("value", [5, "x", [], None, {"w": 5, "packed": "AA=="}])
@pytest.mark.parametrize("member", ["chunk_bytes", "chunk_crc32c", "file_bytes", "file_crc32c"])
def test_sums_and_sizes_that_are_none(tmp_path: Path, member: str, value: object) -> None:
    """They are ignored or damage, for loads and removals, and nothing bare."""
    place = Location.of(tmp_path / "c")
    shardstore.save({**state(), **state("packed")}, place.place, compression="zstd")
    document = json.loads(place.read("zarr.json"))
    about = document["attributes"]["shardstore"]
    del about["root_crc32c"]
    about[member] = value
    place.write("zarr.json", json.dumps(document, separators=(",", ":")).encode())
    with suppress(CheckpointingException):
        load(place, "packed")
    with suppress(CheckpointingException):
        StoredCheckpoint(place).remove("w")
    assert run(["verify", str(place)]) in (0, 1)
