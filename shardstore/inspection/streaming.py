"""Values of stored arrays, a bounded piece at a time, from a few threads.

Answers for memory and parallelism: which pieces, how many at once, and that a damaged chunk stops
its own piece and nothing else. Does not know what is computed from the values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched

__all__ = ["DEFAULT_BUDGET_BYTES", "Piece", "pieces_of", "read_box", "stream"]

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024

BATCH_PIECES = 8
"""Whoever interrupts waits for as many at most, each of which may be a request."""

Piece = tuple[ArrayMeta, Box]


def pieces_of(array: ArrayMeta, limit_bytes: int) -> Iterator[Piece]:
    """Boxes that make up an array: its chunks, those above ``limit_bytes`` cut into slabs."""
    whole = Box((0,) * len(array.shape), array.shape)
    itemsize = dtypes.itemsize(array.dtype)
    for index in array.grid.overlapping(whole):
        for box in _cut(array.grid.box(index), max(1, limit_bytes // itemsize)):
            yield array, box


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its outermost axis that is longer than 1 until no part has more elements than
    ``limit``."""
    axis = next((i for i, n in enumerate(box.shape) if n > 1), None)
    if box.size <= limit or axis is None:
        yield box
        return
    length = box.shape[axis]
    step = max(1, limit * length // box.size)
    for start in range(0, length, step):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += start
        shape[axis] = min(step, length - start)
        yield from _cut(Box(tuple(offset), tuple(shape)), limit)


def read_box(stored: StoredCheckpoint, array: ArrayMeta, box: Box) -> NDArray[Any]:
    """The values of a box, verified.

    Raises:
        ChunkMissingError, ChunkCorruptError: name key, chunk and writer.
    """
    out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
    if box.size:
        stored.read([RegionRead(array, box, out)])
    return out


def stream(
    arrays: Iterable[ArrayMeta],
    work: Callable[[ArrayMeta, Box], None],
    failed: Callable[[ArrayMeta, DamagedCheckpointError], None],
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    copies: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Call ``work`` for every piece of some arrays, from several threads.

    Args:
        arrays: the arrays, in any order.
        work: reads a piece and does something with it; safe to run beside itself.
        failed: told of a piece that is damaged, one call at a time; the others go on.
        budget_bytes: memory for all pieces that are being worked on.
        copies: pieces' worth of memory that ``work`` takes at a time.
        progress: called with the bytes of each piece that is done, one call at a time.
    """
    threads = default_threads()
    limit = max(4096, budget_bytes // (threads * copies))
    pieces = [piece for array in arrays for piece in pieces_of(array, limit)]
    lock = threading.Lock()

    def weight(piece: Piece) -> int:
        return piece[1].size * dtypes.itemsize(piece[0].dtype)

    def run(batch: Sequence[Piece]) -> None:
        for array, box in batch:
            try:
                work(array, box)
            except DamagedCheckpointError as error:
                with lock:
                    failed(array, error)
            if progress is not None:
                with lock:
                    progress(weight((array, box)))

    run_batched(
        pieces,
        run,
        threads=threads,
        weight=weight,
        batch_weight=32 * 1024 * 1024,
        batch_items=BATCH_PIECES,
    )
