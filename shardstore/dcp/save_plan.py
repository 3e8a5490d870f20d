"""What the coordinator makes of everybody's plan: a chunk grid for each tensor, a task for each
rank.

Knows DCP's plans and the boxes in them; no planner, no files and no process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from shardstore.errors import AccessPatternError, CheckpointingException, DTypeMismatchError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, grid_of
from shardstore.storage.format.names import check_collisions, node_name

__all__ = ["Grids", "Task", "array_of", "box_of", "with_items"]

# DCP's cached plans reach a storage writer empty: the items of each rank, as they came last.
_known_items: dict[int, list[WriteItem]] = {}


@dataclass(frozen=True)
class Task:
    """What the coordinator tells a rank, beside its items.

    Attributes:
        rank: position of the rank's plan.
        attempt_id: the attempt that all ranks write to.
        grids: key -> chunk shape and edges of the shards, for the rank's tensors.
        creates: keys whose array documents the rank writes.
        straddled: keys with chunks that several ranks hold.
    """

    rank: int
    attempt_id: str
    grids: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    creates: frozenset[str]
    straddled: frozenset[str]


class Grids:
    """The chunk grid of each tensor, from what all ranks write of it.

    Args:
        plans: each rank's, items included.
        target_chunk_bytes: large shards are cut into chunks of about this many bytes.

    Raises:
        DTypeMismatchError, KeyNameError: a tensor can not be stored.
        AccessPatternError: ranks describe a tensor differently.
    """

    def __init__(self, plans: Sequence[SavePlan], target_chunk_bytes: int) -> None:
        parts: dict[str, list[WriteItem]] = {}
        self._first: dict[str, int] = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.tensor_data is not None:
                    parts.setdefault(item.index.fqn, []).append(item)
                    self._first.setdefault(item.index.fqn, rank)
        check_collisions(parts)
        self._grids: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._straddled: set[str] = set()
        for key, items in parts.items():
            shape, dtype = _shape_and_dtype(items)
            boxes = [box_of(item) for item in items]
            size = dtypes.itemsize(dtype)
            grid, edges, straddled = grid_of(shape, boxes, size, target_chunk_bytes)
            self._grids[key] = (grid.chunk_shape, edges)
            if straddled:
                self._straddled.add(key)

    def task(self, rank: int, plan: SavePlan, attempt_id: str) -> Task:
        """What a rank is told."""
        keys = {item.index.fqn for item in plan.items if item.tensor_data is not None}
        return Task(
            rank,
            attempt_id,
            {key: self._grids[key] for key in keys},
            frozenset(key for key in keys if self._first[key] == rank),
            frozenset(keys & self._straddled),
        )


def with_items(rank: int, plan: SavePlan) -> SavePlan:
    """The plan with its items, also where DCP's cache left them out.

    Raises:
        CheckpointingException: they never came.
    """
    if getattr(plan, "usable", True):
        _known_items[rank] = plan.items
        return plan
    items = _known_items.get(rank)
    if items is None:
        raise CheckpointingException(
            f"DCP's planner sent no plan for rank {rank}, trusting in a plan cached by another "
            "storage writer; save once with enable_plan_caching=False",
            rank=rank,
        )
    return replace(plan, items=items, usable=True)


def _shape_and_dtype(items: Sequence[WriteItem]) -> tuple[tuple[int, ...], str]:
    """What all items of a tensor say of it."""
    key = items[0].index.fqn
    found = set()
    for item in items:
        assert item.tensor_data is not None
        try:
            name = dtypes.zarr_name(item.tensor_data.properties.dtype)
        except DTypeMismatchError as error:
            raise DTypeMismatchError(f"key {key!r}: {error}", key=key) from error
        found.add((tuple(item.tensor_data.size), name))
    if len(found) > 1:
        raise AccessPatternError(
            f"Invalid access pattern: ranks describe key {key!r} differently: "
            f"{sorted(map(str, found))}",
            key=key,
        )
    return found.pop()


def box_of(item: WriteItem) -> Box:
    """The part of its tensor that an item is."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def array_of(item: WriteItem, grid: tuple[tuple[int, ...], tuple[int, ...]]) -> ArrayMeta:
    """The array of an item's tensor.

    Args:
        item: of a tensor.
        grid: chunk shape and edges of the shards, as in :attr:`Task.grids`.
    """
    assert item.tensor_data is not None
    key, (chunk_shape, edges) = item.index.fqn, grid
    return ArrayMeta(
        key,
        node_name(key),
        Grid(tuple(item.tensor_data.size), chunk_shape),
        dtypes.zarr_name(item.tensor_data.properties.dtype),
        separator=SEPARATOR,
        shard_shape=edges,
    )
