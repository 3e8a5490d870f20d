"""Execute a plan on one rank: write documents and chunks, and exchange pieces of chunks.

A synchronous save writes the state itself. An asynchronous save writes a copy in the background.
The background writes communicate with no rank: pieces are exchanged in the caller's thread, and the
manifest is sent after the writes. All ranks exchange pieces in the same order, even after an error
on one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from shardstore.distributed.coordinator import Ranks
from shardstore.saving.session import Created, SaveSession
from shardstore.saving.sources import CutChunk, WritePlan, fetched
from shardstore.saving.staging import Staging
from shardstore.storage.format import dtypes
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.parallel import in_rounds
from shardstore.strategies.async_utils import AsyncRequest

ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of a round of shared chunks; a larger chunk is a round by itself."""


def write_chunks(session: SaveSession, plan: WritePlan, created: Created) -> None:
    """Create the arrays, write this rank's chunks, and merge and write shared chunks.

    Every rank calls it. Ranks that share chunks wait for each other's pieces, before they write
    other chunks, which may take longer on some ranks. A rank writes the documents of the arrays
    that it creates after its chunks, because other programs could open them.
    """
    _exchange(session, plan.cut, session.write)
    # The largest first, so that threads end at about the same time.
    session.write(sorted(plan.writes, key=lambda write: -write.array.chunk_bytes))
    session.write_documents(created)


def stage_chunks(session: SaveSession, plan: WritePlan, created: Created) -> AsyncRequest:
    """Copy the chunks that this rank writes, and return a request that writes the copy.

    Every rank calls it. Pieces of shared chunks are exchanged in this call. Chunks for which the
    budget has no room are written in this call too.
    """
    options = session.options
    budget, brought = options.staging_budget_bytes, list[ChunkWrite]()
    size = sum(array.chunk_bytes for array in plan.written(session.ranks.rank))
    if budget is None or size <= budget:
        _exchange(session, plan.cut, brought.extend)
    else:
        _exchange(session, plan.cut, session.write, most_bytes=min(ROUND_BYTES, budget))
    staging = Staging(plan.writes, budget_bytes=budget, threads=options.threads)
    plan.writes.clear()  # they refer to the caller's memory
    session.staging = staging
    with session.timed("stage"):
        staging.start(session.write, overlap=options.overlap_staging)

    def write() -> None:
        try:
            session.write([*brought, *staging.copies()])
            session.files.flush()
            session.write_documents(created)
        finally:
            staging.close()

    return AsyncRequest(write, (), [])


def _exchange(
    session: SaveSession,
    cut: Sequence[CutChunk],
    take: Callable[[Sequence[ChunkWrite]], None],
    most_bytes: int = ROUND_BYTES,
) -> None:
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
    holders = {other for chunk in cut if chunk.owner == rank for other, _, _ in chunk.pieces}
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
        dtype = dtypes.numpy_dtype(chunk.array.dtype)
        buffer: NDArray[np.uint8] | None = None
        if chunk.owner == ranks.rank:
            buffer = np.empty(math.prod(chunk.shape) * dtype.itemsize, np.uint8)
            data = buffer.view(dtype).reshape(chunk.shape)
            writes.append(ChunkWrite(chunk.array, chunk.index, data))
        for rank, start, stop in chunk.pieces:
            first, size = start * dtype.itemsize, (stop - start) * dtype.itemsize
            if buffer is None:
                if rank == ranks.rank:
                    sends.append((chunk.owner, own(chunk, start, size)))
            elif rank == ranks.rank:
                buffer[first : first + size] = own(chunk, start, size)
            else:
                receives.append((rank, buffer[first : first + size]))
    if sends or receives:
        ranks.exchange(sends, receives)
    if failed:
        raise failed[0]
    return writes
