"""What differs between two checkpoints.

Chunks whose hashes in the two manifests agree are taken for equal and not read; all others are read
and compared bit by bit, so that 0.0 and -0.0 differ, and a NaN equals itself. Knows arrays and
files; not what a difference means.
"""

from __future__ import annotations

import math
import threading
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.statistics import BLOCK, as_float64, sum_of_squares
from shardstore.inspection.streaming import DEFAULT_BUDGET_BYTES, read_box, stream
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.object_files import beside_arrays
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box

__all__ = ["ArrayDifference", "Difference", "compare"]

READ_TOGETHER = 8
"""Sharded objects of an object store that are read at a time; each is whole in memory."""


@dataclass
class ArrayDifference:
    """How the values of one key differ.

    Attributes:
        elements: number of elements whose bits differ, out of ``of``.
        chunks: number of chunks (of the first checkpoint's grid) with a difference, out of
            ``chunks_of``.
        max_abs: largest absolute difference of two finite values.
        norm: Euclidean norm of the differences of finite values.
        norm_a: Euclidean norm of the finite values of the first, over the chunks that were read.
        nonfinite: elements that differ and are NaN or infinite on one side at least.
        damage: what could not be read.
    """

    elements: int = 0
    of: int = 0
    chunks: int = 0
    chunks_of: int = 0
    max_abs: float = 0.0
    norm: float = 0.0
    norm_a: float = 0.0
    nonfinite: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass
