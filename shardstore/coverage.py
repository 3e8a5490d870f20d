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
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import xxhash

from shardstore import errors
from shardstore.mapping import (
    ShardedObject,
    ShardedTensor,
    flat_bounds,
    is_main_replica,
    is_within,
    local_box,
)
from shardstore.storage.format.grid import Box, cut_gcd

# -- layouts ---------------------------------------------------------------------------------------


class FlatRange(NamedTuple):
    """Elements ``start:stop`` of a flattened shard, held by a rank."""

    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
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


def merge_layouts(reports: Sequence[ShardReport], ranks: Sequence[int]) -> Layouts:
    """Merge the reports of all ranks.

    Args:
        reports: each rank's report of its shards that are :func:`.needing_layouts`, in the order
            of ``ranks``.
        ranks: the ranks.

    Raises:
        AccessPatternError: ranges of a shard overlap or leave a gap, or ranks give a tensor
            different global shapes; the text names key, shard, range and ranks.
    """
    layouts = Layouts()
    for key, held in shards_of(reports, ranks).items():
        require_alike(
            held, {"global_shape": errors.AccessPatternError}
        )  # the commit checks the rest
        tensors = [tensor for _, tensor in held if isinstance(tensor, ShardedTensor)]
        irregular = [local_box(one) for one in tensors if one.axis_fragmentations is None]
        if irregular:
            layouts.edges[key] = cut_gcd(tensors[0].global_shape, irregular)
        if ranges := _flat_ranges(held):
            layouts.ranges[key] = ranges
    return layouts


def _flat_ranges(held: _Held) -> dict[Box, list[FlatRange]]:
    """Return the flattened ranges of main replicas by shard, in order. Check that they cover each
    shard exactly once.

    Raises:
        AccessPatternError: elements are held twice or not at all; the text names them and the
            ranks.
    """
    found: dict[Box, list[FlatRange]] = defaultdict(list)
    for rank, item in held:
        if not isinstance(item, ShardedTensor) or item.flattened_range is None:
            continue
        if is_main_replica(item.replica_id):
            found[local_box(item)].append(FlatRange(*flat_bounds(item), rank))
    for box, ranges in found.items():
        ranges[:] = sorted(r for r in ranges if r.stop > r.start)
        fault = find_tiling_fault([((r.start,), (r.stop - r.start,)) for r in ranges], (box.size,))
        if fault is None:
            continue
        key, ranks = held[0][1].key, [ranges[number].rank for number in fault.shards]
        many = f"are held by {len(ranks)} main replicas, on ranks {_first_ranks(ranks)}"
        raise errors.AccessPatternError(
            "Invalid access pattern: Flattened ranges dont cover the whole shard ShardedTensor("
            f"key={key!r}, offset {box.offset}, shape {box.shape}), {box.size} elements, exactly "
            f"once: elements {fault.offset[0]}:{fault.offset[0] + fault.shape[0]} "
            f"{many if ranks else 'are held by no rank'}; ranges by rank: "
            f"{sorted((r.rank, r.start, r.stop) for r in ranges)[:8]}",
            key=key,
            rank=ranks[0] if ranks else None,
        )
    return dict(found)


# -- coverage --------------------------------------------------------------------------------------

_tensor_cut = attrgetter(*(f.name for f in fields(ShardedTensor) if f.name not in ("key", "data")))
_object_cut = attrgetter("global_shape", "global_offset", "replica_id")
_OBJECT_VALUES = 3
_Held = list[tuple[int, ShardedTensor | ShardedObject]]
"""Shards of one key, each with the rank that holds it."""


class RankShards(NamedTuple):
    """The shards of one rank. Many have the same cut, and pickling the shards themselves takes much
    longer.

    Attributes:
        keys: the key of each shard.
        numbers: the number of its cut.
        cuts: the distinct cuts.
    """

    keys: tuple[str, ...]
    numbers: tuple[int, ...]
    cuts: list[tuple[Any, ...]]


ShardReport: TypeAlias = list[RankShards]
"""The shards of one rank, or of several in order."""


def report_shards(shards: Iterable[Any]) -> ShardReport:
    """Return a report of a rank's shards. Other values are left out."""
    keys: list[str] = []
    numbers: list[int] = []
    cuts: dict[tuple[Any, ...], int] = {}
    for item in shards:
        if isinstance(item, ShardedTensor):
            cut = _tensor_cut(item)
            if (flat := cut[-1]) is not None:  # a slice has no hash
                cut = (*cut[:-1], (flat.start, flat.stop))
        elif isinstance(item, ShardedObject):
            cut = _object_cut(item)
        else:
            continue
        try:
            number = cuts.setdefault(cut, len(cuts))
        except TypeError:  # the caller assigned lists instead of tuples
            cut = tuple(tuple(value) if type(value) is list else value for value in cut)
            number = cuts.setdefault(cut, len(cuts))
        keys.append(item.key)
        numbers.append(number)
    return [RankShards(tuple(keys), tuple(numbers), list(cuts))]


