"""The parts of tensors and objects that the ranks hold: layouts to plan by, and a check of them.

Before a save, ranks exchange the layouts of irregular and flattened tensors. For irregular cuts,
the grid depends on the boundaries of all ranks. For flattened ranges, several ranks may hold parts
of one chunk. All other tensors need no exchange.

In the check, each rank reports its shards, and one rank checks that all ranks describe each tensor
and object alike, and that main replicas cover it once. The geometry at the end is exact for any
boxes, and takes nearly linear time in the number of boxes for the cuts of real models.
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    DTypeMismatchError,
    ShapeMismatchError,
)
from shardstore.mapping import (
    ShardedObject,
    ShardedTensor,
    data_shape,
    flat_bounds,
    is_main_replica,
    local_box,
)
from shardstore.storage.format.grid import Box, cut_gcd

# -- layouts ---------------------------------------------------------------------------------------


class FlatRange(NamedTuple):
    """Elements ``start:stop`` of a flattened shard, held by a rank."""

    start: int
    stop: int
    rank: int


@dataclass
class Layouts:
    """The layouts of all ranks, for tensors that a rank cannot plan alone.

    Attributes:
        edges: key -> lengths of the cells that no boundary crosses, for irregular cuts.
        ranges: key -> shard box -> the flattened ranges of this shard, in order.
    """

    edges: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: dict[str, dict[Box, list[FlatRange]]] = field(default_factory=dict)


def as_flat_range(rows: ShardedTensor) -> ShardedTensor:
    """Return a shard of whole rows as a flattened range of the global tensor."""
    shape = rows.global_shape
    start = rows.global_offset[0] * math.prod(shape[1:])
    return replace(
        rows,
        data=None if rows.data is None else rows.data.detach().reshape(-1),
        local_shape=shape,
        global_offset=(0,) * len(shape),
        axis_fragmentations=(1,) * len(shape),
        flattened_range=slice(start, start + math.prod(rows.local_shape)),
    )


def is_empty_range(tensor: ShardedTensor) -> bool:
    """Return whether a tensor is a flattened range without elements. Such a range is neither saved
    nor loaded."""
    return tensor.flattened_range is not None and data_shape(tensor) == (0,)


def is_alone(tensor: ShardedTensor) -> bool:
    """Return whether a rank can plan this shard without the layouts of other ranks."""
    if tensor.flattened_range is not None:
        return False
    return tensor.axis_fragmentations is not None or local_box(tensor).shape == tensor.global_shape


def needs_layouts(tensors: Iterable[ShardedTensor]) -> bool:
    """Return whether the ranks must exchange layouts: irregular cuts or flattened ranges."""
    return any(is_main_replica(tensor.replica_id) and not is_alone(tensor) for tensor in tensors)


def local_layouts(tensors: Iterable[ShardedTensor], rank: int) -> bytes:
    """Return this rank's part of :class:`Layouts` as a message."""
    entries = []
    for tensor in tensors:
        if is_main_replica(tensor.replica_id) and not is_alone(tensor):
            is_flat = tensor.flattened_range is not None
            bounds = FlatRange(*flat_bounds(tensor), rank) if is_flat else None
            irregular = tensor.axis_fragmentations is None
            entries.append(
                (tensor.key, tensor.global_shape, irregular, local_box(tensor), bounds, rank)
            )
    return pickle.dumps(entries)


def merge_layouts(reports: Sequence[bytes]) -> Layouts:
    """Merge the messages of all ranks.

    Raises:
        AccessPatternError: ranges of a shard overlap or leave a gap, or ranks give a tensor
            different global shapes; the text names key, shard, range and ranks.
    """
    layouts = Layouts()
    shards: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for report in reports:
        for key, global_shape, irregular, box, bounds, rank in pickle.loads(report):
            if irregular:
                shape, boxes = shards.setdefault(key, (global_shape, []))
                if shape != global_shape:
                    raise AccessPatternError(
                        f"Invalid access pattern: rank {rank} gives key {key!r} the global shape "
                        f"{global_shape}, another rank {shape}",
                        key=key,
                        rank=rank,
                    )
                boxes.append(box)
            if bounds is not None:
                by_shard = layouts.ranges.setdefault(key, {})
                by_shard.setdefault(box, []).append(bounds)
    for key, (shape, boxes) in shards.items():
        layouts.edges[key] = cut_gcd(shape, boxes)
    for key, by_shard in layouts.ranges.items():
        for box, ranges in by_shard.items():
            by_shard[box] = sorted(r for r in ranges if r.stop > r.start)
            check_flat_ranges(key, box, by_shard[box])
    return layouts


