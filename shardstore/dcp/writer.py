"""The storage writer for PyTorch DCP: ``dcp.save(state, storage_writer=StorageWriter(url))``.

DCP brings the ranks and their collectives, the planner says what each rank writes; this module
turns that into chunks of Zarr arrays and commits them. Nothing is pickled: values that are no
tensors go into the root document as JSON, and those without a JSON form into files of their own.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardstore.dcp.layout import contains, grid_of
from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    DTypeMismatchError,
    KeyNameError,
)
from shardstore.mapping import ShardedObject
from shardstore.plain_values import NotPlainError
from shardstore.storage import commit, dtypes
from shardstore.storage.attempt import Attempt
from shardstore.storage.chunks import ChunkWrite, as_bytes
from shardstore.storage.documents import SEPARATOR, ArrayMeta
from shardstore.storage.grid import DEFAULT_TARGET_CHUNK_BYTES, Box, Grid
from shardstore.storage.location import Location
from shardstore.storage.manifest import RankManifest
from shardstore.storage.names import check_collisions, node_name
from shardstore.storage.options import SaveOptions
from shardstore.storage.publish import About, publish, write_chunks
from shardstore.strategies.common import object_file
from shardstore.strategies.common_json import BACKEND, MEMBER, VERSION, StateRecord, as_json

__all__ = ["StorageWriter"]

logger = logging.getLogger(__name__)

# DCP's cached plans reach a storage writer empty: the items of each rank, as they came last.
_known_items: dict[int, list[WriteItem]] = {}


@dataclass(frozen=True)
class _Task:
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


@dataclass
class _Piece:
    """A part of a chunk that other ranks hold too; the coordinator puts them together."""

    key: str
    index: tuple[int, ...]
    within: Box
    data: bytes


@dataclass
class _Report:
    """What a rank wrote, for the coordinator."""

    manifest: bytes
    metas: dict[str, ArrayMeta] = field(default_factory=dict)
    pieces: list[_Piece] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class StorageWriter(DcpStorageWriter):
    """Writes a DCP checkpoint as plain Zarr, whole or not at all.

    For ``torch.distributed.checkpoint.save`` and ``async_save``. The arrays have the keys that DCP
    gives the tensors (``model.layers.0.weight``); any Zarr reader opens them, and so does
    :func:`shardstore.load`. DCP calls each method on the ranks that its docstring names; no method
    waits for other ranks.

    Args:
        url: where to; ``None`` if DCP is given a ``checkpoint_id`` instead.
        overwrite: replace a checkpoint that is there. It stays readable until the new one takes
            its place.
        durable: wait until everything is on the disk before the commit.
        target_chunk_bytes: large shards are cut into chunks of about this many bytes.
        threads: threads that write, each rank; default: one a processor, at most 8.
        storage_options: options of the store behind the URL.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = False,
        durable: bool = True,
        target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._storage_options = dict(storage_options or {})
        self._location = None if url is None else Location.of(url, **self._storage_options)
        self.options = SaveOptions(
            overwrite=overwrite,
            durable=durable,
            target_chunk_bytes=target_chunk_bytes,
            threads=threads,
        )
        self._attempt: Attempt | None = None
        self._abandon: weakref.finalize[Any, Any] | None = None
        self._started = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Where and how to write; an attempt stays with the process that began it."""
        return {**self.__dict__, "_attempt": None, "_abandon": None}

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is written."""
        return self._target.url

    @property
    def _target(self) -> Location:
        if self._location is None:
            raise CheckpointingException(
                "the StorageWriter has no place to write to: give it a URL, or give "
                "torch.distributed.checkpoint.save a checkpoint_id"
            )
        return self._location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint can be written there: a local path or a URL."""
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> StorageMeta | None:
        """For planners that want to know where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. Called by all ranks."""
        if checkpoint_id is not None:
            self._location = Location.of(checkpoint_id, **self._storage_options)
        self._give_up()

    def _give_up(self) -> None:
        """Remove what a save that failed has left. All ranks have stopped writing by then."""
        if self._abandon is not None:
            self._abandon()
        self._attempt = self._abandon = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check how the ranks are coordinated. Called by all ranks.

        Raises:
            CheckpointingException: they are not (``use_collectives=False``).
        """
        self._started = perf_counter()
        if not kwargs.get("use_collectives", True) and _world_size() > 1:
            raise CheckpointingException(
                "use_collectives=False has every rank write a checkpoint of its own, with nobody "
                f"to commit {self.checkpoint_id} as a whole; leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add. Called by all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose chunk grids and begin an attempt. Called by the coordinator.

        Raises:
            CheckpointExistsError: there is a checkpoint, and ``overwrite`` was not given.
            DTypeMismatchError, KeyNameError: a tensor can not be stored.
        """
        plans = [_with_items(rank, plan) for rank, plan in enumerate(plans)]
        grids = _Grids(plans, self.options.target_chunk_bytes)
        self._give_up()
        attempt = commit.begin(self._target, overwrite=self.options.overwrite)
        self._attempt = attempt
        self._abandon = weakref.finalize(self, attempt.abandon)
        return [
            replace(plan, storage_data=grids.task(rank, plan, attempt.id))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Called by all ranks.

        Raises:
            StorageError: the store refused.
        """
        task = plan.storage_data
        if not isinstance(task, _Task):
            raise CheckpointingException(
                "the plan of this rank was made by another storage writer; save without a cached "
                "plan (enable_plan_caching=False)"
            )
        attempt = commit.join(self._target, task.attempt_id, overwrite=self.options.overwrite)
        report = _write(plan.items, planner, task, attempt, self.options)
        if self.options.durable and self._attempt is None:
            attempt.flush()
        results = [WriteResult(item.index, _size_of(item), None) for item in plan.items]
        if results:
            results[0] = replace(results[0], storage_data=report)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put together what several ranks hold of one chunk, and commit. Called by the coordinator.

        Raises:
            AccessPatternError: something in the metadata was not written, or not exactly once.
            StorageError: the store refused; what was at the target is as it was.
        """
        attempt = self._attempt
        if attempt is None:
            raise CheckpointingException(
                f"no save to {self.checkpoint_id} was begun by this process"
            )
        reports = [
            result.storage_data
            for of_rank in results
            for result in of_rank
            if isinstance(result.storage_data, _Report)
        ]
        record = _state_record(metadata, reports)
        manifests = [report.manifest for report in reports]
        manifests.append(_put_together(reports, attempt, self.options))
        about = About(
            common_backend=(BACKEND, VERSION),
            record={MEMBER: record.to_json()},
            world_size=len(results),
            seconds=perf_counter() - self._started,
        )
        publish(attempt, self.options, manifests, about)
        if self._abandon is not None:
            self._abandon.detach()
        self._attempt = self._abandon = None


def _world_size() -> int:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if ready else 1


def _with_items(rank: int, plan: SavePlan) -> SavePlan:
    """The plan with its items, also where DCP's cache left them out."""
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


class _Grids:
    """The chunk grid of each tensor, from what all ranks write of it."""

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
            boxes = [_box(item) for item in items]
            size = dtypes.itemsize(dtype)
            grid, edges, straddled = grid_of(shape, boxes, size, target_chunk_bytes)
            self._grids[key] = (grid.chunk_shape, edges)
            if straddled:
                self._straddled.add(key)

    def task(self, rank: int, plan: SavePlan, attempt_id: str) -> _Task:
        """What a rank is told."""
        keys = {item.index.fqn for item in plan.items if item.tensor_data is not None}
        return _Task(
            rank,
            attempt_id,
            {key: self._grids[key] for key in keys},
            frozenset(key for key in keys if self._first[key] == rank),
            frozenset(keys & self._straddled),
        )


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


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _size_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return _box(item).size * item.tensor_data.properties.dtype.itemsize


def _meta(item: WriteItem, chunk_shape: tuple[int, ...], edges: tuple[int, ...]) -> ArrayMeta:
    assert item.tensor_data is not None
    key, shape = item.index.fqn, tuple(item.tensor_data.size)
    name = dtypes.zarr_name(item.tensor_data.properties.dtype)
    return ArrayMeta(
        key,
        node_name(key),
        Grid(shape, chunk_shape),
        name,
        separator=SEPARATOR,
        shard_shape=edges,
    )


def _write(
    items: Iterable[WriteItem],
    planner: SavePlanner,
    task: _Task,
    attempt: Attempt,
    options: SaveOptions,
) -> _Report:
    manifest = RankManifest(task.rank)
    report = _Report(b"")
    metas: dict[str, ArrayMeta] = {}
    writes: list[ChunkWrite] = []
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            _write_value(item, planner, attempt, report)
            continue
        key = item.index.fqn
        meta = metas.get(key) or _meta(item, *task.grids[key])
        metas[key] = meta
        straddled = key in task.straddled
        _plan_item(item, planner, meta, straddled, writes, report)
        if straddled:
            report.metas[key] = meta
    created = [(meta, key in task.creates) for key, meta in metas.items()]
    write_chunks(attempt, options, manifest, created, writes)
    report.manifest = manifest.to_bytes()
    return report


def _plan_item(
    item: WriteItem,
    planner: SavePlanner,
    meta: ArrayMeta,
    straddled: bool,
    writes: list[ChunkWrite],
    report: _Report,
) -> None:
    """An item's whole chunks, and its pieces of chunks that a boundary cuts."""
    box = _box(item)
    source = _Source(item, planner)
    for index in meta.grid.overlapping(box):
        chunk = meta.grid.box(index)
        if not straddled or contains(box, chunk):
            writes.append(ChunkWrite(meta, index, source.part(chunk.relative_to(box.offset))))
            continue
        common = chunk.intersect(box)
        assert common is not None
        data = source.part(common.relative_to(box.offset))()
        piece = as_bytes(np.ascontiguousarray(data)).tobytes()
        report.pieces.append(_Piece(meta.key, index, common.relative_to(chunk.offset), piece))


class _Source:
    """The tensor of an item, asked of the planner when its first chunk is written.

    It is held until the last chunk is: planners may make tensors only when they are asked.
    """

    def __init__(self, item: WriteItem, planner: SavePlanner) -> None:
        self._item = item
        self._planner = planner
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._left = 0

    def part(self, box: Box) -> Any:
        """A function that gives a part of the tensor, on the host."""
        self._left += 1

        def fetch() -> NDArray[Any]:
            with self._lock:
                if self._tensor is None:
                    self._tensor = self._resolved()
                tensor = self._tensor
                self._left -= 1
                if self._left == 0:
                    self._tensor = None
            where: tuple[Any, ...] = (..., *box.slices)
            found = tensor[where]
            if found.device.type != "cpu":
                found = found.contiguous().cpu()
            return dtypes.as_numpy(found)

        return fetch

    def _resolved(self) -> torch.Tensor:
        found = self._planner.resolve_data(self._item)
        key = self._item.index.fqn
        if not isinstance(found, torch.Tensor):
            raise CheckpointingException(
                f"the planner resolved key {key!r} to a {type(found).__name__}, not to a tensor",
                key=key,
            )
        found = found.detach()
        if found.layout is not torch.strided or found.device.type == "meta":
            raise DTypeMismatchError(
                f"key {key!r} is a tensor of layout {found.layout} on {found.device}, which has "
                "no plain memory to write; make it a dense tensor with data",
                key=key,
            )
        return found


def _write_value(item: WriteItem, planner: SavePlanner, attempt: Attempt, report: _Report) -> None:
    """A value that is no tensor: JSON for the coordinator, or else a file of its own."""
    key = item.index.fqn
    stream = cast(Any, planner.resolve_data(item))
    data: bytes = stream.getvalue()
    try:
        stream.seek(0)
        # What the planner pickled a moment ago, in this process.
        value = torch.load(stream, map_location="cpu", weights_only=False)
        report.values[key] = as_json(value)
    except NotPlainError as reason:
        logger.info("%s: %s; it is kept in a file of its own", key, reason)
        attempt.put(object_file(_as_object(key)), data)
        report.files.append(key)


def _as_object(key: str) -> ShardedObject:
    return ShardedObject(key, None, (1,), (0,))


def _state_record(metadata: Metadata, reports: Sequence[_Report]) -> StateRecord:
    values: dict[str, Any] = {}
    files: list[str] = []
    for report in reports:
        values.update(report.values)
        files += report.files
    tensors = {key for key, about in metadata.state_dict_metadata.items() if hasattr(about, "size")}
    missing = sorted(set(metadata.state_dict_metadata) - tensors - set(values) - set(files))
    if missing:
        raise AccessPatternError(
            f"keys {missing[:4]} are in the state dict, but no rank wrote them; save without a "
            "cached plan (enable_plan_caching=False)",
            key=missing[0],
        )
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for key, path in paths.items():
        if not all(isinstance(name, str | int) for name in path):
            raise KeyNameError(f"key {key!r} has a path that is not made of text: {path}", key=key)
    return StateRecord({key: tuple(path) for key, path in paths.items()}, values, sorted(files))


def _put_together(reports: Sequence[_Report], attempt: Attempt, options: SaveOptions) -> bytes:
    """Write the chunks that several ranks hold; the coordinator's own manifest of them."""
    manifest = RankManifest(0)
    metas: dict[str, ArrayMeta] = {}
    chunks: dict[tuple[str, tuple[int, ...]], list[_Piece]] = {}
    for report in reports:
        metas.update(report.metas)
        for piece in report.pieces:
            chunks.setdefault((piece.key, piece.index), []).append(piece)
    writes = [
        ChunkWrite(metas[key], index, _joined(metas[key], index, pieces))
        for (key, index), pieces in chunks.items()
    ]
    used = {key: metas[key] for key, _ in chunks}
    write_chunks(attempt, options, manifest, [(meta, False) for meta in used.values()], writes)
    return manifest.to_bytes()


def _joined(meta: ArrayMeta, index: tuple[int, ...], pieces: Sequence[_Piece]) -> NDArray[Any]:
    box = meta.grid.box(index)
    dtype = dtypes.numpy_dtype(meta.dtype)
    if sum(piece.within.size for piece in pieces) != box.size:
        raise AccessPatternError(
            f"Invalid access pattern: the ranks together hold "
            f"{sum(piece.within.size for piece in pieces)} of the {box.size} elements of key "
            f"{meta.key!r} offset {box.offset} shape {box.shape}",
            key=meta.key,
            chunk=index,
        )
    out: NDArray[Any] = np.empty(box.shape, dtype)
    for piece in pieces:
        data = np.frombuffer(piece.data, np.uint8).view(dtype).reshape(piece.within.shape)
        where: tuple[Any, ...] = (..., *piece.within.slices)
        out[where] = data
    return out
