"""A plan carried out on one rank: documents and chunks written, pieces of chunks exchanged.

At once, or from a copy in the background. The background speaks to no other rank: pieces are
exchanged in the caller's thread, and the manifest is handed in afterwards. Ranks exchange in one
order, whatever fails on one of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardstore.distributed.coordinator import Ranks
from shardstore.saving.session import SaveSession
from shardstore.saving.sources import CutChunk, WritePlan, fetched
from shardstore.saving.staging import ALIGNMENT, StagedChunk, Staging
from shardstore.storage import arrays
from shardstore.storage.commit.base import Writer
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.files import WRITEBACK_FROM
from shardstore.storage.movers.parallel import yield_to_others
from shardstore.storage.options import SaveOptions
from shardstore.strategies.async_utils import AsyncRequest

__all__ = ["ROUND_BYTES", "stage_chunks", "write_chunks"]

ROUND_BYTES = 16 * 1024 * 1024
"""Cut chunks are put together in rounds of at most this many bytes; a larger one goes alone."""

Created = Sequence[tuple[ArrayMeta, str]]
"""Arrays that this rank creates, with their documents."""
Room = Callable[[int], list[NDArray[np.uint8]]]
"""Gives memory for so many chunks; waits for it."""


def write_chunks(
    session: SaveSession, options: SaveOptions, plan: WritePlan, created: Created
) -> None:
    """Create the arrays, write, and put cut chunks together.

    An error of this rank's disk is raised once all pieces are exchanged.
    """
    mover: Writer | None = None

    def write(chunks: Sequence[ChunkWrite]) -> None:
        nonlocal mover
        with session.timed("write"):
            mover = mover or session.mover(options)
            mover.write(chunks, session.written)

    def write_documents() -> None:
        with session.timed("write"):
            arrays.write_documents(session.attempt, options, created)

    large, small = _by_size(plan.writes)
    error: Exception | None = None
    try:
        if session.attempt.defers_documents:
            session.deferred = write_documents
            # Small requests go beside the last large ones.
            session.files.flush_beside(lambda: write(large + small))
        elif options.durable:
            # The disk has something to do before the many small files are made.
            write(large)
            write_documents()
            write(small)
        else:
            # A file system at work holds up the creation of files: they come first.
            write_documents()
            write(small)
            write(large)
    except Exception as problem:
        error = problem
    _exchange(session, plan.cut, write, error=error)


def _by_size(writes: Sequence[ChunkWrite]) -> tuple[list[ChunkWrite], list[ChunkWrite]]:
    """Large chunks, the largest first, and small ones: threads then end at about the same time."""
    large: list[ChunkWrite] = []
    small: list[ChunkWrite] = []
    for write in writes:
        (large if write.array.chunk_bytes >= WRITEBACK_FROM else small).append(write)
    large.sort(key=lambda write: -write.array.chunk_bytes)
    return large, small


def stage_chunks(
    session: SaveSession, options: SaveOptions, plan: WritePlan, created: Created
) -> AsyncRequest:
    """Copy what this rank writes, and return the writing. Pieces of shared chunks are exchanged
    into the memory of the copy.

    Without a budget there is room for everything, and the background writes afterwards. Within a
    budget it writes meanwhile, which makes room. No rank waits here for one that waits for it: an
    error of the writer ends the waiting for room, but not the exchange. Errors are raised by the
    background, where all ranks meet them.
    """
    owned = [
        ChunkWrite(chunk.array, chunk.index, _unread)
        for chunk in plan.cut
        if chunk.owner == session.ranks.rank
    ]
    try:
        staging = Staging(
            [*owned, *plan.writes],
            budget_bytes=options.staging_budget_bytes,
            threads=options.threads,
            brought=len(owned),
        )
    except Exception as problem:  # no memory: the others still wait for this rank's pieces
        _exchange(session, plan.cut, lambda writes: None, error=problem)
        raise
    plan.writes.clear()  # their memory is the caller's
    session.staging = staging
    background = _writer(session, options, staging, created)
    if not staging.all_at_once:
        background = _started(background, staging)
    # Half of the memory: while one round is put together, the one before it is written.
    most_bytes = ROUND_BYTES if staging.all_at_once else staging.arena_bytes // 2
    try:
        _exchange(session, plan.cut, staging.filled, staging.room, most_bytes=most_bytes)
    except Exception as problem:
        staging.fail(problem)
    except BaseException as interrupt:  # nobody shall wait for what is not brought any more
        staging.fail(interrupt)
        staging.run()
        if staging.all_at_once:
            staging.close()
        raise
    if options.overlap_staging:
        threading.Thread(target=staging.run, name="shardstore-stage", daemon=True).start()
    else:
        with session.timed("stage"):
            staging.run()
            staging.wait(host=True)
    return AsyncRequest(background, (), [])


def _unread() -> NDArray[np.uint8]:
    raise AssertionError("a chunk that is put together has no source")


def _writer(
    session: SaveSession, options: SaveOptions, staging: Staging, created: Created
) -> Callable[[], None]:
    """A function that writes this rank's part from its copy, and closes the copy."""
    if not staging.all_at_once:
        # Chunks under way keep their memory: leave room for the chunk that is asked for next, and
        # for one that the ring's end is too short for.
        room = staging.arena_bytes - 2 * staging.largest_bytes
        options = replace(options, budget_bytes=max(1, min(options.budget_bytes, room)))

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        session.written(item, record)
        if isinstance(item.source, StagedChunk):
            item.source.release()
        if session.failure is not None:
            raise session.failure

    def write() -> None:
        try:
            if staging.all_at_once:
                staging.wait_queued()  # copying comes first: somebody may be waiting for it
                if staging.error is not None:
                    raise staging.error
            with session.timed("write"):
                session.mover(options).write(staging.writes, done)
                session.files.flush()
                # In an object store too: the trainer may wait for the commit.
                arrays.write_documents(session.attempt, options, created)
        except BaseException as error:
            staging.fail(error)
            raise
        finally:
            staging.close()

    return write


