"""Reports of the shards that ranks want to load, and their check by the coordinator.

A report holds keys and numbers of cuts, a fraction of the work of pickling the shards themselves.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shardstore.coverage.access_pattern import check_access
from shardstore.mapping import ReplicaId, ShardedObject, ShardedTensor

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

    Called on the coordinator. Tensors that ranks cut in the same way are checked once.

    Args:
        reports: of every rank, by rank.

    Raises:
        AccessPatternError, ShapeMismatchError, DTypeMismatchError: see
            :func:`shardstore.coverage.access_pattern.check_access`.
    """
    numbered = _Numbered()
    held: dict[str, list[int]] = defaultdict(list)  # the number of each holder's cut, by rank
    parsed = [_parse(report) for report in reports]
    for report in parsed:
        numbers = [numbered.number(cut) for cut in report.cuts]
        for key, n in zip(report.keys, report.numbers, strict=True):
            held[key].append(numbers[n])
    samples = {tuple(cuts): key for key, cuts in sorted(held.items(), reverse=True)}
    keys = {*samples.values(), *(item.key for report in parsed for item in report.objects)}
    check_access([[*report.objects, *report.tensors(keys)] for report in parsed])
