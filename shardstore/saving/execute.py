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

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import RanksError
from shardstore.saving.background import BackgroundWrite
from shardstore.saving.session import SaveSession
from shardstore.saving.sources import CutChunk, WritePlan
from shardstore.saving.staging import ALIGNMENT, Staging, staged_bytes
from shardstore.storage import arrays
from shardstore.storage.commit.base import Writer
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.files import WRITEBACK_FROM
from shardstore.storage.options import SaveOptions
from shardstore.strategies.async_utils import AsyncRequest

__all__ = ["ROUND_BYTES", "stage"]

ROUND_BYTES = 16 * 1024 * 1024
"""Cut chunks are put together in rounds of about this many bytes."""


def stage(
    session: SaveSession,
    options: SaveOptions,
    plan: WritePlan,
    created: Sequence[tuple[ArrayMeta, str]],
) -> AsyncRequest:
    """Exchange pieces of shared chunks, copy the rest; what is left needs no other rank.

    Within a staging budget that has not room for all, the shared chunks that this rank owns go
    through the same memory as the copy, round by round, while the background writes.
    """
    budget = session.options.staging_budget_bytes or options.staging_budget_bytes
    mine = [
        ChunkWrite(chunk.array, chunk.index, _unread)
        for chunk in plan.cut
        if chunk.owner == session.ranks.rank
    ]
    size = sum(map(staged_bytes, [*mine, *plan.writes]))
    if budget is not None and mine and size > budget:
        return _stage_in_rounds(session, options, plan, created, mine, budget)
    owned = [write for writes in _exchanged(session, plan.cut) for write in writes]
    mover = session.mover(options)
    staging = Staging(plan.writes, budget_bytes=budget, threads=options.threads)
    plan.writes.clear()  # their memory is the caller's
    session.staging = staging
    background = BackgroundWrite(session, mover, created, staging, owned, options.threads)
    if not staging.all_at_once:
        background.start()
    _copy(session, staging)
    return AsyncRequest(background, (), [])


def _stage_in_rounds(
    session: SaveSession,
    options: SaveOptions,
    plan: WritePlan,
    created: Sequence[tuple[ArrayMeta, str]],
    mine: Sequence[ChunkWrite],
    budget_bytes: int,
) -> AsyncRequest:
    """As :func:`stage`. An error of the exchange, as one of the writer, is the background's: who
    calls hears of it where all ranks meet.

    No rank waits here for one that waits for it: room comes of writing alone, which needs no other
    rank, and an error of it ends the waiting but not the exchange.
    """
    staging = Staging(
        [*mine, *plan.writes],
        budget_bytes=budget_bytes,
        threads=options.threads,
        brought=len(mine),
    )
    session.staging = staging
    background: BackgroundWrite | None = None
    try:
        mover = session.mover(options)
        background = BackgroundWrite(session, mover, created, staging, (), options.threads)
        background.start()
    except Exception as problem:
        background = None
        staging.fail(problem)  # the others get their pieces first
    plan.writes.clear()  # their memory is the caller's
    try:
        # Half of the memory: while one round is put together, the one before it is written.
        for _ in _exchanged(session, plan.cut, staging, staging.arena_bytes // 2):
            pass
    except Exception as problem:
        staging.fail(problem)
    except BaseException as interrupt:  # nobody shall wait for what is not brought any more
        staging.fail(interrupt)
        staging.run()
        raise
    if background is None:
        staging.run()
        staging.close()
        assert staging.error is not None
        raise staging.error
    _copy(session, staging)
    return AsyncRequest(background, (), [])


def _copy(session: SaveSession, staging: Staging) -> None:
    if session.options.overlap_staging:
        threading.Thread(target=staging.run, name="shardstore-stage", daemon=True).start()
    else:
        with session.timed("stage"):
            staging.run()
            staging.wait(host=True)


def _unread() -> NDArray[np.uint8]:
    raise AssertionError("a chunk that is put together has no source")


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


def _rounds(chunks: Sequence[CutChunk], most_bytes: int | None) -> Iterator[list[CutChunk]]:
    """Rounds of about :data:`ROUND_BYTES`, or of at most so many bytes; a larger chunk goes alone.

    They need not be the same on all ranks: each waits for chunks in the order that all follow.
    """
    batch: list[CutChunk] = []
    size = 0
    for chunk in chunks:
        more = chunk.array.chunk_bytes
        if most_bytes is not None:
            more += ALIGNMENT
            if batch and size + more > most_bytes:
                yield batch
                batch, size = [], 0
        batch.append(chunk)
        size += more
        if size >= ROUND_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exchanged(
    session: SaveSession,
    cut: Sequence[CutChunk],
    staging: Staging | None = None,
    most_bytes: int | None = None,
) -> Iterator[list[ChunkWrite]]:
    """The cut chunks that this rank owns, put together round by round.

    Where a rank is lost, or this one can not give a piece of its own, or has no room any more, the
    pieces of later rounds still go to the others, who wait for them, and then it is raised.

    Args:
        session: the save.
        cut: the chunks that this rank shares.
        staging: whose memory they go to, if not to memory of their own; waited for.
        most_bytes: of a round.
    """
    first: Exception | None = None
    for batch in _rounds(cut, most_bytes):
        memory: list[NDArray[np.uint8]] | None = None
        if staging is not None and first is None:
            try:
                with session.timed("stage"):
                    memory = staging.room(sum(c.owner == session.ranks.rank for c in batch))
            except Exception as stopped:
                first = stopped
        problem: Exception | None
        try:
            with session.timed("exchange"):
                writes, problem = _put_together(session.ranks, batch, memory)
        except RanksError as lost:
            writes, problem = [], lost
        first = first or problem
        if first is None:
            if staging is not None and memory is not None:
                staging.filled(memory)
            yield writes
        del writes, memory
    if first is not None:
        raise first


def _put_together(
    ranks: Ranks, chunks: Sequence[CutChunk], memory: Sequence[NDArray[np.uint8]] | None = None
) -> tuple[list[ChunkWrite], Exception | None]:
    """Send pieces to the owners of their chunks, receive those of the chunks that this rank owns.

    Every rank goes through its chunks in the same global order, so that no two can wait for each
    other.

    Args:
        ranks: who exchange.
        chunks: what this rank shares.
        memory: for each that it owns; default: memory of their own.

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
    writes: list[ChunkWrite] = []
    for chunk in chunks:
        itemsize = dtypes.itemsize(chunk.array.dtype)
        if chunk.owner != ranks.rank:
            if chunk.local is not None:
                sends.append((chunk.owner, own(chunk)))
            continue
        size = int(np.prod(chunk.shape, dtype=np.int64)) * itemsize
        buffer = np.empty(size, np.uint8) if memory is None else memory[len(writes)]
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
