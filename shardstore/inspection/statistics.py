"""Norm, range, mean and histogram of stored arrays, in float64, by streaming.

Every value is converted to float64 exactly (bfloat16 and the 8-bit floats included; 64-bit integers
above 2**53 are rounded). The sums of pieces are added without rounding, so that results do not
depend on the order of the threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.opened import StoredArray
from shardstore.progress import Operation, ProgressCallback, metered
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.parallel import default_threads, run_batched

__all__ = [
    "DEFAULT_BUDGET_BYTES",
    "Progress",
    "Statistics",
    "as_float64",
    "histogram",
    "measure",
    "stream",
]

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024
BATCH_PIECES = 8
"""An interrupt waits for as many pieces at most, each of which may be a request."""
Progress = ProgressCallback | Literal["bar"] | None

BLOCK = 128 * 1024
"""Elements at a time: as float64 they stay in the processor's cache."""
SAFE = 1e150
"""Squares and sums of values above this may overflow float64: such blocks are scaled."""
TINY = 2.0**-64


def as_float64(values: NDArray[Any]) -> NDArray[np.float64]:
    """Values as float64; magnitudes of complex ones."""
    if values.dtype.kind == "c":
        return np.abs(values.astype(np.complex128))
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def _sum_of_squares(block: NDArray[np.float64]) -> float:
    # Not by BLAS, whose threads get in the way of those that read.
    return float(np.einsum("i,i->", block, block))


def _blocks(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """An array as consecutive one-dimensional float64 blocks."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield as_float64(flat[start : start + BLOCK])


@dataclass
class Statistics:
    """Statistics of some values. Sums, range and norm are over the finite ones.

    Attributes:
        count: number of values; ``nan`` and ``inf`` of them are not finite, ``zeros`` are 0.
        min, max: ``None`` where no value is finite.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    min: float | None = None
    max: float | None = None
    _sums: list[float] = field(default_factory=list, repr=False)
    _large: list[float] = field(default_factory=list, repr=False)
    _norms: list[float] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, values: NDArray[Any]) -> Statistics:
        """Statistics of an array in memory."""
        out = cls()
        for block in _blocks(values):
            out.add(block)
        out._sums = [math.fsum(out._sums)]
        return out

    def add(self, block: NDArray[np.float64]) -> None:
        """Take a block of values in."""
        self.count += block.size
        with np.errstate(over="ignore", invalid="ignore"):
            squares = _sum_of_squares(block)
        scale = 1.0
        if not math.isfinite(squares):
            nan = int(np.isnan(block).sum())
            finite = block[np.isfinite(block)]
            self.nan += nan
            self.inf += block.size - nan - finite.size
            block = finite
            largest = float(np.abs(block).max(initial=0.0))
            scale = largest if largest > SAFE else 1.0
            squares = _sum_of_squares(block / scale)
        if not block.size:
            return
        low, high = float(block.min()), float(block.max())
        if low <= 0.0 <= high:
            self.zeros += block.size - int(np.count_nonzero(block))
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        if max(-low, high) > SAFE:  # the sum may overflow where the mean does not
            self._large.append(float((block * TINY).sum()))
        else:
            self._sums.append(float(block.sum()))
        self._norms.append(math.sqrt(squares) * scale)

    def merge(self, other: Statistics) -> None:
        """Take the values of another one in."""
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros
        self.min = min((x for x in (self.min, other.min) if x is not None), default=None)
        self.max = max((x for x in (self.max, other.max) if x is not None), default=None)
        self._sums += other._sums
        self._large += other._large
        self._norms += other._norms

    @property
    def mean(self) -> float | None:
        """Arithmetic mean of the finite values."""
        finite = self.count - self.nan - self.inf
        if not finite:
            return None
        return math.fsum(self._sums) / finite + math.fsum(self._large) / finite / TINY

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite values."""
        largest = max(self._norms, default=0.0)
        if largest in (0.0, math.inf):
            return largest
        return largest * math.sqrt(math.fsum((n / largest) ** 2 for n in self._norms))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("count", "norm", "mean", "min", "max", "zeros", "nan", "inf")
        return {name: getattr(self, name) for name in names}


def measure(
    arrays: Sequence[StoredArray],
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Progress = None,
) -> tuple[dict[str, Statistics], dict[str, list[str]]]:
    """Statistics of stored arrays.

    Args:
        arrays: arrays of one checkpoint.
        budget_bytes: memory for values at a time.
        progress: a callback, or ``"bar"``.

    Returns:
        Key -> statistics, over what could be read; and key -> damage, where some could not.
    """
    found = {array.key: Statistics() for array in arrays}
    damage: dict[str, list[str]] = {}
    lock = threading.Lock()

    def work(array: StoredArray, box: Box) -> None:
        part = Statistics.of(array.read_box(box))
        with lock:
            found[array.key].merge(part)

    def failed(array: StoredArray, error: Exception) -> None:
        damage.setdefault(array.key, []).append(str(error))

    url = arrays[0].checkpoint.url if arrays else ""
    stream(arrays, work, failed, url=url, budget_bytes=budget_bytes, progress=progress)
    return found, damage


def histogram(
    array: StoredArray,
    statistics: Statistics,
    bins: int = 60,
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts of the finite values between the array's minimum and maximum, in equal bins.

    A second pass over the array. Damaged chunks are left out, as they are in ``statistics``.

    Returns:
        Counts ``(bins,)`` and edges ``(bins + 1,)``.
    """
    low, high = statistics.min, statistics.max
    if low is None or high is None:
        return np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1)
    if high == low:
        low, high = low - 0.5, high + 0.5
    # The width of the range may overflow float64; then all values are halved.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    counts = np.zeros(bins, np.int64)
    lock = threading.Lock()
    ends = (low * scale, high * scale)

    def work(array: StoredArray, box: Box) -> None:
        mine = np.zeros(bins, np.int64)
        for block in _blocks(array.read_box(box)):
            mine += np.histogram(block[np.isfinite(block)] * scale, bins, ends)[0]
        with lock:
            counts[:] += mine

    stream([array], work, lambda array, error: None, budget_bytes=budget_bytes)
    return counts, np.linspace(*ends, bins + 1) / scale


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


def stream(
    arrays: Iterable[StoredArray],
    work: Callable[[StoredArray, Box], None],
    failed: Callable[[StoredArray, DamagedCheckpointError], None],
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
        for itemsize, grid in [(array.dtype.itemsize, array.meta.grid)]
        for index in map(grid.index, range(grid.size))
        for part in _cut(grid.box(index), max(1, limit // itemsize))
    ]
    lock = threading.Lock()

    def run(batch: Sequence[tuple[StoredArray, Box, int]]) -> None:
        for array, part, size in batch:
            try:
                work(array, part)
            except DamagedCheckpointError as error:
                with lock:
                    failed(array, error)
            meter.count(size, 0)

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
