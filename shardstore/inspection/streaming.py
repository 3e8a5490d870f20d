"""Values of stored arrays, read and verified a bounded piece at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.progress import Operation, ProgressCallback, metered
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched

__all__ = ["DEFAULT_BUDGET_BYTES", "Progress", "read_box", "read_positions", "stream"]

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024

BATCH_PIECES = 8
"""An interrupt waits for as many pieces at most, each of which may be a request."""

Progress = ProgressCallback | Literal["bar"] | None


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box along its outermost axis that is longer than 1 until no part has more than
    ``limit`` elements."""
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


def read_positions(
    stored: StoredCheckpoint, array: ArrayMeta, positions: Sequence[Sequence[int]]
) -> NDArray[Any]:
    """The values at the outer product of positions on each axis. Evenly spaced neighbours are read
    as one box.

    Raises:
        ChunkMissingError, ChunkCorruptError: name key, chunk and writer.
    """
    out = np.empty([len(axis) for axis in positions], dtypes.numpy_dtype(array.dtype))
    for spans in product(*map(_spans, positions)):
        low = tuple(min(axis) for axis, _ in spans)
        shape = tuple(max(axis) + 1 - first for (axis, _), first in zip(spans, low, strict=True))
        steps = tuple(slice(None, None, axis.step) for axis, _ in spans)
        out[tuple(where for _, where in spans)] = read_box(stored, array, Box(low, shape))[steps]
    return out


def _spans(positions: Sequence[int]) -> Iterator[tuple[range, slice]]:
    """Runs of evenly spaced positions, and where they are among all."""
    start = 0
    while start < len(positions):
        step = positions[start + 1] - positions[start] if start + 1 < len(positions) else 1
        stop = start + 1
        while stop < len(positions) and positions[stop] - positions[stop - 1] == step:
            stop += 1
        end = positions[stop - 1] + (1 if step > 0 else -1)
        yield range(positions[start], end, step), slice(start, stop)
        start = stop


def stream(
    arrays: Iterable[ArrayMeta],
    work: Callable[[ArrayMeta, Box], None],
    failed: Callable[[ArrayMeta, DamagedCheckpointError], None],
    *,
    operation: Operation = "read",
    url: str = "",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    copies: int = 1,
    progress: Progress = None,
) -> None:
    """Call ``work`` for every piece of some arrays, from several threads. A piece is a chunk or,
    where the budget is smaller, a part of one.

    Args:
        arrays: the arrays, in any order.
        work: reads a piece and uses its values; called from several threads at a time.
        failed: called for each piece that is damaged, one call at a time; the others go on.
        operation, url: for progress.
        budget_bytes: memory for all pieces that are being worked on.
        copies: pieces' worth of memory that ``work`` takes at a time.
        progress: a callback, or ``"bar"``.
    """
    threads = default_threads()
    limit = max(4096, budget_bytes // (threads * copies))
    pieces = [
        (array, part, part.size * itemsize)
        for array in arrays
        for itemsize in [dtypes.itemsize(array.dtype)]
        for index in map(array.grid.index, range(array.grid.size))
        for part in _cut(array.grid.box(index), max(1, limit // itemsize))
    ]
    lock = threading.Lock()

    def run(batch: Sequence[tuple[ArrayMeta, Box, int]]) -> None:
        for array, part, size in batch:
            try:
                work(array, part)
            except DamagedCheckpointError as error:
                with lock:
                    failed(array, error)
            if meter.add is not None:
                meter.add(size, 0)

    with metered(operation, url, progress) as meter:
        meter.expect(sum(size for _, _, size in pieces))
        run_batched(
            pieces,
            run,
            threads=threads,
            weight=lambda piece: piece[2],
            batch_weight=32 * 1024 * 1024,
            batch_items=BATCH_PIECES,
        )