def is_first(tensor: ShardedTensor) -> bool:
    """Return whether this is the main replica of the first shard; its rank creates the array."""
    if not is_main_replica(tensor.replica_id) or any(o != 0 for o in tensor.global_offset):
        return False
    return tensor.flattened_range is None or flat_bounds(tensor)[0] == 0


def check_flat_ranges(key: str, box: Box, ranges: Sequence[FlatRange]) -> None:
    """Check that flattened ranges cover a shard exactly once.

    Raises:
        AccessPatternError: elements are held twice or not at all; the text names them and the
            ranks.
    """
    fault = find_tiling_fault([((r.start,), (r.stop - r.start,)) for r in ranges], (box.size,))
    if fault is None:
        return
    ranks = [ranges[number].rank for number in fault.shards]
    many = f"are held by {len(ranks)} main replicas, on ranks {sorted(ranks)[:16]}"
    raise AccessPatternError(
        f"Invalid access pattern: Flattened ranges dont cover the whole shard ShardedTensor("
        f"key={key!r}, offset {box.offset}, shape {box.shape}), {box.size} elements, exactly once: "
        f"elements {fault.offset[0]}:{fault.offset[0] + fault.shape[0]} "
        f"{many if ranks else 'are held by no rank'}; ranges by rank: "
        f"{sorted((r.rank, r.start, r.stop) for r in ranges)[:8]}",
        key=key,
        rank=ranks[0] if ranks else None,
    )


# -- coverage --------------------------------------------------------------------------------------

_cut_of = attrgetter(*(f.name for f in fields(ShardedTensor) if f.name not in ("key", "data")))
_Tensors = list[tuple[int, ShardedTensor]]
_Objects = list[tuple[int, ShardedObject]]
"""Shards of one key, each with the rank that holds it."""


def report_shards(shards: Iterable[Any]) -> bytes:
    """Return a report of a rank's shards. Other values are left out.

    Many tensors have the same cut. So a report contains the distinct cuts, and the key and the
    number of the cut of each tensor. This is much faster than pickling the shards themselves.
    """
    keys: list[str] = []
    numbers: list[int] = []
    cuts: dict[tuple[Any, ...], int] = {}
    objects: list[ShardedObject] = []
    for item in shards:
        if isinstance(item, ShardedTensor):
            *values, flat = _cut_of(item)
            values.append(None if flat is None else (flat.start, flat.stop))
            if list in map(type, values):  # the caller assigned lists instead of tuples
                values = [tuple(value) if type(value) is list else value for value in values]
            keys.append(item.key)
            numbers.append(cuts.setdefault(tuple(values), len(cuts)))
        elif isinstance(item, ShardedObject):
            objects.append(item.without_data())
    return pickle.dumps([(tuple(keys), tuple(numbers), list(cuts), objects)])


def join_reports(reports: Iterable[bytes]) -> bytes:
    """Join the reports of several ranks into one, with equal parts stored once."""
    known: dict[Any, Any] = {}
    parsed = [one for report in reports for one in pickle.loads(report)]
    return pickle.dumps(
        [
            (known.setdefault(keys, keys), known.setdefault(numbers, numbers), *rest)
            for keys, numbers, *rest in parsed
        ]
    )


def shards_of_report(report: bytes) -> list[list[ShardedTensor | ShardedObject]]:
    """Return the shards that a report describes, without data: one list for each of its ranks."""
    return [[*_tensors(one, set(one[0])), *one[3]] for one in pickle.loads(report)]


def _tensors(parsed: Any, of: set[str]) -> Iterator[ShardedTensor]:
    """Yield the tensors of a report whose keys are in ``of``."""
    keys, numbers, cuts, _ = parsed
    for key, number in zip(keys, numbers, strict=True):
        if key in of:
            *values, flat = cuts[number]
            values.append(None if flat is None else slice(*flat))
            yield ShardedTensor(key, None, *values)


