"""A plan carried out on one rank: arrays created, chunks written, pieces of chunks exchanged.

Answers for the order of these steps, at once or staged for the background, and for meeting other
ranks in one order whatever fails here. What is planned is :mod:`.write_plan`'s business, how bytes
move :mod:`shardstore.storage`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import RanksError
from shardstore.ranks import Ranks
from shardstore.storage import arrays, dtypes
from shardstore.storage.chunks import ChunkWrite, as_bytes
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.options import SaveOptions
from shardstore.storage.reuse import Writer
from shardstore.storage.writeback import WRITEBACK_FROM
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.background import BackgroundWrite
from shardstore.strategies.planned_writes import CutChunk, WritePlan
from shardstore.strategies.session import SaveSession
from shardstore.strategies.staging import Staging

__all__ = ["ROUND_BYTES", "stage"]

ROUND_BYTES = 16 * 1024 * 1024
"""Cut chunks are put together in rounds of about this many bytes."""


def stage(
    session: SaveSession,
    options: SaveOptions,
    plan: WritePlan,
    created: Sequence[tuple[ArrayMeta, str]],
) -> AsyncRequest:
    """Exchange pieces of shared chunks, copy the rest; what is left needs no other rank."""
    owned = [write for writes in _exchanged(session, plan.cut) for write in writes]
    budget = session.options.staging_budget_bytes or options.staging_budget_bytes
    staging = Staging(plan.writes, budget_bytes=budget, threads=options.threads)
    plan.writes.clear()  # their memory is the caller's
    session.staging = staging
    mover = session.mover(options)
    background = BackgroundWrite(session, mover, created, staging, owned, options.threads)
    if not staging.all_at_once:
        background.start()
    if session.options.overlap_staging:
        threading.Thread(target=staging.run, name="shardstore-stage", daemon=True).start()
    else:
        with session.timed("stage"):
            staging.run()
            staging.wait(host=True)
    return AsyncRequest(background, (), [])


def _carry_out(
    session: SaveSession,
    options: SaveOptions,
    plan: WritePlan,
    created: Sequence[tuple[ArrayMeta, str]],
) -> None:
    """Create the arrays, write, and put cut chunks together.

    An error of this rank's disk waits until all pieces are exchanged.
    """
    location = session.attempt.location
    mover: Writer | None = None
    failed: list[Exception] = []

    def attempt(step: Callable[[], None]) -> None:
        if not failed:
            try:
                with session.timed("write"):
                    step()
            except Exception as problem:
                failed.append(problem)

    def write(chunks: Sequence[ChunkWrite]) -> None:
        nonlocal mover
        mover = mover or session.mover(options)
        mover.write(chunks, session.written)

    # Who waits for the disk gives it something to do before the many small files are made. Who does
    # not makes them before it has begun: a file system at work on its own holds up who makes files.
    large, small = _by_size(plan.writes)
    if session.attempt.defers_documents:
        # Of requests the small ones go while the last large ones are under way.
        large, small = [], large + small
    if session.options.durable:
        attempt(lambda: write(large))
    if not session.manifest.array_documents:
        attempt(lambda: arrays.create_folders(location, [meta for meta, _ in created]))
    elif session.attempt.defers_documents:
        session.deferred += [
            (f"{meta.node}/{meta.document_name}", text.encode()) for meta, text in created
        ]
    else:
        attempt(lambda: arrays.create_arrays(location, created, threads=options.threads))
    attempt(lambda: write(small))
    if not session.options.durable:
        attempt(lambda: write(large))
    try:
        for owned in _exchanged(session, plan.cut):
            attempt(lambda owned=owned: write(owned))  # type: ignore[misc]
    except Exception as problem:
        failed.append(problem)
    if failed:
        raise failed[0]


def _by_size(writes: Sequence[ChunkWrite]) -> tuple[list[ChunkWrite], list[ChunkWrite]]:
    """Large chunks, the largest first, and small ones: threads then end at about the same time."""
    large: list[ChunkWrite] = []
    small: list[ChunkWrite] = []
    for write in writes:
        (large if write.array.chunk_bytes >= WRITEBACK_FROM else small).append(write)
    large.sort(key=lambda write: -write.array.chunk_bytes)
    return large, small


def _rounds(chunks: Sequence[CutChunk]) -> Iterator[list[CutChunk]]:
    batch: list[CutChunk] = []
    size = 0
    for chunk in chunks:
        batch.append(chunk)
        size += chunk.array.chunk_bytes
        if size >= ROUND_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exchanged(session: SaveSession, cut: Sequence[CutChunk]) -> Iterator[list[ChunkWrite]]:
    """The cut chunks that this rank owns, put together round by round.

    Where a rank is lost, or this one can not give a piece of its own, the pieces of later rounds
    still go to the others, who wait for them, and then it is raised.
    """
    first: Exception | None = None
    for batch in _rounds(cut):
        try:
            with session.timed("exchange"):
                writes, problem = _put_together(session.ranks, batch)
        except RanksError as lost:
            writes, problem = [], lost
        first = first or problem
        if first is None:
            yield writes
        del writes
    if first is not None:
        raise first


def _put_together(
    ranks: Ranks, chunks: Sequence[CutChunk]
) -> tuple[list[ChunkWrite], Exception | None]:
    """Send pieces to the owners of their chunks, receive those of the chunks that this rank owns.

    Every rank goes through its chunks in the same global order, so that no two can wait for each
    other.

    Returns:
        The chunks, and the first error of this rank's own sources. In the place of what they do not
        give zeros are sent: the owner waits for them, and is told at the end, before any commit.
    """
    failed: Exception | None = None

    def own(chunk: CutChunk) -> NDArray[np.uint8]:
        nonlocal failed
        assert chunk.local is not None
        pieces = ((stop - start, rank, start) for rank, start, stop in chunk.pieces)
        count = next(n for n, *mine in pieces if mine == [ranks.rank, chunk.start])
        size = count * dtypes.itemsize(chunk.array.dtype)
        try:
            data = as_bytes(np.ascontiguousarray(chunk.local()))
            if data.size == size:
                return data
            raise ValueError(
                f"{data.size} bytes were given of key {chunk.array.key!r}, chunk {chunk.index}, "
                f"where {size} were announced"
            )
        except Exception as problem:
            failed = failed or problem
            return np.zeros(size, np.uint8)

    sends: list[tuple[int, NDArray[np.uint8]]] = []
    receives: list[tuple[int, NDArray[np.uint8]]] = []
    writes = []
    for chunk in chunks:
        itemsize = dtypes.itemsize(chunk.array.dtype)
        if chunk.owner != ranks.rank:
            if chunk.local is not None:
                sends.append((chunk.owner, own(chunk)))
            continue
        size = int(np.prod(chunk.shape, dtype=np.int64)) * itemsize
        buffer = np.empty(size, np.uint8)
        for rank, start, stop in chunk.pieces:
            part = buffer[start * itemsize : stop * itemsize]
            if rank != ranks.rank:
                receives.append((rank, part))
            elif chunk.local is not None:
                part[:] = own(chunk)
        data = buffer.view(dtypes.numpy_dtype(chunk.array.dtype)).reshape(chunk.shape)
        writes.append(ChunkWrite(chunk.array, chunk.index, data))
    if sends or receives:
        ranks.exchange(sends, receives)
    return writes, failed