def join_reports(reports: Iterable[ShardReport]) -> ShardReport:
    """Join the reports of several ranks into one, which has equal parts once."""
    known: dict[Any, Any] = {}
    return [
        RankShards(known.setdefault(keys, keys), known.setdefault(numbers, numbers), cuts)
        for report in reports
        for keys, numbers, cuts in report
    ]


def keys_of(reports: Iterable[ShardReport]) -> set[str]:
    """Return the keys of all shards of some reports."""
    return {key for report in reports for keys, *_ in report for key in keys}


def shards_of(
    reports: Iterable[ShardReport], ranks: Sequence[int], only: Container[str] | None = None
) -> dict[str, _Held]:
    """Return the shards of reports, without data, by key, each with the rank that holds it. If
    ``only`` is given, leave out other keys."""
    found: dict[str, _Held] = defaultdict(list)
    for rank, (keys, numbers, cuts) in zip(ranks, chain.from_iterable(reports), strict=True):
        for key, number in zip(keys, numbers, strict=True):
            if only is not None and key not in only:
                continue
            if len(cuts[number]) == _OBJECT_VALUES:
                found[key].append((rank, ShardedObject(key, None, *cuts[number])))
                continue
            *values, flat = cuts[number]
            values.append(None if flat is None else slice(*flat))
            found[key].append((rank, ShardedTensor(key, None, *values)))
    return found


def are_whole(shards: Sequence[ShardedTensor | ShardedObject]) -> bool:
    """Return whether shards are whole tensors and objects, each once, so that one rank covers all
    of them alone."""
    for shard in shards:
        shape: tuple[int, ...] = (1,)
        if isinstance(shard, ShardedTensor):
            shape = shard.local_shape
            if shard.flattened_range is not None:
                return False
        if tuple(shard.global_shape) != tuple(shape) or any(shard.global_offset):
            return False
        if not is_main_replica(shard.replica_id):
            return False
    return len({shard.key for shard in shards}) == len(shards)


def check_reports(reports: Sequence[ShardReport], ranks: Sequence[int]) -> None:
    """Check that the main replicas of all ranks cover every tensor and object exactly once.

    Any rank may call it; it waits for no rank. Time is nearly linear in the number of shards;
    tensors with the same cuts on the same ranks are checked once.

    Args:
        reports: results of :func:`report_shards` on all ranks, in the order of ``ranks``; some may
            be joined.
        ranks: the ranks.

    Raises:
        AccessPatternError: a part is covered twice or not at all; the text names key, region and
            ranks.
        ShapeMismatchError, DTypeMismatchError: ranks describe the global tensor differently.
    """
    for held in _samples(reports, ranks):
        _check_cover(held)


def _samples(reports: Sequence[ShardReport], ranks: Sequence[int]) -> Iterable[_Held]:
    """Return the shards of one key out of each set of keys that all ranks cut in the same way."""
    known: dict[tuple[Any, ...], int] = {}
    cuts_of: dict[str, list[int]] = defaultdict(list)  # number of the cut on each rank
    for keys, numbers, cuts in chain.from_iterable(reports):
        renumbered = [known.setdefault(cut, len(known)) for cut in cuts]
        for key, number in zip(keys, numbers, strict=True):
            cuts_of[key].append(renumbered[number])
    samples = {tuple(cuts): key for key, cuts in reversed(cuts_of.items())}
    return shards_of(reports, ranks, set(samples.values())).values()


def _check_cover(held: _Held) -> None:
    """Check that ranks describe a tensor or object alike, and that its main replicas tile it."""
    require_alike(held)
    sample, flat = held[0][1], _flat_ranges(held)
    # Flat ranges of one box count as one tile of the global tensor.
    tiles = [(box, [r.rank for r in ranges]) for box, ranges in flat.items()]
    for rank, item in held:
        box, is_flat = Box(item.global_offset, (1,) * len(item.global_offset)), False
        if isinstance(item, ShardedTensor):
            box, is_flat = local_box(item), item.flattened_range is not None
        require_inside(item, box, rank)
        if is_main_replica(item.replica_id) and not is_flat:
            tiles.append((box, [rank]))
    fault = find_tiling_fault([box for box, _ in tiles], sample.global_shape)
    if fault is not None:
        ranks = [rank for number in fault.shards for rank in tiles[number][1]]
        many = f"has {len(ranks)} main replicas, on ranks {_first_ranks(ranks)}"
        none = f"has no main replica on any rank ({errors.MAY_LACK})"
        example: object = sample.without_data()
        if isinstance(sample, ShardedObject):
            example = replace(sample, global_offset=fault.offset).unique_key
        raise errors.AccessPatternError(
            f"Invalid access pattern for {sample.key!r}, of global shape {sample.global_shape} and "
            f"held by ranks {_first_ranks(rank for rank, _ in held)}: the region at offset "
            f"{fault.offset} of shape {fault.shape} "
            f"{many if ranks else none}. Each element must belong to exactly one shard with "
            f"replica_id 0; check offsets and replica ids. One of the shards: {example}",
            key=sample.key,
            rank=ranks[0] if ranks else None,
        )


