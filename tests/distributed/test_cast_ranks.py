"""Loads that convert, on several ranks: under another layout, with replicas that read each chunk
once between them, and with an error on one rank that reaches all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedTensor
from shardstore.storage.runtime.counters import counters
from shardstore.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from shardstore.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.helpers.scenarios import gathered

WORLD = 3
CHUNK = 4096
WHOLE = torch.arange(48 * 256, dtype=torch.float32).reshape(48, 256) / 7
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)


def saved(place: Path, rank: int) -> Path:
    """Whole on rank 0, in chunks of four rows."""
    state = {
        "w": ShardedTensor.from_rank_offsets("w", WHOLE, replica_id=rank),
        "s": ShardedTensor.from_rank_offsets("s", torch.tensor(2.5), replica_id=rank),
    }
    shardstore.save(state, place, SMALL, durable=False)
    return place


def read_by_all(before: dict[str, int]) -> int:
    return sum(gathered(counters.copy()["bytes_read"] - before["bytes_read"]))


def rows_and_flat_ranges(rank: int, folder: Path) -> None:
    place = saved(folder / "c", rank)
    size = WHOLE.numel() // WORLD
    flat = torch.zeros(size, dtype=torch.float64)
    rows = torch.zeros(48 // WORLD, 256, dtype=torch.bfloat16)
    bounds = slice(rank * size, (rank + 1) * size)
    for wanted, data, want in (
        (
            ShardedTensor.from_rank_offsets("w", rows, (0, rank, WORLD)),
            rows,
            WHOLE.chunk(WORLD)[rank].bfloat16(),
        ),
        (
            ShardedTensor.from_rank_offsets_flat("w", flat, (48, 256), flattened_range=bounds),
            flat,
            WHOLE.reshape(-1)[bounds].double(),
        ),
    ):
        shared = {"replica_group": dist.group.WORLD, "share_replicas": "always"}
        for budget, options in ((256, {}), (1 << 28, {}), (256, shared), (3 * CHUNK, shared)):
            data.zero_()
            shardstore.load(
                {"w": wanted}, place, cast=True, exchange_budget_bytes=budget, **options
            )
            assert torch.equal(data, want)


def each_byte_is_read_once_by_replicas(rank: int, folder: Path) -> None:
    """Also where one of them wants another data type than the others, and a third none."""
    place = saved(folder / "c", rank)
    dtype = (torch.bfloat16, torch.float64, torch.float32)[rank]
    for budget, kind in ((1, dtype), (6 * CHUNK, dtype), (1 << 28, torch.float16)):
        data, scalar = torch.zeros(48, 256, dtype=kind), torch.zeros((), dtype=kind)
        state = {
            "w": ShardedTensor.from_rank_offsets("w", data, replica_id=rank),
            "s": ShardedTensor.from_rank_offsets("s", scalar, replica_id=rank),
        }
        before = counters.copy()
        shardstore.load(
            state,
            place,
            cast=True,
            # Ranks that describe a tensor in different ways are no partition of it.
            validate_access_integrity=False,
            replica_group=dist.group.WORLD,
            share_replicas="always",
            exchange_budget_bytes=budget,
        )
        assert torch.equal(data, WHOLE.to(kind))
        assert scalar == 2.5
        assert WHOLE.nbytes <= read_by_all(before) <= 1.02 * WHOLE.nbytes


def the_wrapper_casts_what_it_sends(rank: int, folder: Path) -> None:
    place = saved(folder / "c", rank)
    for algorithm in ("broadcast", "chunks"):
        strategy = FullyParallelLoadStrategyWrapper(
            ZarrLoadShardedStrategy(), exchange_algo=algorithm
        )
        data = torch.zeros(48, 256, dtype=torch.bfloat16)
        state = {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=rank)}
        before = counters.copy()
        shardstore.load(state, place, strategy, cast=True)
        assert torch.equal(data, WHOLE.bfloat16()), algorithm
        assert read_by_all(before) <= 1.02 * WHOLE.nbytes


def what_one_rank_may_not_have_fails_on_all(rank: int, folder: Path) -> None:
    place = saved(folder / "c", rank)
    for share in ("never", "always"):
        for kind, options, text in (
            (torch.int32, {"cast": True}, "float32 in .* but asked for as int32; .* loses"),
            (torch.float16, {"cast": rank != 1}, "asked for as float16; nothing is cast silently"),
            (torch.float16, {"cast": "yes" if rank == 1 else True}, "cast='yes' must be True"),
        ):
            data = torch.zeros(48, 256, dtype=kind if rank == 1 else torch.float16)
            state = {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=rank)}
            with pytest.raises(CheckpointingException, match=text):
                shardstore.load(
                    state,
                    place,
                    validate_access_integrity=False,
                    replica_group=dist.group.WORLD,
                    share_replicas=share,
                    **options,
                )


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
