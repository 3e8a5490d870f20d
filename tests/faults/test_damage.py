"""Flipped, cut, emptied or removed files: an error that says what, or exactly what was saved.

Chunks that are whole and in the wrong place: only the commit can tell.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import CheckpointManager
from shardstore.errors import (
    CheckpointingException,
    ChunkCorruptError,
    ChunkMissingError,
    DamagedCheckpointError,
)
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.layouts import raw_bytes

WHOLE = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
SMALL = torch.arange(5, dtype=torch.int16)
COMMON = {"step": 17, "args": {"lr": 0.25, "names": ["a", "b"]}}
OBJECT = {"rng": [1, 2, 3], "name": "state of the generator"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pristine") / "c"
    parts = [
        ShardedTensor.from_rank_offsets("layer.w", part.contiguous(), (1, i, 2))
        for i, part in enumerate(WHOLE.chunk(2, 1))
    ]
    state = {
        "w": parts,
        "s": ShardedTensor.from_rank_offsets("layer.s", SMALL),
        "o": ShardedObject("rng.o", OBJECT, (1,), (0,)),
        **COMMON,
    }
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=4096)
    shardstore.save(state, place, strategy, content_metadata={"kind": "test"})
    return place


KINDS = {
    "chunk": "layer.*/c*",
    "array document": "layer.*/zarr.json",
    "root document": "zarr.json",
    "manifest": "manifest.npz",
    "common": "common.pt",
    "config": "metadata.json",
    "object": "rng.o/*.pt",
}


def kinds(place: Path) -> dict[str, list[Path]]:
    """The files of a checkpoint, by what they are."""
    return {kind: sorted(place.glob(pattern)) for kind, pattern in KINDS.items()}


def test_every_file_is_of_a_known_kind(pristine: Path) -> None:
    found = kinds(pristine)
    assert all(found.values())
    every = {path for path in pristine.rglob("*") if path.is_file()}
    assert every == {path for paths in found.values() for path in paths}
    assert len(found["chunk"]) > 6
    check(pristine)


def check(place: Path) -> None:
    """Load everything, whole and in parts; whatever comes back is what was saved."""
    whole = torch.zeros(64, 96)
    state = {
        "w": ShardedTensor.from_rank_offsets("layer.w", whole),
        "s": ShardedTensor.from_rank_offsets("layer.s", torch.zeros_like(SMALL)),
        "o": ShardedObject("rng.o", None, (1,), (0,)),
    }
    loaded: Any = shardstore.load(state, place)
    assert raw_bytes(loaded.pop("w")) == raw_bytes(WHOLE)
    assert raw_bytes(loaded.pop("s")) == raw_bytes(SMALL)
    assert loaded.pop("o") == OBJECT
    assert loaded.pop("content_metadata") == {"kind": "test"}
    assert loaded == COMMON
    # A part of each chunk, which is verified in another way than whole ones.
    for a, b in ((5, 700), (3000, 3500), (6000, 6144)):
        part = ShardedTensor.from_rank_offsets_flat(
            "layer.w", torch.zeros(b - a), (64, 96), flattened_range=slice(a, b)
        )
        got: Any = shardstore.load({"w": part}, place, validate_access_integrity=False)
        assert raw_bytes(got["w"]) == raw_bytes(WHOLE.reshape(-1)[a:b])


def harmless_or_told(place: Path, damaged: Path) -> CheckpointingException | None:
    """The error that damage leads to; anything but the saved values, or another error, fails."""
    try:
        check(place)
    except CheckpointingException as error:
        text = str(error)
        if damaged.parent != place:
            assert damaged.parent.name in text, text
        elif damaged.name != "metadata.json":  # which may name a backend that is not known
            assert str(place) in text or "layer." in text or "data type" in text, text
        return error
    return None


Damage = Callable[[Path, random.Random], object]


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def overwrite(path: Path, rng: random.Random) -> None:
    """A stretch of noise, or of zeros."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    stop = min(len(data), start + rng.randint(1, 600))
    data[start:stop] = bytes(stop - start) if rng.random() < 0.5 else rng.randbytes(stop - start)
    path.write_bytes(data)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def lengthen(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 4, 100])))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def make_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[Damage, int] = {
    flip: 25,
    overwrite: 8,
    truncate: 6,
    empty: 1,
    lengthen: 3,
    remove: 1,
    make_folder: 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_or_does_no_harm(kind: str, pristine: Path, tmp_path: Path) -> None:
    place = tmp_path / "c"
    shutil.copytree(pristine, place)
    rng = random.Random(kind)
    told = 0
    for damage, times in DAMAGES.items():
        if kind == "config" and damage is make_folder:
            continue
        for _ in range(times):
            path = rng.choice(kinds(pristine)[kind])
            target = place / path.relative_to(pristine)
            before = path.read_bytes()
            damage(target, rng)
            error = harmless_or_told(place, target)
            changed = not target.is_file() or target.read_bytes() != before
            told += error is not None
            if kind == "chunk" and changed:
                kind_of_error = ChunkMissingError if damage is remove else ChunkCorruptError
                assert isinstance(error, kind_of_error)
                assert error.key == target.parent.name
                assert error.key in str(error)
                assert error.rank == 0
                assert "rank 0" in str(error)
                assert target.name in str(error)
            if target.is_dir():
                target.rmdir()
            target.write_bytes(before)
    check(place)
    if kind == "array document":
        # The root holds a copy of each.
        assert told == 0
    elif kind in ("root document", "common", "config", "object"):
        assert told


def test_chunks_are_verified_without_a_manifest(pristine: Path, tmp_path: Path) -> None:
    place = tmp_path / "c"
    shutil.copytree(pristine, place)
    (place / "manifest.npz").unlink()
    check(place)
    rng = random.Random(11)
    for path in kinds(place)["chunk"]:
        before = path.read_bytes()
        flip(path, rng)
        with pytest.raises(ChunkCorruptError, match=path.parent.name):
            check(place)
        path.write_bytes(before)


def test_old_layout_misses_no_chunk(tmp_path: Path) -> None:
    """It has no checksums, but a hole or a short file is not zeros."""
    place = tmp_path / "c"
    parts = [
        ShardedTensor.from_rank_offsets("w", part.contiguous(), (0, i, 4))
        for i, part in enumerate(WHOLE.chunk(4))
    ]
    shardstore.save({"w": parts}, place, ("zarr", 1))
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(64, 96))}
    for damage in (remove, truncate, empty):
        path = place / "w" / "2.0"
        before = path.read_bytes()
        damage(path, random.Random(1))
        with pytest.raises(CheckpointingException, match=r"'w'") as caught:
            shardstore.load(wanted, place)
        assert "2.0" in str(caught.value)
        path.write_bytes(before)
    loaded: Any = shardstore.load(wanted, place)
    assert torch.equal(loaded["w"], WHOLE)


