"""Values of stored arrays, read piece by piece: statistics, histograms and differences.

Every value is converted to float64 exactly (bfloat16 and the 8-bit floats included; 64-bit integers
above 2**53 are rounded). Sums of blocks are sorted before they are added, so that results do not
depend on the order of the threads.

Chunks whose hashes in the two manifests agree are equal and are not read. All others are compared
bit by bit, so that 0.0 and -0.0 differ, and a NaN equals itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.opened import OpenCheckpoint, StoredArray
from shardstore.progress import Operation, ProgressArgument, metered
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME
from shardstore.storage.movers.parallel import default_threads, run_batched

T = TypeVar("T")

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024
BATCH_CHUNKS = 8
"""Largest number of chunks in a batch; an interrupt waits until the running batches end."""
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
        for name in ("count", "nan", "inf", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._ends += other._ends
        self._sums += other._sums
        self._norms += other._norms

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
    progress: ProgressArgument = None,
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

    def work(array: StoredArray, box: Box) -> Statistics:
        part = Statistics()
        for block in blocks(array.read_box(box)):
            part.add(block)
        return part

    def collect(array: StoredArray, part: Statistics) -> None:
        found[array.key].merge(part)

    url = arrays[0].checkpoint.url if arrays else ""
    damage = stream(arrays, work, collect, url=url, budget_bytes=budget_bytes, progress=progress)
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
    counts = np.zeros(bins, np.int64)
    low, high = statistics.min, statistics.max
    if low is None or high is None:
        return counts, np.linspace(0.0, 1.0, bins + 1)
    if high == low:
        low, high = low - 0.5, high + 0.5
    # If the width of the range overflows float64, halve all values.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    ends = (low * scale, high * scale)

    def work(array: StoredArray, box: Box) -> NDArray[np.int64]:
        mine = np.zeros(bins, np.int64)
        for block in blocks(array.read_box(box)):
            mine += np.histogram(block[np.isfinite(block)] * scale, bins, ends)[0]
        return mine

    def collect(_: StoredArray, mine: NDArray[np.int64]) -> None:
        counts[:] += mine

    stream([array], work, collect, budget_bytes=budget_bytes)
    return counts, np.linspace(*ends, bins + 1) / scale


def stream(
    arrays: Sequence[StoredArray],
    work: Callable[[StoredArray, Box], T],
    collect: Callable[[StoredArray, T], None],
    *,
    numbers: Mapping[str, Collection[int]] | None = None,
    operation: Operation = "read",
    url: str = "",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    copies: int = 1,
    progress: ProgressArgument = None,
) -> dict[str, list[str]]:
    """Call ``work`` for chunks of some arrays, from several threads.

    Args:
        arrays: the arrays, in any order.
        work: reads a chunk and uses its values; called from several threads at a time.
        collect: called with each result of ``work``, one call at a time.
        numbers: key -> numbers of the chunks to read; default: all chunks.
        operation, url: see :class:`~shardstore.progress.Progress`.
        budget_bytes: memory for the chunks in work; at least one chunk is in work.
        copies: memory that ``work`` needs for a chunk, in multiples of the chunk's size.
        progress: a callback, or ``"bar"``.

    Returns:
        Key -> texts of the errors of its damaged chunks. Work on the others continues.
    """
    chunks = []
    for array in arrays:
        array.checkpoint.stored.require_chunks(array.meta)
        grid = array.meta.grid
        for number in range(grid.size) if numbers is None else numbers[array.key]:
            box = grid.box(grid.index_at(number))
            chunks.append((array, box, box.size * array.dtype.itemsize))
    largest = copies * max((size for _, _, size in chunks), default=0)
    threads = max(1, min(default_threads(), budget_bytes // max(1, largest)))
    damage: dict[str, list[str]] = {}
    lock = threading.Lock()

    def run(batch: Sequence[tuple[StoredArray, Box, int]]) -> None:
        for array, box, size in batch:
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    found = work(array, box)
                with lock:
                    collect(array, found)
            except DamagedCheckpointError as error:
                with lock:
                    damage.setdefault(array.key, []).append(str(error))
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
    return damage


@dataclass(frozen=True)
class ArrayDifference:
    """The differences between the values of one key.

    Attributes:
        elements: number of elements whose bits differ, out of ``of``.
        chunks: number of chunks (of the first checkpoint's grid) with a difference, out of
            ``chunks_of``.
        max_abs: largest absolute difference of two finite values.
        norm: Euclidean norm of the differences of finite values.
        norm_a: Euclidean norm of the finite values of A, in the chunks that were read.
        nonfinite: number of elements that differ and are NaN or infinite on one or both sides.
        damage: texts of errors.
    """

    elements: int
    of: int
    chunks: int
    chunks_of: int
    max_abs: float
    norm: float
    norm_a: float
    nonfinite: int
    damage: list[str]


@dataclass
class Difference:
    """The differences between checkpoints A and B.

    Attributes:
        only_a, only_b: keys that only one side has.
        described: key -> property -> both sides, if shapes or data types differ.
        values: key -> difference, if bits differ or could not be read.
        files: ``common.pt`` and sharded objects that differ, or that one side lacks.
        equal: number of keys with equal values.
        hashed: number of these keys whose hashes are equal, so that no values were read.
        bytes_read: bytes of values that were read.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    described: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    values: dict[str, ArrayDifference] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    equal: int = 0
    hashed: int = 0
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether the checkpoints are equal."""
        found = (self.only_a, self.only_b, self.described, self.values, self.files)
        return not any(found)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"same": self.same, **asdict(self)}


def compare(
    a: OpenCheckpoint,
    b: OpenCheckpoint,
    wants: Callable[[str], bool] = lambda key: True,
    *,
    files: bool = True,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: ProgressArgument = None,
) -> Difference:
    """Compare two checkpoints. One process calls it; it changes nothing.

    Args:
        a, b: the checkpoints.
        wants: returns whether to compare a key.
        files: compare ``common.pt`` and the sharded objects too.
        budget_bytes: memory for values.
        progress: a callback, or ``"bar"``; it counts the bytes of A's values.
    """
    out = Difference()
    left = {key: array for key, array in a.items() if wants(key)}
    right = {key: array for key, array in b.items() if wants(key)}
    out.only_a = sorted(set(left) - set(right))
    out.only_b = sorted(set(right) - set(left))
    suspects: dict[str, Collection[int]] = {}
    for key in sorted(set(left) & set(right)):
        mine, other = left[key], right[key]
        shapes, dtypes = (list(mine.shape), list(other.shape)), (mine.meta.dtype, other.meta.dtype)
        pairs = {"shape": shapes, "dtype": dtypes}
        if differs := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            out.described[key] = differs
        elif chunks := _suspects(mine, other):
            suspects[key] = chunks
        else:
            out.equal += 1
            out.hashed += 1
    values = {key: Statistics() for key in suspects}
    deltas = {key: Statistics() for key in suspects}
    touched = dict.fromkeys(suspects, 0)

    def work(array: StoredArray, box: Box) -> tuple[int, Statistics, Statistics]:
        mine, other = array.read_box(box), right[array.key].read_box(box)
        return mine.nbytes + other.nbytes, *_difference(mine, other)

    def collect(array: StoredArray, found: tuple[int, Statistics, Statistics]) -> None:
        size, part, delta = found
        out.bytes_read += size
        values[array.key].merge(part)
        deltas[array.key].merge(delta)
        touched[array.key] += delta.count > 0

    damage = stream(
        [left[key] for key in suspects],
        work,
        collect,
        numbers=suspects,
        operation="compare",
        url=a.url,
        budget_bytes=budget_bytes,
        copies=2,
        progress=progress,
    )
    for key, delta in deltas.items():
        if not delta.count and key not in damage:
            out.equal += 1
            continue
        out.values[key] = ArrayDifference(
            elements=delta.count,
            of=left[key].size,
            chunks=touched[key],
            chunks_of=left[key].meta.grid.size,
            max_abs=delta.max or 0.0,
            norm=delta.norm,
            norm_a=values[key].norm,
            nonfinite=delta.nan + delta.inf,
            damage=damage.get(key, []),
        )
    if files:
        out.files = _files(a, b, wants)
    return out


def _suspects(mine: StoredArray, other: StoredArray) -> Collection[int]:
    """Return the numbers of the chunks that may differ: all, unless both manifests have hashes for
    the same grid."""
    grid = mine.meta.grid
    one, two = _digests(mine), _digests(other)
    if one is None or two is None or grid != other.meta.grid:
        return range(grid.size)
    return {int(i) for i in np.flatnonzero((one != two).any(axis=1))}


def _digests(array: StoredArray) -> NDArray[Any] | None:
    manifest, _ = array.checkpoint.manifest_or_damage()
    rows = None if manifest is None else manifest.rows(array.meta)
    return None if rows is None else rows.digest


def _difference(a: NDArray[Any], b: NDArray[Any]) -> tuple[Statistics, Statistics]:
    """Return statistics of ``a``, and of the absolute differences where bits differ."""
    values, deltas = Statistics(), Statistics()
    for start in range(0, a.size, BLOCK):
        x, y = (part.reshape(-1)[start : start + BLOCK] for part in (a, b))
        left, right = (part.view(np.uint8).reshape(-1, x.dtype.itemsize) for part in (x, y))
        differ = (left != right).any(axis=1)
        values.add(as_float64(x))
        if differ.any():
            deltas.add(_delta(x[differ], y[differ]))
    return values, deltas


def _delta(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """Return absolute differences as float64; NaN where a side is not finite."""
    out: NDArray[np.float64]
    if x.dtype.kind == "c":
        out = np.abs(x.astype(np.complex128) - y.astype(np.complex128))
    elif x.dtype.kind in "iu":  # exact, unlike a difference in float64
        wrapped = np.maximum(x, y) - np.minimum(x, y)
        out = wrapped.view(f"u{x.dtype.itemsize}").astype(np.float64)
    else:
        out = np.abs(as_float64(x) - as_float64(y))
    return out


def _files(a: OpenCheckpoint, b: OpenCheckpoint, wants: Callable[[str], bool]) -> dict[str, str]:
    left, right = _contents(a, wants), _contents(b, wants)
    out = dict.fromkeys(left.keys() - right, "only in A")
    out |= dict.fromkeys(right.keys() - left, "only in B")
    out |= {name: "differs" for name in left.keys() & right if left[name] != right[name]}
    return dict(sorted(out.items()))


def _contents(ckpt: OpenCheckpoint, wants: Callable[[str], bool]) -> dict[str, bytes | None]:
    """Return path -> content, for ``common.pt`` and each chosen sharded object."""
    location = ckpt.stored.location
    names = [name for key, name in ckpt.objects.names.items() if wants(key.rpartition("/")[0])]
    if location.exists(COMMON_STATE_NAME):
        names.append(COMMON_STATE_NAME)
    return dict(zip(names, location.read_many(names), strict=True))
