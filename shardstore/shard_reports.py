"""What ranks tell each other of the shards that they want to load, and a quick check of it.

A report is a list of plain tuples, a fraction of the work of pickling the shards themselves. The
coordinator looks through all of them: arrangements that are plainly right (equal boxes on a regular
grid, flat ranges end to end) are recognised in a few microseconds a shard; for everything else
:func:`shardstore.access_pattern.check_access` decides and words the error. Knows nothing
of files or process groups.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardstore.access_pattern import check_access
from shardstore.mapping import ReplicaId, ShardedObject, ShardedTensor, is_main_replica

__all__ = ["check_reports", "report_shards", "shards_of_report"]


class _Shard(NamedTuple):
    """A :class:`ShardedTensor` without its data, field by field."""

    key: str
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId
    prepend_axis_num: int
    allow_shape_mismatch: bool
    flattened_range: slice | None

    def tensor(self) -> ShardedTensor:
        return ShardedTensor(self.key, None, *self[1:])


Report = tuple[list[_Shard], list[ShardedObject]]


def report_shards(shards: Iterable[Any]) -> bytes:
    """Describe a rank's shards; what is no shard is left out."""
    tensors: list[tuple[Any, ...]] = []
    objects: list[ShardedObject] = []
    for item in shards:
        if isinstance(item, ShardedTensor):
            tensors.append(
                (
                    item.key,
                    item.dtype,
                    item.local_shape,
                    item.global_shape,
                    item.global_offset,
                    item.axis_fragmentations,
                    item.replica_id,
                    item.prepend_axis_num,
                    item.allow_shape_mismatch,
                    item.flattened_range,
                )
            )
        elif isinstance(item, ShardedObject):
            objects.append(item.without_data())
    return pickle.dumps((tensors, objects))


def _parse(report: bytes) -> Report:
    tensors, objects = pickle.loads(report)
    return [_Shard._make(fields) for fields in tensors], objects


def shards_of_report(report: bytes) -> list[ShardedTensor | ShardedObject]:
    """The shards that a report describes, without data."""
    tensors, objects = _parse(report)
    return [*(shard.tensor() for shard in tensors), *objects]


def check_reports(reports: Sequence[bytes]) -> None:
    """Check that the main replicas of all ranks cover each tensor and object exactly once.

    Called on the coordinator. Time is linear in the number of shards where these lie on regular
    grids.

    Args:
        reports: of every rank, by rank.

    Raises:
        AccessPatternError, ShapeMismatchError, DTypeMismatchError: see
            :func:`shardstore.access_pattern.check_access`.
    """
    by_key: dict[str, list[tuple[int, _Shard]]] = {}
    suspects: list[list[ShardedTensor | ShardedObject]] = []
    object_keys: set[str] = set()
    for rank, report in enumerate(reports):
        tensors, objects = _parse(report)
        for shard in tensors:
            by_key.setdefault(shard.key, []).append((rank, shard))
        object_keys.update(item.key for item in objects)
        suspects.append(list(objects))
    for key, held in by_key.items():
        if key in object_keys or not _tiles([shard for _, shard in held]):
            for rank, shard in held:
                suspects[rank].append(shard.tensor())
    if any(suspects):
        check_access(suspects)


def _tiles(shards: Sequence[_Shard]) -> bool:
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
        start, stop, _ = shard.flattened_range.indices(math.prod(extent))
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
