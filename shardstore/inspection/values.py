"""Values of stored arrays, read piece by piece: statistics, histograms and differences.

Every value is converted to float64 exactly (bfloat16 and the 8-bit floats included; 64-bit integers
above 2**53 are rounded). The two 4-bit floats of a byte count as a complex value. Sums of blocks
are sorted before they are added, so that results do not depend on the order of the threads.

Chunks whose hashes in the two manifests agree are equal and are not read. All others are compared
bit by bit, so that 0.0 and -0.0 differ, and a NaN equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.opened import OpenCheckpoint, StoredArray, codec_error
from shardstore.progress import Operation, ProgressArgument, metered
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME
from shardstore.storage.runtime.parallel import default_threads, run_batched

T = TypeVar("T")

DEFAULT_BUDGET_BYTES = 256 * 1024 * 1024
BLOCK = 128 * 1024
"""Elements in a block; as float64, a block fits into the processor's cache."""
COLUMNS = 8
Sums = NDArray[np.float64]
"""One row for each block: the numbers of values, zeros, NaNs and infinities; and minimum, maximum,
sum and norm of the finite values."""


def as_float64(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values as float64; the magnitudes of complex values."""
    values = dtypes.numbers(values)
    if values.dtype.kind == "c":
        return np.abs(values.astype(np.complex128))
    return values.astype(np.float64, copy=False)


def blocks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield an array as consecutive one-dimensional blocks."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        yield flat[start : start + BLOCK]


def sums_of(found: Iterable[NDArray[Any]]) -> Sums:
    """Return the sums of blocks."""
    return np.array([_sums(as_float64(block)) for block in found]).reshape(-1, COLUMNS)


def _sums(block: NDArray[np.float64]) -> list[float]:
    finite, nan, scale = block, 0, 1.0
    # Not with BLAS, whose threads compete with the reading threads.
    squares = float(np.einsum("i,i->", block, block))
    if not math.isfinite(squares):  # some values are not finite, or their squares overflow
        nan = int(np.isnan(block).sum())
        finite = block[np.isfinite(block)]
        scale = float(np.abs(finite).max(initial=1.0))
        squares = float(((finite / scale) ** 2).sum())
    counts = block.size, block.size - np.count_nonzero(block), nan, block.size - nan - finite.size
    ends = finite.min(initial=math.inf), finite.max(initial=-math.inf)
    return [*counts, *ends, finite.sum(), math.sqrt(squares) * scale]


@dataclass(frozen=True)
class Statistics:
    """Statistics of values.

    Attributes:
        count: number of values.
        norm: Euclidean norm of the finite values.
        mean, min, max: of the finite values; ``None`` if there are none.
        zeros, nan, inf: numbers of zeros, NaNs and infinities.
    """

    count: int
    norm: float
    mean: float | None
    min: float | None
    max: float | None
    zeros: int
    nan: int
    inf: int

    @classmethod
    def of(cls, parts: Iterable[Sums]) -> Statistics:
        """Return the statistics of all blocks of some parts, in any order."""
        columns = np.concatenate([np.empty((0, COLUMNS)), *parts]).T
        count, zeros, nan, inf = map(int, columns[:4].sum(axis=1))
        low, high, total, norms = columns[4:]
        norm = float(np.hypot.reduce(np.sort(norms), initial=0.0))
        if not (finite := count - nan - inf):
            return cls(count, norm, None, None, None, zeros, nan, inf)
        mean = float(np.sum(np.sort(total)) / finite)
        return cls(count, norm, mean, float(low.min()), float(high.max()), zeros, nan, inf)


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

    def work(array: StoredArray, box: Box) -> Sums:
        return sums_of(blocks(array[*box.slices, ...]))

    found, damage = stream(arrays, work, budget_bytes=budget_bytes, progress=progress)
    return {key: Statistics.of(parts) for key, parts in found.items()}, damage


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
    if low is None or high is None:  # there are no finite values
        low, high = 0.0, 1.0
    # If the width of the range overflows float64, halve all values.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    ends = (low * scale, high * scale)
    edges = np.histogram_bin_edges([], bins, ends) / scale

    def work(array: StoredArray, box: Box) -> NDArray[np.int64]:
        counts = np.zeros(bins, np.int64)
        for block in map(as_float64, blocks(array[*box.slices, ...])):
            counts += np.histogram(block[np.isfinite(block)] * scale, bins, ends)[0]
        return counts

    found, _ = stream([array], work, budget_bytes=budget_bytes)
    return sum(found[array.key], np.zeros(bins, np.int64)), edges


def stream(
    arrays: Sequence[StoredArray],
    work: Callable[[StoredArray, Box], T],
    *,
    numbers: Mapping[str, Collection[int]] | None = None,
    operation: Operation = "read",
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    copies: int = 1,
    progress: ProgressArgument = None,
) -> tuple[dict[str, list[T]], dict[str, list[str]]]:
    """Call ``work`` for chunks of some arrays, from several threads.

    Args:
        arrays: arrays of one checkpoint, in any order.
        work: reads a chunk and uses its values; called from several threads at a time.
        numbers: key -> numbers of the chunks to read; default: all chunks.
        operation: see :class:`~shardstore.progress.Progress`.
        budget_bytes: memory for the chunks in work; at least one chunk is in work.
        copies: memory that ``work`` needs for a chunk, in multiples of the chunk's size.
        progress: a callback, or ``"bar"``.

    Returns:
        Key -> results of ``work``, in any order; and key -> texts of the errors of its damaged
        chunks. Work on the others continues.
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
    found: dict[str, list[T]] = {array.key: [] for array in arrays}
    damage: dict[str, list[str]] = {array.key: [] for array in arrays}

    def run(batch: Sequence[tuple[StoredArray, Box, int]]) -> None:
        for array, box, size in batch:
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    found[array.key].append(work(array, box))
            except DamagedCheckpointError as error:
                damage[array.key].append(str(error))
            meter.count(size, 0)

    url = arrays[0].checkpoint.url if arrays else ""
    with metered(operation, url, progress) as meter:
        meter.tell("move", bytes_total=sum(size for _, _, size in chunks))
        run_batched(chunks, run, threads=threads)
    return found, {key: texts for key, texts in damage.items() if texts}


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
        unread: key -> error, if nothing here decodes the codecs of one side.
        files: ``common.pt`` and sharded objects that differ, or that one side lacks.
        equal: number of keys with equal values.
        hashed: number of these keys whose hashes are equal, so that no values were read.
        bytes_read: bytes of values that were read.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    described: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    values: dict[str, ArrayDifference] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    equal: int = 0
    hashed: int = 0
    bytes_read: int = 0

    @property
    def same(self) -> bool:
        """Whether the checkpoints were read and are equal."""
        parts = (self.only_a, self.only_b, self.described, self.values, self.unread, self.files)
        return not any(parts)


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
    left, right = ({key: one[key] for key in filter(wants, one)} for one in (a, b))
    out = Difference(only_a=sorted(left.keys() - right), only_b=sorted(right.keys() - left))
    suspects: dict[str, Collection[int]] = {}
    for key in sorted(left.keys() & right):
        mine, other = left[key], right[key]
        shapes, dtypes = (list(mine.shape), list(other.shape)), (mine.meta.dtype, other.meta.dtype)
        pairs = {"shape": shapes, "dtype": dtypes}
        if differs := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
            out.described[key] = differs
            continue
        numbers = _suspects(mine, other)
        errors = (codec_error(one.checkpoint.stored.location, one.meta) for one in (mine, other))
        if numbers and (error := next(filter(None, errors), None)):
            out.unread[key] = str(error)
        else:
            suspects[key] = numbers
    out.hashed = sum(not numbers for numbers in suspects.values())

    def work(array: StoredArray, box: Box) -> tuple[int, Sums, Sums]:
        mine, other = (one[*box.slices, ...] for one in (array, right[array.key]))
        return mine.nbytes + other.nbytes, sums_of(blocks(mine)), sums_of(_deltas(mine, other))

    parts, damage = stream(
        [left[key] for key in suspects],
        work,
        numbers=suspects,
        operation="compare",
        budget_bytes=budget_bytes,
        copies=2,
        progress=progress,
    )
    for key, found in parts.items():
        out.bytes_read += sum(size for size, _, _ in found)
        delta = Statistics.of(deltas for _, _, deltas in found)
        if not delta.count and key not in damage:
            out.equal += 1
            continue
        out.values[key] = ArrayDifference(
            elements=delta.count,
            of=left[key].size,
            chunks=sum(len(deltas) > 0 for _, _, deltas in found),
            chunks_of=left[key].meta.grid.size,
            max_abs=delta.max or 0.0,
            norm=delta.norm,
            norm_a=Statistics.of(values for _, values, _ in found).norm,
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


def _deltas(a: NDArray[Any], b: NDArray[Any]) -> Iterator[NDArray[np.float64]]:
    """Yield, block by block, the absolute differences of the elements whose bits differ."""
    for x, y in zip(blocks(a), blocks(b), strict=True):
        left, right = (part.view(np.uint8).reshape(-1, x.dtype.itemsize) for part in (x, y))
        differ = (left != right).any(axis=1)
        if differ.any():
            yield _delta(dtypes.numbers(x[differ]), dtypes.numbers(y[differ]))


def _delta(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """Return absolute differences as float64; NaN where a side is not finite."""
    if x.dtype.kind in "iu":  # exact, unlike a difference in float64
        wrapped = np.maximum(x, y) - np.minimum(x, y)
        return as_float64(wrapped.view(f"u{x.dtype.itemsize}"))
    kind = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.abs(x.astype(kind) - y.astype(kind))


def _files(a: OpenCheckpoint, b: OpenCheckpoint, wants: Callable[[str], bool]) -> dict[str, str]:
    left, right = _contents(a, wants), _contents(b, wants)
    out = dict.fromkeys(left.keys() - right, "only in A")
    out |= dict.fromkeys(right.keys() - left, "only in B")
    out |= {name: "differs" for name in left.keys() & right if left[name] != right[name]}
    return dict(sorted(out.items()))


def _contents(ckpt: OpenCheckpoint, wants: Callable[[str], bool]) -> dict[str, bytes]:
    """Return path -> content, for ``common.pt`` and each chosen sharded object."""
    names = [name for key, name in ckpt.objects.names.items() if wants(key.rpartition("/")[0])]
    names.append(COMMON_STATE_NAME)
    found = zip(names, ckpt.stored.location.read_many(names), strict=True)
    return {name: data for name, data in found if data is not None}
