"""Flattened ranges saved in the background with little staging memory: the chunks that ranks share
are put together round by round within that memory, and an error keeps nobody waiting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.distributed.coordinator import DEADLINE_VARIABLE
from shardstore.errors import RanksError, SaveInProgressError
from shardstore.saving.session import SaveSession
from shardstore.saving.staging import POOL
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.memory import peak_rss_bytes, reset_peak
from tests.helpers.scenarios import remains_of_all

MIB = 2**20
WORLD = 2
TIMEOUT_S = 280
DEADLINE_S = 600
"""Longer than the test may take: whoever waits for it fails the test."""


def halves(rank: int, count: int, rows: int, columns: int) -> dict[str, ShardedTensor]:
    """Tensors of two ranks, with a chunk each that both share."""
    size = rows * columns
    cut = size // 2 + 17
    part = slice(0, cut) if rank == 0 else slice(cut, size)
    return {
        f"w{n}": ShardedTensor.from_rank_offsets_flat(
            f"w{n}",
            torch.arange(part.start, part.stop, dtype=torch.float32).add_(n),
            (rows, columns),
            flattened_range=part,
        )
        for n in range(count)
    }


TENSORS, SHAPE = 48, (2, 1024 * 1024)
BUDGET = 8 * MIB
SLACK = 24 * MIB
"""For threads, buffers of messages, documents. The shared chunks of one rank are 48 MiB."""


def shared_chunks_keep_to_the_staging_budget(rank: int, folder: Path) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=2 * MIB)
    options: dict[str, Any] = {"staging_budget_bytes": BUDGET, "durable": False}
    # Once before, so that what is imported and started with the first save does not count.
    shardstore.async_save(halves(rank, 1, *SHAPE), folder / "a", strategy, **options).result(60)
    POOL.clear()
    state = halves(rank, TENSORS, *SHAPE)
    before = reset_peak()
    shardstore.async_save(state, folder / "b", strategy, **options).result(60)
    grown = peak_rss_bytes() - before
    assert grown <= BUDGET + SLACK, f"{grown / MIB:.1f} MiB"


SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=4096)
SMALL_SHAPE = (64, 64)


def any_staging_budget_saves_every_piece(rank: int, folder: Path) -> None:
    whole = torch.arange(64.0 * 64).reshape(SMALL_SHAPE)
    for number, (budget, overlap) in enumerate(
        (budget, overlap)
        # The ranks need not have the same memory.
        for budget in (1, 4096, 9000 + 10_000 * rank, 50_000, 400_000)
        for overlap in (False, True)
    ):
        state = halves(rank, 20, *SMALL_SHAPE)
        handle = shardstore.async_save(
            state, folder / f"{number}", SMALL, staging_budget_bytes=budget, overlap_staging=overlap
        )
        assert handle.wait_staged(60)
        for tensor in state.values():
            tensor.data.fill_(-1)
        handle.result(60)
        loaded = shardstore.load_plain_tensors(folder / f"{number}")
        assert all(torch.equal(loaded[f"w{n}"], whole + n) for n in range(20))


class Fails(Exception):  # noqa: N818
    pass


class WritesOne:
    """A writer that fails after its first chunk, long before all are put together."""

    def __init__(self, session: SaveSession, stop: Callable[[SaveSession], None]) -> None:
        self._session = session
        self._stop = stop

    def write(self, writes: Sequence[ChunkWrite], done: Callable[..., None], _: object) -> None:
        record = ChunkRecord(0, 0, b"\0" * 16, [])
        writes[0].data()
        self._stop(self._session)
        done(writes[0], record)


def _disk_full(session: SaveSession) -> None:
    raise Fails("disk full")


def _no_mover(session: SaveSession) -> None:
    raise Fails("no store")


def an_error_of_the_writer_ends_the_save_and_is_told(
    rank: int, world_size: int, folder: Path
) -> None:
    os.environ[DEADLINE_VARIABLE] = str(DEADLINE_S)
    right, abort = SaveSession.mover, SaveSession.abort
    cases: tuple[tuple[str, Any, type[Exception], str], ...] = (
        ("writer", lambda session: WritesOne(session, _disk_full), Fails, "disk full"),
        ("abort", lambda session: WritesOne(session, abort), SaveInProgressError, "aborted"),
        ("mover", _no_mover, Fails, "no store"),
    )
    options: dict[str, Any] = {"staging_budget_bytes": 9000}
    for victim, (name, mover, kind, text) in product(range(world_size), cases):
        if rank == victim:
            SaveSession.mover = property(mover)  # type: ignore[assignment]
        place, state = folder / f"{victim}-{name}", halves(rank, 20, *SMALL_SHAPE)
        handle = shardstore.async_save(state, place, SMALL, **options)
        error = handle.exception(150)
        SaveSession.mover = right  # type: ignore[method-assign]
        expected = kind if rank == victim else (RanksError, SaveInProgressError)
        assert isinstance(error, expected), (name, victim, error)
        assert text in str(error), (name, victim)
        assert handle.wait_staged(0), (name, victim)
    state = halves(rank, 20, *SMALL_SHAPE)
    shardstore.async_save(state, folder / "good", SMALL, **options).result(60)
    assert remains_of_all(folder) == ["good"]


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
