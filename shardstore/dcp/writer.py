"""The storage writer for PyTorch DCP: ``dcp.save(state, storage_writer=StorageWriter(url))``.

DCP brings the ranks and their collectives, the planner says what each rank writes; this module
turns that into chunks of Zarr arrays and commits them. Nothing is pickled unasked: values that are
no tensors go into the root document as JSON, long ones into JSON files of their own, and a value
without a JSON form is refused.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardstore.dcp.reader import Placed, forget_listings
from shardstore.distributed.groups import group_size
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointingException,
    DTypeMismatchError,
    KeyNameError,
)
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.saving.plan import plan_writes
from shardstore.saving.sources import CutChunk, fetched
from shardstore.sharded.layouts import Layouts, local_box, local_layouts, merge_layouts
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.publish import About, Files, publish, write_chunks
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import grid_of
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.format.names import check_collisions
from shardstore.storage.movers.chunk_bytes import as_bytes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.options import SaveOptions, WriterKeywords, options_of
from shardstore.strategies.common import object_file
from shardstore.values.plain import NotPlainError
from shardstore.values.record import BACKEND, MEMBER, VERSION, StateRecord, as_text, is_long

logger = logging.getLogger(__name__)

# DCP's cached plans reach a storage writer empty: the items of each rank, as they came last.
_known_items: dict[int, list[WriteItem]] = {}


@dataclass(frozen=True)
class Task:
    """What the coordinator tells a rank, beside its items.

    Attributes:
        rank: position of the rank's plan.
        attempt_id: the attempt that all ranks write to.
        layouts: how all ranks together cut the rank's tensors.
    """

    rank: int
    attempt_id: str
    layouts: Layouts


@dataclass
class Report:
    """What a rank wrote, for the coordinator.

    Attributes:
        manifest: its chunks, :meth:`RankManifest.to_bytes`.
        pieces: parts of chunks that it did not write, as other ranks hold parts of them too: the
            chunk, the first element of the part, its elements.
        values: flat key -> JSON form of what is no tensor.
        files: flat keys of what lies in a file: what is long, or has no such form.
    """

    manifest: bytes = b""
    pieces: list[tuple[CutChunk, int, bytes]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def with_items(rank: int, plan: SavePlan) -> SavePlan:
    """Return the plan with its items, also where DCP's cache left them out.

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


def _sharded(item: WriteItem, flattened: bool, data: torch.Tensor | None = None) -> ShardedTensor:
    """Return an item of a plan as a sharded tensor; rows of the whole as a flattened range."""
    about = item.tensor_data
    assert about is not None
    key, dtype = item.index.fqn, about.properties.dtype
    shape, size, offset = map(tuple, (about.size, about.chunk.sizes, about.chunk.offsets))
    if not flattened:
        return ShardedTensor(key, data, dtype, size, shape, offset, None)
    row = math.prod(shape[1:])
    return ShardedTensor(
        key,
        None if data is None else data.detach().reshape(-1),
        dtype,
        shape,
        shape,
        (0,) * len(shape),
        (1,) * len(shape),
        flattened_range=slice(offset[0] * row, (offset[0] + size[0]) * row),
    )


def _layouts(plans: Sequence[SavePlan], target_chunk_bytes: int) -> list[Layouts]:
    """How the ranks together cut their tensors; for each rank, of those that it holds.

    Tensors of whole rows whose boundaries have only tiny cells in common (boundaries at 7 and 13 of
    a thousand) are taken for flattened ranges: few of their chunks are cut by a boundary, and the
    coordinator puts these together.

    Raises:
        DTypeMismatchError, KeyNameError: a tensor cannot be stored.
        AccessPatternError: ranks describe a tensor differently.
    """
    keys: list[set[str]] = []
    parts: dict[str, list[tuple[int, WriteItem]]] = {}
    for rank, plan in enumerate(plans):
        items = [item for item in plan.items if item.tensor_data is not None]
        keys.append({item.index.fqn for item in items})
        for item in items:
            parts.setdefault(item.index.fqn, []).append((rank, item))
    check_collisions(parts)
    reports: list[bytes] = []
    for key, held in parts.items():
        whole = [_sharded(item, False) for _, item in held]
        shape = whole[0].global_shape
        try:
            size = dtypes.itemsize(dtypes.zarr_name(whole[0].dtype))
        except DTypeMismatchError as error:
            raise DTypeMismatchError(f"key {key!r}: {error}", key=key) from error
        are_rows = all(tensor.local_shape[1:] == shape[1:] for tensor in whole)
        boxes = [local_box(tensor) for tensor in whole]
        flattened = are_rows and grid_of(shape, boxes, size, target_chunk_bytes)[2]
        reports += (local_layouts([_sharded(item, flattened)], rank) for rank, item in held)
    merged = merge_layouts(reports)
    return [
        Layouts(
            {key: merged.edges[key] for key in names & merged.edges.keys()},
            {key: merged.ranges[key] for key in names & merged.ranges.keys()},
        )
        for names in keys
    ]


