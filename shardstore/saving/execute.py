"""Execute a plan on one rank: write documents and chunks, exchange pieces of chunks, and copy the
state.

A synchronous save writes the state itself. An asynchronous save writes a copy in the background.
The background writes communicate with no rank: pieces are exchanged in the caller's thread, and the
manifest is sent after the writes. All ranks exchange pieces in the same order, even after an error
on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardstore.distributed.coordinator import Ranks
from shardstore.saving.plan import CutChunk, WritePlan, fetched
from shardstore.saving.session import SaveSession
from shardstore.saving.staging import Staging, Take
from shardstore.storage.format import dtypes
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.runtime.parallel import in_rounds
from shardstore.strategies.async_utils import AsyncRequest

ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of a round of shared chunks; a larger chunk is a round by itself."""


def write_chunks(session: SaveSession, plan: WritePlan) -> None:
    """Create the arrays, write this rank's chunks, and merge and write shared chunks.

    Every rank calls it. Ranks that share chunks wait for each other's pieces, before they write
    other chunks, which may take longer on some ranks.
    """
    if plan.cut:
        _exchange(session, plan.cut, session.write, ROUND_BYTES)
    # The largest first, so that threads end at about the same time.
    session.write(sorted(plan.writes, key=lambda write: -write.array.chunk_bytes))


def stage_chunks(session: SaveSession, plan: WritePlan) -> AsyncRequest:
    """Copy the chunks that this rank writes, and return a request that writes the copy.

    Every rank calls it. Pieces of shared chunks are exchanged in this call. Chunks for which the
    budget has no room are written in this call too.
    """
    options = session.options
    budget, brought = options.staging_budget_bytes, list[ChunkWrite]()
    size = sum(array.chunk_bytes for array in plan.written(session.ranks.rank))
    take = brought.extend if budget is None or size <= budget else session.write
    _exchange(session, plan.cut, take, min(ROUND_BYTES, budget or ROUND_BYTES))
    with session.timed("stage"):
        staging = session.staging = Staging(
            plan.writes,
            session.write,
            overlap=options.overlap_staging,
            budget_bytes=budget,
            threads=options.threads,
        )
    plan.writes.clear()

    def write() -> None:
        try:
            session.write([*brought, *staging.copies()])
        finally:
            staging.close()

    return AsyncRequest(write, (), [])


def _exchange(session: SaveSession, cut: Sequence[CutChunk], take: Take, most_bytes: int) -> None:
    """Connect with the ranks that share chunks with this one, and merge the shared chunks that it
    owns, round by round.

    The rounds may differ between ranks, because all ranks exchange chunks in the same order. After
    an error of this rank, or if a rank is lost, the pieces of later rounds are still sent, because
    other ranks wait for them. The first error is raised at the end.

    Args:
        session: the save.
        cut: the chunks that this rank shares.
        take: called with the merged chunks of each round.
        most_bytes: size of a round.
    """
    rank = session.ranks.rank
    holders = {piece.rank for chunk in cut if chunk.owner == rank for piece in chunk.pieces}
    session.ranks.connect(({chunk.owner for chunk in cut} | holders) - {rank})
    error: Exception | None = None
    for batch in in_rounds(cut, lambda chunk: chunk.array.chunk_bytes, most_bytes):
        try:
            with session.timed("exchange"):
                writes = _put_together(session.ranks, batch)
            if writes and error is None:
                take(writes)
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error


def _put_together(ranks: Ranks, chunks: Sequence[CutChunk]) -> list[ChunkWrite]:
    """Send pieces to the owners of their chunks, and receive those of the chunks that this rank
    owns.

    All ranks use the same global order of chunks, so that no two wait for each other.

    Raises:
        RanksError: a rank is lost.
        Exception: the first error of this rank's sources, at the end. Zeros are sent instead of
            their data, because the owner waits for it; it learns of the error before the commit.
    """
    failed: list[Exception] = []

    def own(chunk: CutChunk, start: int, size: int) -> NDArray[np.uint8]:
        try:
            data = as_bytes(np.ascontiguousarray(fetched(chunk.local[start])))
            if data.size == size:
                return data
            raise ValueError(
                f"key {chunk.array.key!r}, chunk {chunk.index}: a piece has {data.size} bytes, but "
                f"{size} were announced"
            )
        except Exception as problem:
            failed.append(problem)
            return np.zeros(size, np.uint8)

    sends: list[tuple[int, NDArray[np.uint8]]] = []
    receives: list[tuple[int, NDArray[np.uint8]]] = []
    writes: list[ChunkWrite] = []
    for chunk in chunks:
        dtype, is_own = dtypes.numpy_dtype(chunk.array.dtype), chunk.owner == ranks.rank
        merged = np.empty(math.prod(chunk.shape) if is_own else 0, dtype)
        if is_own:
            writes.append(ChunkWrite(chunk.array, chunk.index, merged.reshape(chunk.shape)))
        for start, stop, rank in chunk.pieces:
            place = merged[start:stop].view(np.uint8)
            if rank == ranks.rank and is_own:
                place[:] = own(chunk, start, place.size)
            elif rank == ranks.rank:
                sends.append((chunk.owner, own(chunk, start, (stop - start) * dtype.itemsize)))
            elif is_own:
                receives.append((rank, place))
    if sends or receives:
        ranks.exchange(sends, receives)
    if failed:
        raise failed[0]
    return writes