def require_inside(item: ShardedTensor | ShardedObject, box: Box, rank: int) -> None:
    """Raise :class:`AccessPatternError` if the box of a rank's shard is not in the global shape."""
    if not is_within(box, item.global_shape):
        raise errors.AccessPatternError(
            f"Invalid access pattern for {item.key!r}: the shard of rank {rank} at offset "
            f"{box.offset} of shape {box.shape} reaches outside the global shape "
            f"{item.global_shape}; check offset and global shape",
            key=item.key,
            rank=rank,
        )


_AGREED: dict[str, type[errors.CheckpointingException]] = {
    "dtype": errors.DTypeMismatchError,
    "global_shape": errors.ShapeMismatchError,
    "axis_fragmentations": errors.AccessPatternError,
}
"""Attributes that must be equal on all ranks -> the error if they differ. For fragmentations, only
``None`` on some of the ranks is an error."""
_described = attrgetter("key", *_AGREED)


def require_alike(
    held: _Held, agreed: Mapping[str, type[errors.CheckpointingException]] = _AGREED
) -> None:
    """Check that all ranks, replicas included, describe a tensor or object alike: they agree on its
    type, and on these attributes."""
    first_rank, first = held[0]
    for rank, item in held:
        if type(item) is not type(first):
            raise errors.AccessPatternError(
                f"Invalid access pattern: {item.key!r} is a {type(first).__name__} on rank "
                f"{first_rank} and a {type(item).__name__} on rank {rank}; rename one",
                key=item.key,
                rank=rank,
            )
        for name, kind in agreed.items():
            ours, theirs = getattr(first, name, None), getattr(item, name, None)
            if ours != theirs and (name != "axis_fragmentations" or None in (ours, theirs)):
                raise kind(
                    f"Invalid access pattern: {item.key!r} has {name} {ours} on rank {first_rank} "
                    f"and {theirs} on rank {rank}; ranks must agree",
                    key=item.key,
                    rank=rank,
                )


def without_main_replica(keys: Sequence[str], rank: int) -> errors.AccessPatternError:
    """Return the error for shards that have copies, but no main replica on any rank."""
    more = "" if len(keys) == 1 else f" (and {len(keys) - 1} more)"
    return errors.AccessPatternError(
        f"Invalid access pattern: {keys[0]!r}{more} has no main replica on any rank, so that "
        f"no rank would write it; rank {rank} holds a copy or an empty range; give exactly one "
        "rank's replica_id=0",
        key=keys[0],
        rank=rank,
    )


def digest_of(shards: Iterable[Any]) -> bytes:
    """Return a digest of what a rank says about each tensor and object. It is equal on ranks that
    hold different parts, or replicas, of the same ones."""
    descriptions = set[str]()
    for item in shards:
        if isinstance(item, ShardedTensor):
            descriptions.add(repr(_described(item)))
        elif isinstance(item, ShardedObject):
            descriptions.add(repr((item.key, item.global_shape)))
    return xxhash.xxh3_128_digest("".join(sorted(descriptions)).encode())


def check_same(reports: Sequence[ShardReport], ranks: Sequence[int]) -> None:
    """Check that ranks describe each tensor and object alike.

    Args:
        reports: results of :func:`report_shards`, in the order of ``ranks``.
        ranks: the ranks.

    Raises:
        AccessPatternError: they do not; the text names key, ranks and both sides.
    """
    for held in _samples(reports, ranks):
        require_alike(held, dict.fromkeys(_AGREED, errors.AccessPatternError))


def _first_ranks(ranks: Iterable[int]) -> list[int]:
    """Return ranks for an error text, at most 16 of them."""
    return sorted(set(ranks))[:16]


# -- geometry --------------------------------------------------------------------------------------


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

    def sweep(numbers: Iterable[int], region: tuple[tuple[int, int], ...]) -> TilingFault | None:
        """Check a region. It is bounded along the first axes only, and all boxes in ``numbers``
        span it along these axes."""
        axis = len(region)
        if axis == len(global_shape):
            shards = tuple(numbers)
            offset = tuple(start for start, _ in region)
            shape = tuple(stop - start for start, stop in region)
            return None if len(shards) == 1 else TilingFault(offset, shape, shards)
        begins: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            low, size = boxes[number][0][axis], boxes[number][1][axis]
            start, stop = max(low, 0), min(low + size, global_shape[axis])
            if start < stop:
                begins[start].append(number)
                ends[stop].append(number)
        # Between two neighbouring edges, the same boxes span the axis.
        spanning: set[int] = set()
        for start, stop in pairwise(sorted({0, global_shape[axis], *begins, *ends})):
            spanning.difference_update(ends[start])
            spanning.update(begins[start])
            if fault := sweep(sorted(spanning), (*region, (start, stop))):
                return fault
        return None

    return sweep(range(len(boxes)), ())