def _write_items(
    items: Iterable[WriteItem],
    planner: SavePlanner,
    task: Task,
    attempt: Attempt,
    options: SaveOptions,
    *,
    allow_pickle: bool,
    plan_seconds: float,
) -> Report:
    """Write a rank's items. It waits for no other rank.

    Args:
        items: the rank's.
        planner: gives their data.
        task: what the coordinator says of them.
        attempt: where to.
        options: how.
        allow_pickle: write values that have no JSON form as pickles.
        plan_seconds: what the rank has done for this save so far, for the commit record.
    """
    start = perf_counter()
    manifest, report = RankManifest(task.rank), Report()
    files = Files(attempt, manifest, options.budget_bytes)
    tensors, pickled = [], []
    for item in items:
        data = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            if _write_value(item.index.fqn, cast(Any, data), files, report, allow_pickle):
                pickled.append(repr(item.index.fqn))
        else:
            flattened = item.index.fqn in task.layouts.ranges
            tensors.append(_sharded(item, flattened, cast(torch.Tensor, data)))
    if pickled:
        shown = ", ".join(pickled[:8])
        logger.warning("%d value(s) have no JSON form and are pickled: %s", len(pickled), shown)
    plan = plan_writes(tensors, task.rank, options, layouts=task.layouts)
    for chunk in plan.cut:
        for first, source in chunk.local.items():
            piece = as_bytes(np.ascontiguousarray(fetched(source))).tobytes()
            report.pieces.append((replace(chunk, local={}), first, piece))
    # The largest first, of each array in order: at the end none is left to be sent alone.
    plan.writes.sort(key=lambda write: -write.array.chunk_bytes)
    files.flush_beside(lambda: write_chunks(attempt, options, manifest, plan.arrays, plan.writes))
    manifest.seconds = {"plan": plan_seconds, "write": perf_counter() - start}
    report.manifest = manifest.to_bytes()
    return report


def _write_value(key: str, stream: Any, files: Files, report: Report, allow_pickle: bool) -> bool:
    """Put a value that is not a tensor into the report, or into a file if it is long or has no JSON
    form. Return whether it is pickled."""
    sharded = ShardedObject(key, None, (1,), (0,))
    data: bytes = stream.getvalue()
    stream.seek(0)
    # The planner has just pickled it, in this process.
    value = torch.load(stream, map_location="cpu", weights_only=False)
    try:
        document, text = as_text(value)
        if not is_long(text):
            report.values[key] = document
            return False
        name, data = object_file(sharded, ".json"), text.encode()
    except NotPlainError as reason:
        if not allow_pickle:
            raise CheckpointingException(
                f"the value of key {key!r} cannot be saved as JSON: {reason}. Save its "
                "state_dict() (of numbers, text, bytes, arrays and containers of them), or pass "
                "allow_pickle=True to shardstore.dcp.StorageWriter or install",
                key=key,
            ) from reason
        name = object_file(sharded)
    files.put(name, data)
    report.files.append(key)
    return name.endswith(".pt")


def _state_record(metadata: Metadata, reports: Sequence[Report]) -> StateRecord:
    """Values, files and paths of the state dict, from what each rank wrote of it.

    Raises:
        AccessPatternError: something in the metadata was written by nobody.
        KeyNameError: a path is not made of text and numbers.
    """
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


def _put_together(
    reports: Sequence[Report], manifest: RankManifest, attempt: Attempt, options: SaveOptions
) -> None:
    """Write the chunks that several ranks hold parts of, and note them in the coordinator's
    manifest. Called by the coordinator.

    Raises:
        AccessPatternError: the ranks together gave less than a whole chunk.
        StorageError: the store failed.
    """
    start = perf_counter()
    chunks: dict[tuple[str, tuple[int, ...]], tuple[CutChunk, dict[int, bytes]]] = {}
    for report in reports:
        for chunk, first, data in report.pieces:
            chunks.setdefault((chunk.array.key, chunk.index), (chunk, {}))[1][first] = data
    writes = [ChunkWrite(c.array, c.index, _joined(c, pieces)) for c, pieces in chunks.values()]
    arrays = {chunk.array.key: (chunk.array, False) for chunk, _ in chunks.values()}
    write_chunks(attempt, options, manifest, arrays.values(), writes)
    manifest.seconds["write"] += perf_counter() - start


def _joined(chunk: CutChunk, pieces: Mapping[int, bytes]) -> NDArray[Any]:
    data = b"".join(pieces[first] for first in sorted(pieces))
    found = np.frombuffer(data, np.uint8).view(dtypes.numpy_dtype(chunk.array.dtype))
    if found.size != math.prod(chunk.shape):
        raise AccessPatternError(
            f"Invalid access pattern: the ranks together gave {found.size} of the "
            f"{math.prod(chunk.shape)} elements of key {chunk.array.key!r}, chunk {chunk.index}",
            key=chunk.array.key,
            chunk=chunk.index,
        )
    return found.reshape(chunk.shape)


MARKER = (
    b"not a file of PyTorch DCP: a checkpoint of shardstore, for shardstore.dcp.StorageReader\n"
)
"""No pickle begins so: whoever takes it for DCP's own is told by an error."""


