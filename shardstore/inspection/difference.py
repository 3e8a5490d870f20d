"""Comparison of two checkpoints.

Chunks whose hashes in the two manifests agree are equal and are not read. All others are read and
compared bit by bit, so that 0.0 and -0.0 differ, and a NaN equals itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.opened import OpenCheckpoint, StoredArray
from shardstore.inspection.statistics import (
    BLOCK,
    DEFAULT_BUDGET_BYTES,
    Progress,
    Statistics,
    as_float64,
    stream,
)
from shardstore.storage.format.grid import Box
from shardstore.storage.format.names import COMMON_STATE_NAME

READ_TOGETHER = 8
"""Number of sharded objects that are in memory at a time."""


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
    progress: Progress = None,
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
    damage: dict[str, list[str]] = {key: [] for key in suspects}
    lock = threading.Lock()

    def work(array: StoredArray, box: Box) -> None:
        mine, other = array.read_box(box), right[array.key].read_box(box)
        part, delta = _difference(mine, other)
        with lock:
            out.bytes_read += mine.nbytes + other.nbytes
            values[array.key].merge(part)
            deltas[array.key].merge(delta)
            touched[array.key] += delta.count > 0

    def failed(array: StoredArray, error: DamagedCheckpointError) -> None:
        damage[array.key].append(str(error))

    stream(
        [left[key] for key in suspects],
        work,
        failed,
        operation="compare",
        url=a.url,
        budget_bytes=budget_bytes,
        copies=2,
        progress=progress,
        chosen=lambda array, chunk: chunk in suspects[array.key],
    )
    for key, delta in deltas.items():
        if not delta.count and not damage[key]:
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
            damage=damage[key],
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
    row = None if manifest is None else manifest.first_row(array.meta)
    if manifest is None or row is None:
        return None
    return manifest.digest[row : row + array.meta.grid.size]


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


def _contents(ckpt: OpenCheckpoint, wants: Callable[[str], bool]) -> dict[str, bytes]:
    """Return path -> content, for ``common.pt`` and each chosen sharded object."""
    location = ckpt.stored.location
    names = [name for key, name in ckpt.objects.names.items() if wants(key.rpartition("/")[0])]
    if location.exists(COMMON_STATE_NAME):
        names.append(COMMON_STATE_NAME)
    with ThreadPoolExecutor(READ_TOGETHER) as pool:
        return dict(zip(names, pool.map(location.read, names), strict=True))
