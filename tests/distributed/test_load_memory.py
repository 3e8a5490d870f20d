"""What a load takes beside the tensors that it fills: no second copy of the state, and no more for
chunks under way than its budget. The kernel's own peak of a fresh process, in bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore.loading import plan as read_plan
from shardstore.mapping import ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.memory import peak_rss_bytes, reset_peak
from tests.helpers.ranks_helper import run_ranks

MIB = 2**20
WORLD = 2
CHUNK = MIB
BUDGET = 8 * MIB
SLACK = 12 * MIB
"""For what does not grow with the state: threads, files mapped one at a time, connections."""
TENSORS, SHAPE = 4, (2048, 2048)
STATE = TENSORS * math.prod(SHAPE) * 4
assert STATE == 64 * MIB


def shards(rank: int, kind: str, dtype: torch.dtype = torch.float32) -> dict[str, ShardedTensor]:
    """This rank's part of the state, all of its memory touched."""
    rows, columns = SHAPE
    state = {}
    for key in map(str, range(TENSORS)):
        if kind == "rows":
            data = torch.ones(rows // WORLD, columns, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, (0, rank, WORLD))
        elif kind == "columns":
            data = torch.ones(rows, columns // WORLD, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, (1, rank, WORLD))
        elif kind == "flat":
            size = rows * columns // WORLD
            bounds = slice(rank * size, (rank + 1) * size)
            data = torch.ones(size, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets_flat(
                key, data, SHAPE, flattened_range=bounds
            )
        else:
            data = torch.ones(SHAPE, dtype=dtype)
            state[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
    return state


def peaks(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """Growth of this rank's peak over each kind of load."""
    place = Path(folder, "c")
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK)
    shardstore.save(shards(rank, "rows"), place, strategy, durable=False)
    shared: dict[str, Any] = {"replica_group": dist.group.WORLD, "share_replicas": "always"}
    cases: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
        "as saved": ("rows", torch.float32, {}),
        "resharded": ("columns", torch.float32, {}),
        "flattened ranges": ("flat", torch.float32, {}),
        "replicas in rounds": ("whole", torch.float32, shared),
        "cast": ("rows", torch.bfloat16, {"cast": True}),
        "cast, resharded": ("columns", torch.bfloat16, {"cast": True}),
        "cast, flattened ranges": ("flat", torch.float64, {"cast": True}),
        "cast, replicas in rounds": ("whole", torch.bfloat16, {"cast": True, **shared}),
    }
    small = {"0": ShardedTensor.from_rank_offsets("0", torch.ones(SHAPE), replica_id=rank)}
    as_on_a_device = ("through the host", "through the host, flattened ranges")
    cases[as_on_a_device[0]] = ("columns", torch.float32, {})
    cases[as_on_a_device[1]] = ("flat", torch.float32, {})
    # Once before, so that what is imported and started with the first load does not count.
    shardstore.load(small, place, exchange_budget_bytes=BUDGET, **shared)
    found = {}
    for name, (kind, dtype, options) in cases.items():
        state = shards(rank, kind, dtype)
        # There is no device: host memory is filled as if it were one's.
        read_plan.goes_through_host = lambda _, far=name in as_on_a_device: far
        before = reset_peak()
        shardstore.load(state, place, exchange_budget_bytes=BUDGET, **options)
        found[name] = peak_rss_bytes() - before
        del state
    return found


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("memory")
    found: list[dict[str, int]] = run_ranks(peaks, WORLD, str(folder))
    return {name: max(of_rank[name] for of_rank in found) for name in found[0]}


@pytest.mark.parametrize("case", ["as saved", "resharded", "flattened ranges"])
def test_a_load_takes_no_second_copy(grown: dict[str, int], case: str) -> None:
    """A rank's own part of the state would be another 32 MiB."""
    assert grown[case] <= SLACK, f"{grown[case] / MIB:.1f} MiB"


BUFFERED = (
    "through the host",
    "through the host, flattened ranges",
    "cast",
    "cast, resharded",
    "cast, flattened ranges",
    "cast, replicas in rounds",
)


@pytest.mark.parametrize("case", ["replicas in rounds", *BUFFERED])
def test_chunks_under_way_keep_to_the_budget(grown: dict[str, int], case: str) -> None:
    assert grown[case] <= BUDGET + SLACK, f"{grown[case] / MIB:.1f} MiB"
