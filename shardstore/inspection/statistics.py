"""Norm, range, mean and histogram of stored arrays in float64, computed piece by piece.

Every value is converted to float64 exactly (bfloat16 and the 8-bit floats included; 64-bit integers
above 2**53 are rounded). Sums of blocks are sorted before they are added, so that results do not
depend on the order of the threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.opened import StoredArray
from shardstore.progress import Operation, ProgressCallback, metered
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.parallel import default_threads, run_batched

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024
BATCH_CHUNKS = 8
"""Largest number of chunks in a batch; an interrupt waits until the running batches end."""
Progress = ProgressCallback | Literal["bar"] | None

BLOCK = 128 * 1024
"""Elements in a block; as float64, a block fits into the processor's cache."""


def as_float64(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values as float64; the magnitudes of complex values."""
    if values.dtype.kind == "c":
        return np.abs(values.astype(np.complex128))
    return values.astype(np.float64)


def blocks(values: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """Yield an array as consecutive one-dimensional float64 blocks."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield as_float64(flat[start : start + BLOCK])


@dataclass
class Statistics:
    """Statistics of values. Sums, range and norm are over the finite values.

    Attributes:
        count: number of values.
        nan, inf, zeros: numbers of NaNs, infinities and zeros among them.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    _ends: list[float] = field(default_factory=list, repr=False)
    _sums: list[float] = field(default_factory=list, repr=False)
    _norms: list[float] = field(default_factory=list, repr=False)

    def add(self, block: NDArray[np.float64]) -> None:
        """Add a block of values."""
        self.count += block.size
        self.zeros += block.size - int(np.count_nonzero(block))
        # Not with BLAS, whose threads compete with the reading threads.
        squares, scale = float(np.einsum("i,i->", block, block)), 1.0
        if not math.isfinite(squares):  # some values are not finite, or their squares overflow
            nan = int(np.isnan(block).sum())
            finite = block[np.isfinite(block)]
            self.nan += nan
            self.inf += block.size - nan - finite.size
            block, scale = finite, float(np.abs(finite).max(initial=1.0))
            squares = float(((block / scale) ** 2).sum())
        if block.size:
            self._ends += [float(block.min()), float(block.max())]
            self._sums.append(float(block.sum()))
            self._norms.append(math.sqrt(squares) * scale)

    def merge(self, other: Statistics) -> None:
        """Add the values of other statistics."""
        for name in ("count", "nan", "inf", "zeros", "_sums", "_norms", "_ends"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def min(self) -> float | None:
        """The smallest finite value; ``None`` if there is none."""
        return min(self._ends, default=None)

    @property
    def max(self) -> float | None:
        """The largest finite value; ``None`` if there is none."""
        return max(self._ends, default=None)

    @property
    def mean(self) -> float | None:
        """Arithmetic mean of the finite values."""
        finite = self.count - self.nan - self.inf
        return float(np.sum(np.sort(self._sums)) / finite) if finite else None

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite values."""
        return float(np.hypot.reduce(np.sort(self._norms), initial=0.0))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        names = ("count", "norm", "mean", "min", "max", "zeros", "nan", "inf")
        return {name: getattr(self, name) for name in names}


def measure(
    arrays: Sequence[StoredArray],
    *,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Progress = None,
) -> tuple[dict[str, Statistics], dict[str, list[str]]]:
    """Return statistics of stored arrays.

    Args:
        arrays: arrays of one checkpoint.
        budget_bytes: memory for values.
        progress: a callback, or ``"bar"``.

    Returns:
        Key -> statistics of the values that could be read; and key -> texts of errors.
    """
    found = {array.key: Statistics() for array in arrays}
    damage: dict[str, list[str]] = {}
    lock = threading.Lock()

    def work(array: StoredArray, box: Box) -> None:
        part = Statistics()
        for block in blocks(array.read_box(box)):
            part.add(block)
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
    """Return a histogram of the finite values, with equal bins between minimum and maximum.

    It reads the array again. As :func:`measure` does, it leaves out damaged chunks.

    Returns:
        Counts ``(bins,)`` and edges ``(bins + 1,)``.
    """
    low, high = statistics.min, statistics.max
    if low is None or high is None:
        return np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1)
    if high == low:
        low, high = low - 0.5, high + 0.5
    # If the width of the range overflows float64, halve all values.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    counts = np.zeros(bins, np.int64)
    lock = threading.Lock()
    ends = (low * scale, high * scale)

    def work(array: StoredArray, box: Box) -> None:
        mine = np.zeros(bins, np.int64)
        for block in blocks(array.read_box(box)):
            mine += np.histogram(block[np.isfinite(block)] * scale, bins, ends)[0]
        with lock:
            counts[:] += mine

    stream([array], work, lambda array, error: None, budget_bytes=budget_bytes)
    return counts, np.linspace(*ends, bins + 1) / scale


def stream(
    arrays: Sequence[StoredArray],
    work: Callable[[StoredArray, Box], None],
    failed: Callable[[StoredArray, DamagedCheckpointError], None],
    *,
    operation: Operation = "read",
    url: str = "",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    copies: int = 1,
    progress: Progress = None,
    chosen: Callable[[StoredArray, int], bool] = lambda array, chunk: True,
) -> None:
    """Call ``work`` for chunks of some arrays, from several threads.

    Args:
        arrays: the arrays, in any order.
        work: reads a chunk and uses its values; called from several threads at a time.
        failed: called for each damaged chunk, one call at a time; work on the others continues.
        operation, url: see :class:`~shardstore.progress.Progress`.
        budget_bytes: memory for the chunks in work; at least one chunk is in work.
        copies: memory that ``work`` needs for a chunk, in multiples of the chunk's size.
        progress: a callback, or ``"bar"``.
        chosen: returns whether to work on the chunk with a number.
    """
    for array in arrays:
        array.checkpoint.stored.require_chunks(array.meta)
    chunks = [
        (array, box, box.size * array.dtype.itemsize)
        for array in arrays
        for number in range(array.meta.grid.size)
        if chosen(array, number)
        for box in [array.meta.grid.box(array.meta.grid.index(number))]
    ]
    largest = copies * max((size for _, _, size in chunks), default=0)
    threads = max(1, min(default_threads(), budget_bytes // max(1, largest)))
    lock = threading.Lock()

    def run(batch: Sequence[tuple[StoredArray, Box, int]]) -> None:
        for array, box, size in batch:
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    work(array, box)
            except DamagedCheckpointError as error:
                with lock:
                    failed(array, error)
            meter.count(size, 0)

    with metered(operation, url, progress) as meter:
        meter.expect(sum(size for _, _, size in chunks))
        run_batched(
            chunks,
            run,
            threads=threads,
            weight=lambda chunk: chunk[2],
            batch_weight=32 * 1024 * 1024,
            batch_items=BATCH_CHUNKS,
        )