class StorageWriter(Placed, DcpStorageWriter):
    """Writes a DCP checkpoint as plain Zarr, whole or not at all.

    For ``torch.distributed.checkpoint.save`` and ``async_save``. The arrays have the keys that DCP
    gives the tensors (``model.layers.0.weight``); any Zarr reader opens them, and so does
    :func:`shardstore.load`. DCP calls each method on the ranks that its docstring names; no method
    waits for other ranks.

    Args:
        url: where to; ``None`` if DCP is given a ``checkpoint_id`` instead.
        allow_pickle: write values that have no JSON form (objects of a class of somebody's own) as
            pickles, in files of their own. They are loaded with ``weights_only``: their classes
            are to be allowed then (``torch.serialization.add_safe_globals``). Without it such a
            value is an error.
        dcp_marker: after the commit leave a file ``.metadata``, a line of text, for programs that
            take a folder without one for a checkpoint that DCP did not finish.
        **options: how the checkpoint is written, see
            :class:`~shardstore.storage.options.SaveOptions`: ``overwrite``, ``durable``,
            ``target_chunk_bytes``, ``threads``, ``array_documents``, ``storage_options``.

    Raises:
        ArgumentError: a number or a choice makes no sense.
    """

    _purpose = "write to:save"

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        allow_pickle: bool = False,
        dcp_marker: bool = False,
        **options: Unpack[WriterKeywords],
    ) -> None:
        self.options, error = options_of("StorageWriter", options, keywords=WriterKeywords)
        if error is not None:
            raise error
        super().__init__(url, self.options.storage_options)
        if not isinstance(allow_pickle, bool):
            raise ArgumentError(f"allow_pickle={allow_pickle!r:.100} must be True or False")
        self._allow_pickle = allow_pickle
        self._marker = dcp_marker
        self._attempt: Attempt | None = None
        self._abandon: weakref.finalize[Any, Any] | None = None
        self._started = 0.0
        self._rank = 0

    def __getstate__(self) -> dict[str, Any]:
        """Where and how to write; an attempt stays with the process that began it."""
        return {**self.__dict__, "_attempt": None, "_abandon": None}

    def storage_meta(self) -> StorageMeta | None:
        """For planners that want to know where the checkpoint goes."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. Called by all ranks."""
        if checkpoint_id is not None:
            self._go_to(checkpoint_id)
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
        if not kwargs.get("use_collectives", True) and group_size(None) > 1:
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
            DTypeMismatchError, KeyNameError: a tensor cannot be stored.
        """
        plans = [with_items(rank, plan) for rank, plan in enumerate(plans)]
        layouts = _layouts(plans, self.options.target_chunk_bytes)
        self._give_up()
        attempt = checkpoints.begin(self._place, self.options)
        self._attempt = attempt
        self._abandon = weakref.finalize(self, _abandon, attempt, os.getpid())
        return [
            replace(plan, storage_data=Task(rank, attempt.id, layouts[rank]))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Called by all ranks.

        Raises:
            StorageError: the store refused, or is not the one that the coordinator sees.
            DTypeMismatchError: a tensor has no plain memory.
            CheckpointingException: a value has no JSON form, and ``allow_pickle`` was not given.
        """
        task = plan.storage_data
        if not isinstance(task, Task):
            raise CheckpointingException(
                "the plan of this rank was made by another storage writer; save without a cached "
                "plan (enable_plan_caching=False)"
            )
        attempt = checkpoints.join(self._place, task.attempt_id, self.options)
        if self._attempt is None:
            attempt.require_seen()
        planned = perf_counter() - self._started
        self._rank = task.rank
        report = _write_items(
            plan.items,
            planner,
            task,
            attempt,
            self.options,
            allow_pickle=self._allow_pickle,
            plan_seconds=planned,
        )
        if self.options.durable and self._attempt is None:
            attempt.flush()
        # One result for all items: nobody else reads them, and every rank's go to the coordinator.
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put together what several ranks hold of one chunk, and commit. Called by the coordinator.

        Raises:
            AccessPatternError: something in the metadata was not written, or not exactly once.
            StorageError: the store refused; what was at the target is as it was.
        """
        try:
            self._commit(metadata, results)
        except BaseException:
            # At once: this object may live on, and who saves there next would wait for it.
            self._give_up()
            raise

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        attempt = self._attempt
        if attempt is None:
            raise CheckpointingException(
                f"no save to {self.checkpoint_id} was begun by this process"
            )
        reports = [
            result.storage_data
            for of_rank in results
            for result in of_rank
            if isinstance(result.storage_data, Report)
        ]
        record = _state_record(metadata, reports)
        manifests = [RankManifest.from_bytes(r.manifest, n) for n, r in enumerate(reports)]
        own = next(manifest for manifest in manifests if manifest.rank == self._rank)
        _put_together(reports, own, attempt, self.options)
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
        if self._marker:
            # Not a moment before: whoever looks for it takes the folder for a whole checkpoint.
            self._place.replace(METADATA_NAME, MARKER)
            forget_listings(self._place)


def _abandon(attempt: Attempt, process: int) -> None:
    """Give an attempt up, but not its parent's in a process that was forked off."""
    if os.getpid() == process:
        attempt.abandon()
