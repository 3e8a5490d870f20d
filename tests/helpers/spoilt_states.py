"""A state of ranks that is spoilt when its save has begun, and whether it was saved as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardstore
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.serialization import load_sharded_metadata

WHOLE = torch.arange(3 * 64 * 40, dtype=torch.float32).reshape(3 * 64, 40)


def state_of(rank: int, world_size: int) -> tuple[dict[str, Any], list[Any]]:
    """Rows, a flattened tensor whose chunks ranks share, a replica, an object, common values; and
    what of it can be spoilt."""
    rows = WHOLE.chunk(world_size)[rank].clone()
    bounds = [*[0, 1001, 5003][:world_size], WHOLE.numel()]
    mine = slice(bounds[rank], bounds[rank + 1])
    flat = WHOLE.reshape(-1)[mine].clone()
    same = WHOLE.bfloat16().t().clone()
    about = {"rank": rank, "values": torch.full((3,), float(rank))}
    state = {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world_size)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat, tuple(WHOLE.shape), flattened_range=mine
        ),
        "same": ShardedTensor.from_rank_offsets("same", same, replica_id=rank),
        "object": ShardedObject("object", about, (world_size,), (rank,)),
        "step": 7,
    }
    return state, [rows, flat, same, about]


def save_later(place: Path, *strategy: Any, **options: Any) -> shardstore.AsyncSave:
    """Save this rank's part asynchronously."""
    state, _ = state_of(dist.get_rank(), dist.get_world_size())
    return shardstore.async_save(state, place, *strategy, **options)


def spoil(held: list[Any]) -> None:
    *tensors, about = held
    for tensor in (*tensors, about["values"]):
        tensor.fill_(-1)
    about["rank"] = "spoilt"


def check(folder: Path) -> None:
    """Every rank calls it."""
    loaded = shardstore.load_plain_tensors(folder)
    assert torch.equal(loaded["rows"], WHOLE)
    assert torch.equal(loaded["flat"], WHOLE)
    assert torch.equal(loaded["same"], WHOLE.bfloat16().t())
    assert loaded["step"] == 7
    stored = load_sharded_metadata(folder)
    objects = {str(n): one for n, one in enumerate(stored.values()) if one.key == "object"}
    assert objects
    found = shardstore.load(objects, folder, validate_access_integrity=False)
    assert isinstance(found, dict)
    for name, one in objects.items():
        (rank,) = one.global_offset
        assert found[name]["rank"] == rank
        assert found[name]["values"].tolist() == [rank] * 3