def check_reports(reports: Sequence[bytes]) -> None:
    """Check that the main replicas of all ranks cover every tensor and object exactly once.

    Any rank may call it; it waits for no rank. Time is nearly linear in the number of shards;
    tensors with the same cuts on the same ranks are checked once.

    Args:
        reports: results of :func:`report_shards` on all ranks, in rank order; some may be joined.

    Raises:
        AccessPatternError: a part is covered twice or not at all; the text names key, region and
            ranks.
        ShapeMismatchError, DTypeMismatchError: ranks describe the global tensor differently.
    """
    parsed = [one for report in reports for one in pickle.loads(report)]
    known: dict[tuple[Any, ...], int] = {}
    held: dict[str, list[int]] = defaultdict(list)  # number of the cut on each rank
    objects: dict[str, _Objects] = defaultdict(list)
    for rank, (keys, numbers, cuts, items) in enumerate(parsed):
        renumbered = [known.setdefault(cut, len(known)) for cut in cuts]
        for key, number in zip(keys, numbers, strict=True):
            held[key].append(renumbered[number])
        for item in items:
            objects[item.key].append((rank, item))
    both = sorted(held.keys() & objects.keys())
    samples = {tuple(cuts): key for key, cuts in reversed(held.items())}
    looked_at = {*samples.values(), *both}
    tensors: dict[str, _Tensors] = defaultdict(list)
    for rank, report in enumerate(parsed):
        for tensor in _tensors(report, looked_at):
            tensors[tensor.key].append((rank, tensor))
    for key in both:
        raise AccessPatternError(
            f"Invalid access pattern: {key!r} is a ShardedTensor on ranks "
            f"{_ranks(tensors[key])} and a ShardedObject on ranks {_ranks(objects[key])}; "
            f"rename one",
            key=key,
        )
    for sharding in tensors.values():
        _check_tensor(sharding)
    for sharded_objects in objects.values():
        check_object(sharded_objects)


def _check_tensor(held: _Tensors) -> None:
    """Check that ranks describe one tensor alike, and that its main replicas tile it."""
    _check_same(held, _AGREED)
    # Flat ranges of one box count as one tile of the global tensor and are checked within it.
    tiles: dict[tuple[Box, int | None], _Tensors] = defaultdict(list)
    for number, (rank, tensor) in enumerate(held):
        box = local_box(tensor)
        if any(end > limit for end, limit in zip(box.end, tensor.global_shape, strict=True)):
            raise AccessPatternError(
                f"Invalid access pattern for {tensor.key!r}: the shard of rank {rank} at offset "
                f"{box.offset} of shape {box.shape} reaches outside the global shape "
                f"{tensor.global_shape}",
                key=tensor.key,
                rank=rank,
            )
        if is_main_replica(tensor.replica_id):
            own_tile = number if tensor.flattened_range is None else None
            tiles[box, own_tile].append((rank, tensor))
    sample = held[0][1]
    fault = find_tiling_fault([box for box, _ in tiles], sample.global_shape)
    if fault is not None:
        owners = list(tiles.values())
        concerned = [one for number in fault.shards for one in owners[number]]
        many = f"has {len(concerned)} main replicas, on ranks {_ranks(concerned)}"
        raise AccessPatternError(
            f"Invalid access pattern for {sample.key!r}, of global shape {sample.global_shape} and "
            f"held by ranks {_ranks(held)}: the region at offset {fault.offset} of shape "
            f"{fault.shape} {many if concerned else 'has no main replica on any rank'}. Each "
            f"element must belong to exactly one shard with replica_id 0; check offsets and "
            f"replica ids. One of the shards: {sample.without_data()}",
            key=sample.key,
            rank=concerned[0][0] if concerned else None,
        )
    for (box, own_tile), members in tiles.items():
        if own_tile is None:
            ranges = [FlatRange(*flat_bounds(tensor), rank) for rank, tensor in members]
            check_flat_ranges(sample.key, box, ranges)


def _check_same(held: _Tensors | _Objects, names: Iterable[str]) -> None:
    """Check that all ranks, replicas included, give a tensor or object the same attributes."""
    first_rank, first = held[0]
    for rank, item in held:
        for name in names:
            ours, theirs = getattr(first, name), getattr(item, name)
            if ours != theirs and (name != "axis_fragmentations" or None in (ours, theirs)):
                raise _AGREED[name](
                    f"Invalid access pattern: {item.key!r} has {name} {ours} on rank {first_rank} "
                    f"and {theirs} on rank {rank}; ranks must agree",
                    key=item.key,
                    rank=rank,
                )


_AGREED: dict[str, type[CheckpointingException]] = {
    "dtype": DTypeMismatchError,
    "global_shape": ShapeMismatchError,
    "axis_fragmentations": AccessPatternError,
}
"""Attributes that must be equal on all ranks -> the error if they differ. For fragmentations, only
``None`` on some of the ranks is an error."""


