"""What ranks tell each other of the shards that they want to load, and a quick check of it.

A report is keys and numbers of cuts, a fraction of the work of pickling the shards themselves. The
coordinator looks through all of them: arrangements that are plainly right (equal boxes on a regular
grid, flat ranges end to end) are recognised in a few microseconds a shard; for everything else
:func:`shardstore.coverage.access_pattern.check_access` decides and words the error. Knows nothing
of files or process groups.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardstore.coverage.access_pattern import check_access
from shardstore.mapping import ReplicaId, ShardedObject, ShardedTensor, is_main_replica

__all__ = ["check_reports", "report_shards", "shards_of_report"]


class _Cut(NamedTuple):
    """A :class:`ShardedTensor` without its key and its data, field by field; the range as a
    tuple."""

    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId
    prepend_axis_num: int
    allow_shape_mismatch: bool
    flattened_range: tuple[int, int, int | None] | None

    def tensor(self, key: str) -> ShardedTensor:
        flat = None if self.flattened_range is None else slice(*self.flattened_range)
        return ShardedTensor(key, None, *self[:-1], flat)


class _Numbered:
    """Different cuts, each with a number."""

    def __init__(self) -> None:
        self.cuts: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, cut: tuple[Any, ...]) -> int:
        try:
            found = self._numbers.setdefault(cut, len(self.cuts))
        except TypeError:  # someone's replica_id is a list
            found = len(self.cuts)
        if found == len(self.cuts):
            self.cuts.append(cut)
        return found


class _Report(NamedTuple):
    """What one rank holds: the key of each tensor, and the position of its cut in ``cuts``. Many
    tensors are cut alike, so it is little more than the keys."""

    keys: list[str]
    numbers: list[int]
    cuts: list[tuple[Any, ...]]
    objects: list[ShardedObject]

    def tensors(self, of: Container[str] | None = None) -> list[ShardedTensor]:
        """All tensors, or those of some keys."""
        cuts = [_Cut._make(cut) for cut in self.cuts]
        return [
            cuts[n].tensor(key)
            for key, n in zip(self.keys, self.numbers, strict=True)
            if of is None or key in of
        ]


def report_shards(shards: Iterable[Any]) -> bytes:
    """Describe a rank's shards; what is no shard is left out."""
    keys: list[str] = []
    numbers: list[int] = []
    numbered = _Numbered()
    objects: list[ShardedObject] = []
    for item in shards:
        if isinstance(item, ShardedTensor):
            flat = item.flattened_range
            cut = (
                item.dtype,
                item.local_shape,
                item.global_shape,
                item.global_offset,
                item.axis_fragmentations,
                item.replica_id,
                item.prepend_axis_num,
                item.allow_shape_mismatch,
                None if flat is None else (flat.start, flat.stop, flat.step),
            )
            keys.append(item.key)
            numbers.append(numbered.number(cut))
        elif isinstance(item, ShardedObject):
            objects.append(item.without_data())
    return pickle.dumps((keys, numbers, numbered.cuts, objects))


def _parse(report: bytes) -> _Report:
    return _Report._make(pickle.loads(report))


def shards_of_report(report: bytes) -> list[ShardedTensor | ShardedObject]:
    """The shards that a report describes, without data."""
    parsed = _parse(report)
    return [*parsed.tensors(), *parsed.objects]


def check_reports(reports: Sequence[bytes]) -> None:
    """Check that the main replicas of all ranks cover each tensor and object exactly once.

    Called on the coordinator. Time is linear in the number of shards where these lie on regular
    grids.

    Args:
        reports: of every rank, by rank.

    Raises:
        AccessPatternError, ShapeMismatchError, DTypeMismatchError: see
            :func:`shardstore.coverage.access_pattern.check_access`.
    """
    numbered = _Numbered()
    held: dict[str, list[int]] = {}  # the number of each holder's cut, by rank
    parsed = [_parse(report) for report in reports]
    for report in parsed:
        numbers = [numbered.number(cut) for cut in report.cuts]
        for key, n in zip(report.keys, report.numbers, strict=True):
            held.setdefault(key, []).append(numbers[n])
    cuts = [_Cut._make(cut) for cut in numbered.cuts]
    # What holds for one tensor holds for all that ranks cut in the same way.
    known: dict[tuple[int, ...], bool] = {}
    doubtful = {item.key for report in parsed for item in report.objects}
    for key, cut in held.items():
        together = tuple(cut)
        right = known.get(together)
        if right is None:
            right = known[together] = _tiles([cuts[n] for n in cut])
        if not right:
            doubtful.add(key)
    if doubtful:
        check_access([[*report.objects, *report.tensors(doubtful)] for report in parsed])


def _tiles(shards: Sequence[_Cut]) -> bool:
    """Whether shards of one key are plainly right; ``False`` where that takes a closer look."""
    first = shards[0]
    shape, regular = first.global_shape, first.axis_fragmentations is not None
    boxes: dict[tuple[int, ...], tuple[tuple[int, ...], list[tuple[int, int]] | None]] = {}
    for shard in shards:
        if (
            shard.dtype != first.dtype
            or shard.global_shape != shape
            or (shard.axis_fragmentations is not None) != regular
        ):
            return False
        offset, extent = shard.global_offset, (1,) * shard.prepend_axis_num + shard.local_shape
        if any(o + e > n for o, e, n in zip(offset, extent, shape, strict=True)):
            return False
        if not is_main_replica(shard.replica_id):
            continue
        known = boxes.get(offset)
        if shard.flattened_range is None:
            if known is not None:
                return False
            boxes[offset] = (extent, None)
            continue
        start, stop, _ = slice(*shard.flattened_range).indices(math.prod(extent))
        if known is None:
            known = boxes[offset] = (extent, [])
        if known[0] != extent or known[1] is None:
            return False
        known[1].append((start, stop))
    return _on_grid(boxes, shape) and all(
        ranges is None or _end_to_end(ranges, math.prod(extent))
        for extent, ranges in boxes.values()
    )


def _on_grid(
    boxes: dict[tuple[int, ...], tuple[tuple[int, ...], list[tuple[int, int]] | None]],
    shape: tuple[int, ...],
) -> bool:
    """Whether boxes of different offsets are all the cells of one regular grid."""
    corner = boxes.get((0,) * len(shape))
    if corner is None or not all(corner[0]):
        return False
    edges = corner[0]
    if len(boxes) != math.prod(-(-n // e) for n, e in zip(shape, edges, strict=True)):
        return False
    return all(
        o % e == 0 and size == min(e, n - o)
        for offset, (extent, _) in boxes.items()
        for o, size, e, n in zip(offset, extent, edges, shape, strict=True)
    )


def _end_to_end(ranges: list[tuple[int, int]], size: int) -> bool:
    position = 0
    for start, stop in sorted(r for r in ranges if r[1] > r[0]):
        if start != position:
            return False
        position = stop
    return position == size
