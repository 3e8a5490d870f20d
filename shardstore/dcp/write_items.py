"""One rank's part of a save through DCP: its items become chunks, values and files of an attempt.

Parts of chunks that other ranks hold too go to the coordinator as pieces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from shardstore.errors import AccessPatternError, CheckpointingException, DTypeMismatchError
from shardstore.mapping import ShardedObject
from shardstore.saving.sources import TensorSource, fetched
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.publish import Files, write_chunks
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, grid_of
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.format.names import check_collisions, node_name
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import behind, stream_here
from shardstore.storage.options import SaveOptions
from shardstore.strategies.common import json_object_file, object_file
from shardstore.values.plain import NotPlainError
from shardstore.values.record import as_text, is_long

__all__ = ["Grids", "Piece", "Report", "Task", "array_of", "box_of", "with_items", "write_items"]

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


logger = logging.getLogger(__name__)


@dataclass
class Piece:
    """A part of a chunk that other ranks hold too; the coordinator puts them together.

    Attributes:
        key: of the tensor.
        index: of the chunk.
        within: the part, counted from the chunk's corner.
        data: its elements in C order.
    """

    key: str
    index: tuple[int, ...]
    within: Box
    data: bytes


@dataclass
class Report:
    """What a rank wrote, for the coordinator.

    Attributes:
        manifest: its chunks, :meth:`RankManifest.to_bytes`.
        metas: arrays of its pieces.
        pieces: parts of chunks, which it did not write.
        values: flat key -> JSON form of what is no tensor.
        files: flat keys of what lies in a file: what is long, or has no such form.
    """

    manifest: bytes
    metas: dict[str, ArrayMeta] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def write_items(
    items: Iterable[WriteItem],
    planner: SavePlanner,
    task: Task,
    attempt: Attempt,
    options: SaveOptions,
    *,
    allow_pickle: bool = False,
    plan_seconds: float = 0.0,
) -> Report:
    """Write a rank's items. Called by every rank; it waits for no other.

    Args:
        items: the rank's.
        planner: gives their data.
        task: what the coordinator says of them.
        attempt: where to.
        options: how.
        allow_pickle: write values that have no JSON form as pickles.
        plan_seconds: what the rank has done for this save so far, for the commit record.

    Raises:
        StorageError: the store refused.
        DTypeMismatchError: a tensor has no plain memory.
        CheckpointingException: a value has no JSON form, and pickles are not allowed.
    """
    start = perf_counter()
    manifest, report = RankManifest(task.rank), Report(b"")
    metas: dict[str, ArrayMeta] = {}
    writes: list[ChunkWrite] = []
    files = Files(attempt, manifest, options.budget_bytes)
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            _write_value(item, planner, files.put, report, allow_pickle)
            continue
        key = item.index.fqn
        meta = metas.get(key) or array_of(item, task.grids[key])
        metas[key] = meta
        straddled = key in task.straddled
        _plan_item(item, planner, meta, straddled, writes, report)
        if straddled:
            report.metas[key] = meta
    # The largest first, of each array in order: at the end none is left to be sent alone.
    writes.sort(key=lambda write: -write.array.chunk_bytes)
    created = [(meta, key in task.creates) for key, meta in metas.items()]
    files.flush_beside(lambda: write_chunks(attempt, options, manifest, created, writes))
    manifest.seconds = {"plan": plan_seconds, "write": perf_counter() - start}
    report.manifest = manifest.to_bytes()
    return report


def _plan_item(
    item: WriteItem,
    planner: SavePlanner,
    meta: ArrayMeta,
    straddled: bool,
    writes: list[ChunkWrite],
    report: Report,
) -> None:
    """An item's whole chunks, and its pieces of chunks that a boundary cuts."""
    box = box_of(item)
    source = _Source(item, planner)
    for index in meta.grid.overlapping(box):
        chunk = meta.grid.box(index)
        if not straddled or box.intersect(chunk) == chunk:
            writes.append(ChunkWrite(meta, index, source.part(chunk.relative_to(box.offset))))
            continue
        common = chunk.intersect(box)
        assert common is not None
        data = source.part(common.relative_to(box.offset))()
        piece = as_bytes(np.ascontiguousarray(data)).tobytes()
        report.pieces.append(Piece(meta.key, index, common.relative_to(chunk.offset), piece))


class _Source:
    """The tensor of an item, asked of the planner when its first chunk is written.

    It is held until the last chunk is written: planners may make tensors when they are asked.
    """

    def __init__(self, item: WriteItem, planner: SavePlanner) -> None:
        self._item, self._planner = item, planner
        self._lock = threading.Lock()
        self._tensor: TensorSource | None = None
        self._left = 0
        self._stream = stream_here()

    def part(self, box: Box) -> Callable[[], NDArray[Any]]:
        """Return a function that gives a part of the tensor, on the host."""
        self._left += 1

        def fetch() -> NDArray[Any]:
            with self._lock:
                tensor = self._tensor = self._tensor or self._resolved()
                self._left -= 1
                if self._left == 0:
                    self._tensor = None
            return fetched(tensor.part(box.slices))

        return fetch

    def _resolved(self) -> TensorSource:
        found = self._planner.resolve_data(self._item)
        key = self._item.index.fqn
        if not isinstance(found, torch.Tensor):
            raise CheckpointingException(
                f"the planner resolved key {key!r} to a {type(found).__name__}, not to a tensor",
                key=key,
            )
        # The stream of the thread that saves: this one's own waits for no other.
        with behind(self._stream):
            return TensorSource(found, key)


def _write_value(
    item: WriteItem,
    planner: SavePlanner,
    put: Callable[[str, bytes], None],
    report: Report,
    allow_pickle: bool,
) -> None:
    """A value that is no tensor: JSON for the coordinator; a large one in a file of its own."""
    key = item.index.fqn
    stream = cast(Any, planner.resolve_data(item))
    data: bytes = stream.getvalue()
    sharded = ShardedObject(key, None, (1,), (0,))
    stream.seek(0)
    # What the planner pickled a moment ago, in this process.
    value = torch.load(stream, map_location="cpu", weights_only=False)
    try:
        document, text = as_text(value)
        if not is_long(text):
            report.values[key] = document
            return
        name, data = json_object_file(sharded), text.encode()
    except NotPlainError as reason:
        if not allow_pickle:
            raise CheckpointingException(
                f"the value of key {key!r} can not be saved: {reason}, and nothing is pickled "
                "unasked. Put into the state dict what it is made of (a state_dict() of numbers, "
                "text, bytes, arrays and containers of them), or allow pickles for such values: "
                "allow_pickle=True, of shardstore.dcp.StorageWriter and install",
                key=key,
            ) from reason
        logger.warning("the value of key %r is pickled: %s", key, reason)
        name = object_file(sharded)
    put(name, data)
    report.files.append(key)
