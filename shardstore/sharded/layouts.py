"""The layouts of irregular and flattened tensors, which ranks exchange before they plan.

For tensors with irregular cuts, the grid depends on the boundaries of all ranks. For flattened
ranges, several ranks may hold parts of one chunk. All other tensors need no exchange.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shardstore.errors import AccessPatternError
from shardstore.mapping import (
    ShardedTensor,
    data_shape,
    flat_bounds,
    is_main_replica,
    local_box,
)
from shardstore.sharded.coverage import FlatRange, check_flat_ranges
from shardstore.storage.format.grid import Box, cut_gcd


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