class Difference:
    """What differs between checkpoints A and B.

    Attributes:
        only_a, only_b: keys on one side alone.
        described: key -> property -> both sides, where shapes or data types differ.
        values: key -> difference, where bits differ or could not be read.
        files: ``common.pt`` and sharded objects that differ, or that one side lacks.
        equal: number of keys whose values are equal.
        hashed: number of keys of these that were told equal by hashes alone.
        bytes_read: of values.
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
        """Nothing differs."""
        found = (self.only_a, self.only_b, self.described, self.values, self.files)
        return not any(found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"same": self.same, **asdict(self)}


def compare(
    a: StoredCheckpoint,
    b: StoredCheckpoint,
    wants: Callable[[str], bool] = lambda key: True,
    *,
    files: bool = True,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Difference:
    """Compare two checkpoints. One process calls it; it changes nothing.

    Args:
        a, b: the checkpoints.
        wants: whether a key is to be compared.
        files: compare ``common.pt`` and the sharded objects too.
        budget_bytes: memory for values at a time.
        progress: called with bytes of A compared since the last call; values alone.
    """
    out = Difference()
    left = {key: meta for key, meta in a.arrays.items() if wants(key)}
    right = {key: meta for key, meta in b.arrays.items() if wants(key)}
    out.only_a = sorted(set(left) - set(right))
    out.only_b = sorted(set(right) - set(left))
    suspects: dict[str, set[int] | None] = {}
    for key in sorted(set(left) & set(right)):
        mine, other = left[key], right[key]
        if differs := _described(mine, other):
            out.described[key] = differs
            continue
        suspects[key] = _suspects(a, b, mine, other)
        if suspects[key] == set():
            out.equal += 1
            out.hashed += 1
    todo = [left[key] for key, chunks in suspects.items() if chunks != set()]
    _Values(a, b, right, suspects, out).run(todo, budget_bytes, progress)
    if files:
        out.files = _files(a, b, wants)
    return out


def _described(a: ArrayMeta, b: ArrayMeta) -> dict[str, tuple[Any, Any]]:
    pairs = {"shape": (list(a.shape), list(b.shape)), "dtype": (a.dtype, b.dtype)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _suspects(
    a: StoredCheckpoint, b: StoredCheckpoint, mine: ArrayMeta, other: ArrayMeta
) -> set[int] | None:
    """Chunks that may differ; ``None``: any, for want of hashes of equally cut chunks."""
    rows = []
    for stored, meta in ((a, mine), (b, other)):
        try:
            manifest = stored.manifest
        except DamagedCheckpointError:
            return None
        row = None if manifest is None else manifest.first_row(meta)
        if manifest is None or row is None:
            return None
        rows.append(manifest.digest[row : row + meta.grid.size])
    if mine.grid != other.grid:
        return None
    return {int(i) for i in np.flatnonzero((rows[0] != rows[1]).any(axis=1))}


class _Values:
    """Compares values, piece by piece."""

    def __init__(
        self,
        a: StoredCheckpoint,
        b: StoredCheckpoint,
        right: dict[str, ArrayMeta],
        suspects: dict[str, set[int] | None],
        out: Difference,
    ) -> None:
        self.a, self.b, self.right, self.suspects, self.out = a, b, right, suspects, out
        self.lock = threading.Lock()
        self.found: dict[str, ArrayDifference] = {}
        self.touched: dict[str, set[int]] = {}

    def run(
        self,
        arrays: Sequence[ArrayMeta],
        budget_bytes: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        for array in arrays:
            size = math.prod(array.shape)
            self.found[array.key] = ArrayDifference(of=size, chunks_of=array.grid.size)
            self.touched[array.key] = set()
        stream(
            arrays, self.work, self.failed, budget_bytes=budget_bytes, copies=2, progress=progress
        )
        for key, found in self.found.items():
            found.chunks = len(self.touched[key])
            if found.elements or found.damage:
                self.out.values[key] = found
            else:
                self.out.equal += 1

    def failed(self, array: ArrayMeta, error: DamagedCheckpointError) -> None:
        self.found[array.key].damage.append(str(error))

    def work(self, array: ArrayMeta, box: Box) -> None:
        corner = zip(box.offset, array.grid.chunk_shape, strict=True)
        chunk = array.grid.linear([start // edge for start, edge in corner])
        suspects = self.suspects[array.key]
        if suspects is not None and chunk not in suspects:
            return
        mine = read_box(self.a, array, box)
        other = read_box(self.b, self.right[array.key], box)
        part = _difference(mine, other)
        with self.lock:
            self.out.bytes_read += mine.nbytes + other.nbytes
            found = self.found[array.key]
            found.elements += part.elements
            found.nonfinite += part.nonfinite
            found.max_abs = max(found.max_abs, part.max_abs)
            found.norm = math.hypot(found.norm, part.norm)
            found.norm_a = math.hypot(found.norm_a, part.norm_a)
            if part.elements:
                self.touched[array.key].add(chunk)


def _difference(a: NDArray[Any], b: NDArray[Any]) -> ArrayDifference:
    out = ArrayDifference()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, BLOCK):
        x, y = flat_a[start : start + BLOCK], flat_b[start : start + BLOCK]
        width = x.dtype.itemsize
        bits = (part.view(np.uint8).reshape(-1, width) for part in (x, y))
        left, right = bits
        differ = (left != right).any(axis=1)
        mine = as_float64(x)
        finite = mine[np.isfinite(mine)]
        out.norm_a = math.hypot(out.norm_a, math.sqrt(sum_of_squares(finite)))
        count = int(np.count_nonzero(differ))
        if not count:
            continue
        out.elements += count
        with np.errstate(over="ignore", invalid="ignore"):
            delta = _delta(x[differ], y[differ])
        good = delta[np.isfinite(delta)]
        out.nonfinite += count - good.size
        if good.size:
            out.max_abs = max(out.max_abs, float(good.max()))
            out.norm = math.hypot(out.norm, math.sqrt(sum_of_squares(good)))
    return out


def _delta(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
    """Absolute differences as float64; NaN where a side is not finite."""
    out: NDArray[np.float64]
    if x.dtype.kind == "c":
        out = np.abs(x.astype(np.complex128) - y.astype(np.complex128))
    elif x.dtype.kind in "iu":  # wraps around to what is right, also where float64 would not be
        wrapped = np.maximum(x, y) - np.minimum(x, y)
        out = wrapped.view(f"u{x.dtype.itemsize}").astype(np.float64)
    else:
        out = np.abs(as_float64(x) - as_float64(y))
    return out


def _files(
    a: StoredCheckpoint, b: StoredCheckpoint, wants: Callable[[str], bool]
) -> dict[str, str]:
    left, right = _contents(a, wants), _contents(b, wants)
    out = {name: "only in A" for name in left if name not in right}
    out |= {name: "only in B" for name in right if name not in left}
    both = (name for name in left if name in right)
    return out | {name: "differs" for name in both if left[name] != right[name]}


def _contents(stored: StoredCheckpoint, wants: Callable[[str], bool]) -> dict[str, object]:
    """What stands for the content of each file of torch: its records' names and checksums."""
    out: dict[str, object] = {}
    nodes = {array.node for array in stored.arrays.values()}
    top = stored.location.listing()
    if "common.pt" in top:
        out["common.pt"] = _records(stored.location.read("common.pt"))
    paths = [
        f"{found.name}/{entry}"
        for found in beside_arrays(stored.location, top, nodes, wants)
        for entry in found.objects
    ]
    if stored.location.is_local:
        return out | {path: _records(stored.location.read(path)) for path in paths}
    from shardstore.storage.stores.object_io import (
        read_objects,  # with all that talks to object stores
    )

    for at in range(0, len(paths), READ_TOGETHER):
        several = paths[at : at + READ_TOGETHER]
        for path, data in zip(several, read_objects(stored.location, several), strict=True):
            if data is None:
                raise FileNotFoundError(f"{stored.location.url}/{path}")
            out[path] = _records(data)
    return out


def _records(data: bytes) -> object:
    try:
        with zipfile.ZipFile(BytesIO(data)) as file:
            return sorted(
                (record.filename.partition("/")[2], record.file_size, record.CRC)
                for record in file.infolist()
            )
    except (zipfile.BadZipFile, NotImplementedError):
        # No archive, or one of a later version of ZIP: all of its bytes stand for its content.
        return data