def test_without_its_root_document_it_is_damaged_and_not_of_another_layout(
    pristine: Path, tmp_path: Path
) -> None:
    """As a deletion by other means may leave it, which was cut short. The step before is taken."""
    for step in (1, 2):
        shutil.copytree(pristine, tmp_path / f"step-{step}")
    (tmp_path / "step-2" / "zarr.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="root document, is missing"):
        shardstore.load_plain_tensors(tmp_path / "step-2")
    with CheckpointManager(tmp_path) as manager:
        state = {"s": ShardedTensor.from_rank_offsets("layer.s", torch.zeros_like(SMALL))}
        restored = manager.restore(state)
    assert restored.step == 1
    assert torch.equal(restored.state["s"], SMALL)


def exchange(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


@pytest.mark.parametrize("rows", [64, 64 * 1024], ids=["small", "large"])
def test_two_exchanged_chunks_of_one_array_are_damage(tmp_path: Path, rows: int) -> None:
    data = torch.arange(rows * 8, dtype=torch.int64).reshape(rows, 8)
    chunk_bytes = data.nbytes // 4
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=chunk_bytes)
    shardstore.save(shardstore.shard({"w": data}), tmp_path / "c", strategy)
    folder = tmp_path / "c" / "w"
    assert (folder / "c.3.0").exists()
    exchange(folder / "c.1.0", folder / "c.2.0")
    with pytest.raises(ChunkCorruptError, match="not the chunk that was committed") as caught:
        shardstore.load(shardstore.shard({"w": torch.empty_like(data)}), tmp_path / "c")
    assert caught.value.key == "w"
    assert caught.value.chunk in ((1, 0), (2, 0))
    # A part of a chunk, and what is not damaged.
    part = ShardedTensor.from_rank_offsets("w", torch.empty(rows // 8, 8, dtype=torch.int64))
    part.global_shape, part.global_offset = (rows, 8), (rows // 4 + rows // 16, 0)
    part.axis_fragmentations = None
    with pytest.raises(ChunkCorruptError):
        shardstore.load({"w": part}, tmp_path / "c", validate_access_integrity=False)
    part.global_offset = (0, 0)
    shardstore.load({"w": part}, tmp_path / "c", validate_access_integrity=False)
    assert torch.equal(part.data, data[: rows // 8])


def test_a_chunk_of_another_checkpoint(tmp_path: Path) -> None:
    """What a late writer of another attempt leaves: right in size and checksum, but older."""
    shardstore.save(shardstore.shard({"w": torch.zeros(16)}), tmp_path / "a")
    shardstore.save(shardstore.shard({"w": torch.ones(16)}), tmp_path / "b")
    shutil.copy(tmp_path / "a" / "w" / "c.0", tmp_path / "b" / "w" / "c.0")
    with pytest.raises(ChunkCorruptError, match="not the chunk that was committed"):
        shardstore.load(shardstore.shard({"w": torch.empty(16)}), tmp_path / "b")


def test_chunks_are_verified_after_other_arrays_were_removed(tmp_path: Path) -> None:
    place = tmp_path / "c"
    shardstore.save(shardstore.shard({key: torch.ones(4) for key in "abc"}), place)
    shardstore.remove_sharded_tensors(place, "b")
    out = torch.zeros(4)
    shardstore.load(shardstore.shard({"c": out}), place)
    assert out.tolist() == [1, 1, 1, 1]
    (place / "a" / "c.0").write_bytes((place / "a" / "c.0").read_bytes()[::-1])
    with pytest.raises(ChunkCorruptError):
        shardstore.load(shardstore.shard({"a": out}), place)