def check_object(held: list[tuple[int, ShardedObject]]) -> None:
    """Check that each element of a global object has exactly one main replica.

    Args:
        held: the parts of one key, each with the rank that holds it.

    Raises:
        AccessPatternError, ShapeMismatchError: see :func:`check_reports`.
    """
    _check_same(held, ("global_shape",))
    first = held[0][1]
    holders: dict[str, _Objects] = defaultdict(list)
    for rank, item in held:
        if is_main_replica(item.replica_id):
            holders[item.unique_key].append((rank, item))
    duplicates = {key: _ranks(mains) for key, mains in holders.items() if len(mains) > 1}
    if duplicates:
        shown = "; ".join(f"{key} on ranks {ranks}" for key, ranks in duplicates.items())
        raise AccessPatternError(
            f"Duplicate ShardedObject keys: {sorted(duplicates)}. Invalid access pattern: {shown} "
            f"all with replica_id 0; give the copies different replica ids",
            key=first.key,
            rank=next(iter(duplicates.values()))[0],
        )
    wanted = math.prod(first.global_shape)
    if len(holders) < wanted:
        raise AccessPatternError(
            f"Invalid access pattern: {wanted - len(holders)} ShardedObject are missing of "
            f"{first.key!r}, of global shape {first.global_shape}: {len(holders)} of the {wanted} "
            f"have a main replica, {sorted(holders)[:8]}; every part needs one",
            key=first.key,
        )


def _ranks(held: _Tensors | _Objects) -> list[int]:
    """Return the ranks that hold shards, at most 16 of them."""
    return sorted({rank for rank, _ in held})[:16]


# -- geometry --------------------------------------------------------------------------------------

# Largest number of grid cells that are counted at once. A region with more is cut in two.
_MAX_CELLS = 1 << 20


class TilingFault(NamedTuple):
    """A part of the region that is not covered exactly once.

    Attributes:
        offset: where the part begins.
        shape: its extent.
        shards: numbers of the boxes that cover all of it: none, or two and more.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    shards: tuple[int, ...]


def find_tiling_fault(
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]], global_shape: Sequence[int]
) -> TilingFault | None:
    """Find a part of a global shape that boxes leave uncovered or cover twice.

    Args:
        boxes: offset and extent of each box. Boxes without elements, and parts outside the global
            shape, are ignored.
        global_shape: the region to tile, from the origin.

    Returns:
        One fault, or None if each element is in exactly one box.
    """
    ndim = len(global_shape)
    bounds = np.array(boxes, np.int64).reshape(len(boxes), 2, ndim).cumsum(axis=1)
    # Regions that are not yet checked: their bounds, and the numbers of boxes that may overlap.
    pending = [(np.zeros(ndim, np.int64), np.array(global_shape, np.int64), np.arange(len(boxes)))]
    while pending:
        low, high, numbers = pending.pop()
        starts, stops = bounds[numbers].clip(low, high).swapaxes(0, 1)
        inside = np.all(stops > starts, axis=1)
        starts, stops, numbers = starts[inside], stops[inside], numbers[inside]
        # The edges of all boxes form a grid. Count the boxes that cover each of its cells.
        edges, spans = [], np.zeros((ndim, 2, len(numbers)), np.int64)
        for axis in range(ndim):
            bounds_of_axis = [[low[axis], high[axis]], starts[:, axis], stops[:, axis]]
            found, places = np.unique(np.concatenate(bounds_of_axis), return_inverse=True)
            edges.append(found)
            spans[axis] = places[2:].reshape(2, -1)
        cells = [len(found) - 1 for found in edges]
        if math.prod(cells) > _MAX_CELLS:
            axis = int(np.argmax(cells))
            left_high, right_low = high.copy(), low.copy()
            left_high[axis] = right_low[axis] = edges[axis][cells[axis] // 2]
            pending += [(right_low, high, numbers), (low, left_high, numbers)]
            continue
        counts = np.zeros(cells, np.int64)
        for first, last in zip(*spans.transpose(1, 2, 0).tolist(), strict=True):
            counts[tuple(map(slice, first, last))] += 1
        for cell in np.argwhere(counts != 1)[:1].tolist():
            offset = tuple(int(edges[axis][i]) for axis, i in enumerate(cell))
            end = tuple(int(edges[axis][i + 1]) for axis, i in enumerate(cell))
            covering = np.all((starts <= offset) & (stops >= end), axis=1)
            shape = tuple(b - a for a, b in zip(offset, end, strict=True))
            return TilingFault(offset, shape, tuple(numbers[covering].tolist()))
    return None