def _started(write: Callable[[], None], staging: Staging) -> Callable[[], None]:
    """Write in a thread from now on. Returns a function that waits for it and raises its error."""

    def run() -> None:
        yield_to_others()
        with suppress(BaseException):  # the copy keeps it
            write()

    thread = threading.Thread(target=run, name="shardstore-write", daemon=True)
    thread.start()

    def wait() -> None:
        thread.join()
        if staging.error is not None:
            raise staging.error

    return wait


def _exchange(
    session: SaveSession,
    cut: Sequence[CutChunk],
    take: Callable[[Sequence[ChunkWrite]], None],
    room: Room | None = None,
    *,
    most_bytes: int | None = None,
    error: Exception | None = None,
) -> None:
    """Put the cut chunks that this rank owns together, round by round.

    After an error of this rank, or where a rank is lost, the pieces of later rounds still go to the
    others, who wait for them. The first error is raised at the end.

    Args:
        session: the save.
        cut: the chunks that this rank shares.
        take: called with the chunks of each round.
        room: gives the memory that they go to; default: memory of their own.
        most_bytes: of a round.
        error: an earlier error: no chunks are taken any more.
    """
    for batch in _rounds(cut, most_bytes or ROUND_BYTES):
        memory: list[NDArray[np.uint8]] | None = None
        try:
            if room is not None and error is None:
                with session.timed("stage"):
                    memory = room(sum(chunk.owner == session.ranks.rank for chunk in batch))
        except Exception as stopped:
            error = stopped
        try:
            with session.timed("exchange"):
                writes = _put_together(session.ranks, batch, memory)
            if error is None:
                take(writes)
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error


def _rounds(chunks: Sequence[CutChunk], most_bytes: int) -> Iterator[list[CutChunk]]:
    """Rounds of at most so many bytes; a larger chunk goes alone.

    They need not be the same on all ranks: each waits for chunks in the order that all follow.
    """
    batch: list[CutChunk] = []
    size = 0
    for chunk in chunks:
        more = chunk.array.chunk_bytes + ALIGNMENT
        if batch and size + more > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += more
    if batch:
        yield batch


def _put_together(
    ranks: Ranks, chunks: Sequence[CutChunk], memory: Sequence[NDArray[np.uint8]] | None = None
) -> list[ChunkWrite]:
    """Send pieces to the owners of their chunks, receive those of the chunks that this rank owns.

    Every rank goes through its chunks in the same global order, so that no two wait for each other.

    Args:
        ranks: who exchange.
        chunks: what this rank shares.
        memory: for each chunk that it owns; default: memory of their own.

    Raises:
        RanksError: a rank is lost.
        Exception: the first error of this rank's own sources, at the end. Zeros are sent in the
            place of their data: the owner waits for it, and is told before any commit.
    """
    failed: Exception | None = None

    def own(chunk: CutChunk, start: int, size: int) -> NDArray[np.uint8]:
        nonlocal failed
        try:
            data = as_bytes(np.ascontiguousarray(fetched(chunk.local[start])))
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
        dtype = dtypes.numpy_dtype(chunk.array.dtype)
        buffer: NDArray[np.uint8] | None = None
        if chunk.owner == ranks.rank:
            size = math.prod(chunk.shape) * dtype.itemsize
            buffer = np.empty(size, np.uint8) if memory is None else memory[len(writes)]
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
    if failed is not None:
        raise failed
    return writes
