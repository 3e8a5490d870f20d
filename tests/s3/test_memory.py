"""What a save to an object store, or a load, takes beside the state: its budget, however the
tensors lie in memory. The kernel's own peak of a fresh process, in bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import shardstore
from shardstore.mapping import ShardedTensor
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.memory import peak_rss_bytes, reset_peak
from testing.s3_servers import S3Server
from tests.helpers.ranks_helper import run_ranks

MIB = 2**20
DEFAULT_CHUNK = 32 * MIB
CHUNK = 4 * MIB
BUDGET = 40 * MIB
LIMIT = BUDGET + CHUNK + BUDGET // 20
"""TensorStore may free a chunk when the next one is taken already."""
TRIES = 3
"""One process of many was seen 2.6 MiB above the limit; the cause is not known."""
ROWS, COLUMNS = 4096, 4096
"""Of four bytes: 64 MiB."""


def laid_out(kind: str) -> torch.Tensor:
    """All of its memory touched, and nothing in it that compresses."""
    wide = COLUMNS + 256 * (kind == "sliced")
    data = torch.empty(ROWS, wide)
    data.view(torch.int32).random_()
    rows = data[: ROWS // 4] if kind == "short" else data
    return data.t() if kind == "transposed" else rows[:, :COLUMNS]


def grown(
    rank: int,
    world: int,
    url: str,
    options: dict[str, str],
    kind: str,
    compression: str | None,
    chunk: int = CHUNK,
    budget: int = BUDGET,
) -> int:
    """Growth of the peak over a save."""
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=chunk, budget_bytes=budget)

    def save(tensor: torch.Tensor, name: str) -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", tensor)}
        how = {"compression": compression, "storage_options": options}
        shardstore.save(state, f"{url}/{name}", strategy, **how)  # type: ignore[arg-type]

    # Once before, so that what is imported and started with the first save does not count.
    save(torch.ones(8), "first")
    tensor = laid_out(kind)
    before = reset_peak()
    save(tensor, "second")
    return peak_rss_bytes() - before


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced"])
def test_chunks_under_way_keep_to_the_budget(
    s3_server: S3Server, kind: str, compression: str | None
) -> None:
    keeps_to(LIMIT, s3_server, grown, kind, compression)


def keeps_to(limit: int, s3_server: S3Server, work: Callable[..., int], *arguments: object) -> None:
    """One of some processes takes at most ``limit``."""
    url, options = f"s3://{s3_server.new_bucket()}", s3_server.storage_options
    for number in range(TRIES):
        (size,) = run_ranks(work, 1, f"{url}/{number}", options, *arguments)
        if size <= limit:
            break
    assert size <= limit, f"{size / MIB:.1f} MiB of at most {limit / MIB:.1f}"


def test_small_chunks_keep_to_a_small_budget(s3_server: S3Server) -> None:
    """Connections take more memory than the chunks."""
    url, options, budget = f"s3://{s3_server.new_bucket()}", s3_server.storage_options, 8 * MIB
    (size,) = run_ranks(grown, 1, url, options, "short", None, 16 * 1024, budget)
    assert size <= budget + MIB, f"{size / MIB:.1f} MiB of {budget / MIB:.1f}"


def packed(rank: int, world: int, url: str, options: dict[str, str]) -> int:
    """Growth of the peak over a save of 64 MiB in packs."""
    strategy = ZarrSaveShardedStrategy("zarr", 2, budget_bytes=BUDGET)

    def save(state: dict[str, ShardedTensor], name: str) -> None:
        shardstore.save(state, f"{url}/{name}", strategy, pack=True, storage_options=options)

    tensors = {f"w{i}": torch.rand(32, 1024) for i in range(512)}
    state = {key: ShardedTensor.from_rank_offsets(key, one) for key, one in tensors.items()}
    save({key: state[key] for key in ("w0", "w1")}, "first")
    before = reset_peak()
    save(state, "second")
    return peak_rss_bytes() - before


def test_packs_keep_to_the_budget(s3_server: S3Server) -> None:
    keeps_to(BUDGET, s3_server, packed)


def moved(rank: int, world: int, url: str, options: dict[str, str], how: str) -> int:
    """Growth of the peak over the first save, or load, of 16 tensors of one chunk each."""
    fill = torch.rand if how == "save" else torch.ones
    tensors = {f"w{i}": fill(DEFAULT_CHUNK // 4096, 1024) for i in range(16)}

    def move(state: dict[str, torch.Tensor], name: str) -> None:
        shards = {key: ShardedTensor.from_rank_offsets(key, one) for key, one in state.items()}
        if how == "save":
            shardstore.save(shards, f"{url}/{name}", storage_options=options)
        else:
            shardstore.load(shards, f"{url}/{name}", storage_options=options)

    move({"small": torch.ones(8)}, "first")
    before = reset_peak()
    move(tensors, "second")
    return peak_rss_bytes() - before


def test_chunks_of_the_default_size_keep_to_the_default_budget(s3_server: S3Server) -> None:
    """Whole and in processes of their own: the allocator keeps what one of them took."""
    url, options = f"s3://{s3_server.new_bucket()}", s3_server.storage_options
    for how in ("save", "load"):
        (size,) = run_ranks(moved, 1, url, options, how)
        text = f"{how}: {size / MIB:.1f} MiB of {DEFAULT_BUDGET_BYTES / MIB:.1f}"
        assert 64 * MIB < size <= DEFAULT_BUDGET_BYTES, text
