"""Small chunks of many ranks in few packs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardstore
from shardstore.dcp import StorageWriter
from shardstore.distributed.coordinator import block_size
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedTensor
from shardstore.storage.commit.packing import most_bytes
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.folder import LocalFolder

WORLD = 4
ARRAYS = 30
WHOLE = torch.arange(64 * 8, dtype=torch.float32).reshape(64, 8)


def sharded(rank: int, parts: int = WORLD, *, empty: bool = False) -> dict[str, Any]:
    """Arrays cut into rows, of which each rank holds a part, and one whole on each rank."""
    fill = torch.zeros_like if empty else torch.clone
    cut = {
        f"w{i}": ShardedTensor.from_rank_offsets(
            f"w{i}", fill((WHOLE + i).chunk(parts)[rank]), (0, rank, parts)
        )
        for i in range(ARRAYS)
    }
    own = ShardedTensor.from_rank_offsets(f"own{rank}", fill(WHOLE[0] + rank))
    return {**cut, "own": own}


def check(rank: int, place: Path) -> None:
    found = shardstore.load(sharded(rank, empty=True), place)
    assert torch.equal(found["own"], WHOLE[0] + rank)
    for i in range(ARRAYS):
        assert torch.equal(found[f"w{i}"], (WHOLE + i).chunk(WORLD)[rank])


def packs(place: Path) -> list[str]:
    return sorted(path.name for path in (place / ".packs").iterdir())


def small_chunks_of_all_ranks_are_in_one_pack(rank: int, folder: Path) -> None:
    place = folder / "c"
    shardstore.save(sharded(rank), place, pack=True)
    check(rank, place)
    opened = shardstore.open(place)
    assert packs(place) == ["0.0.zip"]
    assert all(meta.places is not None for meta in opened.metas.values())


def a_rank_with_much_writes_a_pack_of_its_own(rank: int, world_size: int, folder: Path) -> None:
    rows = most_bytes(SaveOptions()) // block_size(world_size) // 4 // 1024
    own = {
        str(i): ShardedTensor.from_rank_offsets(
            f"{rank}.{i}", torch.full((rows, 256), 10.0 * rank + i) + torch.arange(256)
        )
        for i in range(5 if rank else 1)
    }
    shardstore.save(own, folder / "c", pack=True)
    assert packs(folder / "c") == [f"{other}.0.zip" for other in range(world_size)]
    wanted = {key: part.data for key, part in own.items()}
    empty = {
        key: ShardedTensor.from_rank_offsets(f"{rank}.{key}", torch.zeros_like(data))
        for key, data in wanted.items()
    }
    for key, tensor in shardstore.load(empty, folder / "c").items():
        assert torch.equal(tensor, wanted[key])


def asynchronous_saves_pack_too(rank: int, folder: Path) -> None:
    state = sharded(rank)
    request = shardstore.async_save(state, folder / "c", pack=True, staging_budget_bytes=4096)
    for value in state.values():
        value.data.zero_()
    request.wait()
    check(rank, folder / "c")


def flattened_and_uneven_parts_are_packed(rank: int, world_size: int, folder: Path) -> None:
    flat = WHOLE.flatten()
    bounds = [0, 7, 8, 300, 512]
    part = slice(bounds[rank], bounds[rank + 1])

    def state(*, empty: bool) -> dict[str, Any]:
        data = torch.zeros(bounds[rank + 1] - bounds[rank]) if empty else flat[part].clone()
        mesh = init_device_mesh("cpu", (world_size,))
        whole = torch.zeros(13, 3) if empty else torch.arange(39.0).reshape(13, 3)
        return {
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat", data, (64, 8), flattened_range=part
            ),
            "uneven": distribute_tensor(whole, mesh, [Shard(0)]),
        }

    shardstore.save(state(empty=False), folder / "c", pack=True)
    found = shardstore.load(state(empty=True), folder / "c")
    assert torch.equal(found["flat"], flat[part])
    assert torch.equal(found["uneven"].full_tensor(), torch.arange(39.0).reshape(13, 3))
    assert packs(folder / "c")


def ranks_must_agree_about_packs(rank: int, folder: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"pack=True but rank|differently.*packed"):
        shardstore.save(sharded(rank), folder / "c", pack=rank == 1)
    assert not (folder / "c").exists()


def a_pack_that_cannot_be_written_fails_every_rank(rank: int, folder: Path) -> None:
    write = os.open

    def refusing(path: Any, *args: Any, **about: Any) -> int:
        if str(path).endswith(".zip"):
            raise OSError(28, "No space left on device", path)
        return write(path, *args, **about)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refusing)
        with pytest.raises(CheckpointingException, match="No space left"):
            shardstore.save(sharded(rank), folder / "c", pack=True)
    dist.barrier()
    assert LocalFolder(str(folder)).listing() == []


def a_constant_of_one_rank_has_no_chunk(rank: int, world_size: int, folder: Path) -> None:
    ones = torch.ones(8, 2)
    state = {
        "mine": ShardedTensor.from_rank_offsets(f"mine{rank}", torch.zeros(5)),
        "ours": ShardedTensor.from_rank_offsets("ours", ones, replica_id=rank),
        "cut": ShardedTensor.from_rank_offsets("cut", ones, (0, rank, world_size)),
    }
    shardstore.save(state, folder / "c", constants=True)
    chunks = {path.parent.name for path in (folder / "c").glob("*/c*")}
    assert chunks == {"cut"}
    found = shardstore.load(
        {"ours": ShardedTensor.from_rank_offsets("ours", torch.zeros(8, 2), replica_id=rank)},
        folder / "c",
    )
    assert torch.equal(found["ours"], ones)


def fewer_rows_than_ranks_of_a_constant(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"w": distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])}
    dcp.save(state, storage_writer=StorageWriter(folder / "c", pack=True))
    shardstore.save(state, folder / "d", pack=True)
    for place in (folder / "c", folder / "d"):
        assert shardstore.open(place)["w"][...].tolist() == [[1] * 4] * 2


def test_of_four_ranks(scenario: str, held: list[list[str]]) -> None:
    assert all(scenario in names for names in held)
