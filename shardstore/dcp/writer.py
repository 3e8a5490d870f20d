"""The storage writer for PyTorch DCP: ``dcp.save(state, storage_writer=StorageWriter(url))``.

DCP runs the collectives, and its planner decides what each rank writes. The writer makes chunks of
Zarr arrays from the plan and commits them. Values that are not tensors are stored as JSON, in the
root document or, if they are long, in separate files. A value without a JSON form is refused,
unless ``allow_pickle=True``.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Unpack

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardstore import coverage
from shardstore.dcp.reader import OwnedAttempt, Placed
from shardstore.distributed.groups import group_size
from shardstore.errors import AccessPatternError, CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor, local_box
from shardstore.progress import log_event
from shardstore.saving import plan as planning
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.folder import disk_of
from shardstore.storage.commit.publish import Files, RootContent, publish, put_chunks
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import grid_of
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.format.names import DCP_METADATA_NAME, check_collisions
from shardstore.storage.movers.chunks import ChunkWrite, Source
from shardstore.storage.options import SaveOptions, WriterKeywords, options_of, require_bool
from shardstore.strategies.common import object_file
from shardstore.strategies.zarr import _should_create_array
from shardstore.values import record
from shardstore.values.plain import NotPlainError
from shardstore.values.record import StatePath, StateRecord
from shardstore.values.torch_dump import dump_bytes, require_loadable

logger = logging.getLogger(__name__)

# The last items of each rank: DCP passes empty plans to the writer if it has cached them.
_known_items: dict[int, list[WriteItem]] = {}


@dataclass(frozen=True)
class Task:
    """The coordinator's message to a rank, in addition to the items.

    Attributes:
        rank: position of the rank's plan.
        attempt_id: the attempt that all ranks write to.
        layouts: layouts of the tensors on all ranks.
    """

    rank: int
    attempt_id: str
    layouts: coverage.Layouts


@dataclass
class WriteReport:
    """A rank's report to the coordinator.

    Attributes:
        manifest: the chunks that it wrote, :meth:`RankManifest.to_bytes`.
        cut: chunks that several ranks hold, with this rank's pieces.
        values: flat key -> JSON form of a value that is not a tensor.
        files: flat keys of values in separate files.
    """

    manifest: bytes = b""
    cut: list[planning.CutChunk] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def with_items(rank: int, plan: SavePlan) -> SavePlan:
    """Return the plan with its items, also if DCP's cache left them out.

    Raises:
        CheckpointingException: this writer never received the items.
    """
    if getattr(plan, "usable", True):
        _known_items[rank] = plan.items
        return plan
    items = _known_items.get(rank)
    if items is None:
        raise CheckpointingException(
            f"DCP's planner sent no plan for rank {rank}, because another storage writer cached "
            "it; save once with enable_plan_caching=False",
            rank=rank,
        )
    return replace(plan, items=items, usable=True)


def _sharded(item: WriteItem, data: torch.Tensor | None = None) -> ShardedTensor:
    """Return an item of a plan as a sharded tensor."""
    about = item.tensor_data
    assert about is not None
    shape, size, offset = map(tuple, (about.size, about.chunk.sizes, about.chunk.offsets))
    return ShardedTensor(item.index.fqn, data, about.properties.dtype, size, shape, offset, None)


def _layouts(plans: Sequence[SavePlan], options: SaveOptions) -> coverage.Layouts:
    """Return the layouts of all tensors.

    If the shards of a tensor are whole rows, and only tiny chunks fit between their boundaries (for
    example 7 and 13 of 1,000 rows), the shards are handled as flattened ranges. Then a boundary
    cuts few chunks, and the coordinator merges the pieces of these.

    Raises:
        DTypeMismatchError, KeyNameError: a tensor cannot be stored.
        AccessPatternError: ranks describe a tensor differently.
    """
    held: dict[str, list[tuple[int, ShardedTensor]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is not None:
                held.setdefault(item.index.fqn, []).append((rank, _sharded(item)))
    check_collisions(held)
    by_rank: list[list[ShardedTensor]] = [[] for _ in plans]
    for shards in held.values():
        _, first = shards[0]
        shape, size = first.global_shape, dtypes.itemsize(planning.array_meta(first, options).dtype)
        are_rows = all(shard.local_shape[1:] == shape[1:] for _, shard in shards)
        boxes = [local_box(shard) for _, shard in shards]
        most = options.target_chunk_bytes
        are_flat = are_rows and grid_of(shape, boxes, size, most).straddles
        for rank, shard in shards:
            by_rank[rank].append(coverage.as_flat_range(shard) if are_flat else shard)
    reports = [coverage.report_shards(planning.needing_layouts(shards)) for shards in by_rank]
    return coverage.merge_layouts(reports, range(len(reports)))


def _state_record(metadata: Metadata, reports: Sequence[WriteReport]) -> StateRecord:
    """Return the record of values, files and paths of the state dict, from all ranks' reports.

    Raises:
        AccessPatternError: no rank wrote a value that the metadata names.
    """
    values = {key: value for report in reports for key, value in report.values.items()}
    files = [key for report in reports for key in report.files]
    tensors = {key for key, about in metadata.state_dict_metadata.items() if hasattr(about, "size")}
    missing = sorted(set(metadata.state_dict_metadata) - tensors - set(values) - set(files))
    if missing:
        raise AccessPatternError(
            f"keys {missing[:4]} are in the state dict, but no rank wrote them; save without a "
            "cached plan (enable_plan_caching=False)",
            key=missing[0],
        )
    planned = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths = {key: tuple(path) for key, path in planned.items()}
    return StateRecord(paths, values, sorted(files), _lists(paths, tensors))


def _lists(paths: Mapping[str, StatePath], tensors: Container[str]) -> list[StatePath]:
    """Return the paths of the lists with elements that are not values: tensors, and what DCP leaves
    out. A number in one of DCP's paths is a position in a list."""
    positions: defaultdict[StatePath, set[int]] = defaultdict(set)
    with_tensors = set[StatePath]()
    for key, path in paths.items():
        for i, name in enumerate(path):
            if isinstance(name, int):
                if key in tensors:
                    with_tensors.add(path[:i])
                else:
                    positions[path[:i]].add(name)
    return [
        path
        for path, found in positions.items()
        if path in with_tensors or found != set(range(len(found)))
    ]


def _joined(chunk: planning.CutChunk) -> ChunkWrite:
    """Return a chunk that several ranks hold, put together from all their pieces. The layouts prove
    that they cover it."""
    pieces = [planning.fetched(chunk.local[first]).reshape(-1) for first in sorted(chunk.local)]
    return ChunkWrite(chunk.array, chunk.index, np.concatenate(pieces).reshape(chunk.shape))


MARKER = (
    b"not a file of PyTorch DCP: a checkpoint of shardstore, for shardstore.dcp.StorageReader\n"
)
"""Not a pickle, so that a program that reads it as DCP's metadata gets an error."""


class StorageWriter(Placed, DcpStorageWriter):
    """Writes a DCP checkpoint as plain Zarr, completely or not at all.

    It is for ``torch.distributed.checkpoint.save`` and ``async_save``. The keys of the arrays are
    DCP's (``model.layers.0.weight``). Zarr readers and :func:`shardstore.load` read them. DCP calls
    each method on the ranks that its docstring names. No method waits for other ranks.

    Args:
        url: folder or URL to write to; ``None`` if DCP passes a ``checkpoint_id``.
        allow_pickle: write values that have no JSON form (objects of your own classes) as pickles,
            in separate files. They are loaded with ``weights_only``, so their classes must be
            allowed then (``torch.serialization.add_safe_globals``). Without it, such a value is an
            error.
        dcp_marker: write a file ``.metadata``, a line of text, after the commit. Some programs take
            a folder without this file for an incomplete checkpoint.
        **options: how the checkpoint is written, see
            :class:`~shardstore.storage.options.SaveOptions`: ``overwrite``, ``durable``,
            ``target_chunk_bytes``, ``threads``, ``array_documents``, ``constants``, ``pack``,
            ``storage_options``.

    Raises:
        ArgumentError: an argument has a wrong type or value.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        allow_pickle: bool = False,
        dcp_marker: bool = False,
        **options: Unpack[WriterKeywords],
    ) -> None:
        self.options = options_of("StorageWriter", options, keywords=WriterKeywords)
        super().__init__(url, self.options.storage_options)
        require_bool("allow_pickle", allow_pickle)
        require_bool("dcp_marker", dcp_marker)
        self._allow_pickle = allow_pickle
        self._marker = dcp_marker

    def storage_meta(self) -> StorageMeta | None:
        """Return the place of the checkpoint, for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save. All ranks call it."""
        super().reset(checkpoint_id)
        self._give_up()

    def _give_up(self) -> None:
        """Remove the remains of a failed save, after all ranks have stopped writing."""
        if self._current.begun is not None:
            self._current.begun.abandon()
        self._current.begun = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that DCP coordinates the ranks. All ranks call it.

        Raises:
            CheckpointingException: ``use_collectives=False``.
        """
        self._current.started = perf_counter()
        if not kwargs.get("use_collectives", True) and group_size(None) > 1:
            raise CheckpointingException(
                "use_collectives=False makes every rank write a separate checkpoint, so that none "
                f"can commit {self.checkpoint_id}; leave it out"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the identity of this rank's disk. All ranks call it.

        Raises:
            DTypeMismatchError: a tensor cannot be stored. DCP's planner would fail for some of them
                after this, without a key.
        """
        for item in plan.items:
            if (about := item.tensor_data) is not None:
                planning.stored_name(
                    item.index.fqn, about.properties.dtype, about.properties.layout
                )
        return replace(plan, storage_data=disk_of(self._place))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose chunk grids and begin an attempt. The coordinator calls it.

        Raises:
            CheckpointExistsError: the target holds a checkpoint, and ``overwrite`` was not given.
            DTypeMismatchError, KeyNameError: a tensor cannot be stored.
            StorageError: ranks would write to disks of several machines.
        """
        disks = {plan.storage_data: rank for rank, plan in enumerate(plans) if plan.storage_data}
        if len(disks) > 1:
            raise self._place.error(
                f" is on disks of several machines (those of ranks {sorted(disks.values())}); save "
                "to a file system that all ranks share, or to an object store"
            )
        plans = [with_items(rank, plan) for rank, plan in enumerate(plans)]
        layouts = _layouts(plans, self.options)
        self._give_up()
        attempt = checkpoints.begin(self._place, self.options)
        self._current.begun = OwnedAttempt(attempt)
        return [
            replace(plan, storage_data=Task(rank, attempt.id, layouts))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. All ranks call it.

        Raises:
            StorageError: the store failed, or is not the coordinator's store.
            DTypeMismatchError: a tensor is not dense memory.
            CheckpointingException: a value has no JSON form, and ``allow_pickle`` was not given.
        """
        task: Task = plan.storage_data
        attempt = checkpoints.join(self._place, task.attempt_id, self.options)
        if self._current.begun is None:
            attempt.require_seen()
        start, self._current.rank = perf_counter(), task.rank
        manifest, report = RankManifest(task.rank), WriteReport()
        files = Files(attempt, manifest, self.options.budget_bytes)
        tensors, pickled = [], []
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                if not self._put_value(item.index.fqn, data, files, report):
                    pickled.append(item.index.fqn)
                continue
            tensor = _sharded(item, data)
            is_flat = tensor.key in task.layouts.ranges
            tensors.append(coverage.as_flat_range(tensor) if is_flat else tensor)
        if pickled:
            shown = ", ".join(map(repr, pickled[:8]))
            logger.warning("%d value(s) have no JSON form and are pickled: %s", len(pickled), shown)
        planned = planning.plan_writes(tensors, task.rank, self.options, layouts=task.layouts)
        for chunk in planned.cut:
            local: dict[int, Source] = {
                n: planning.fetched(source) for n, source in chunk.local.items()
            }
            report.cut.append(replace(chunk, local=local))
        # The largest chunks first, so that no large chunk is sent alone at the end. The sort is
        # stable, so chunks of one array keep their order.
        planned.writes.sort(key=lambda write: -write.array.chunk_bytes)
        arrays = zip(planned.arrays, map(_should_create_array, planned.tensors), strict=True)
        put_chunks(attempt, self.options, manifest, arrays, planned.writes, files.taken())
        manifest.seconds = {"plan": start - self._current.started, "write": perf_counter() - start}
        report.manifest = manifest.to_bytes()
        if self.options.durable and self._current.begun is None:
            attempt.flush()
        # One result for all items: only the coordinator's finish() reads them.
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), 0, report)])
        return future

    def _put_value(self, key: str, stream: io.BytesIO, files: Files, report: WriteReport) -> bool:
        """Put a value that is not a tensor into the report, or into a file if it is long or has no
        JSON form. Return whether it has one."""
        sharded = ShardedObject(key, None, (1,), (0,))
        stream.seek(0)
        # The planner has just pickled it, in this process.
        value = torch.load(stream, map_location="cpu", weights_only=False)
        try:
            document, text = record.as_text(value)
        except NotPlainError as reason:
            if not self._allow_pickle:
                raise CheckpointingException(
                    f"the value of key {key!r} cannot be saved as JSON: {reason}. Save its "
                    "state_dict() (of numbers, text, bytes, arrays and containers of them), or "
                    "pass allow_pickle=True to shardstore.dcp.StorageWriter or install",
                    key=key,
                ) from reason
            require_loadable(value, f"the value of key {key!r}", refuse_classes=False)
            files.put(object_file(sharded), dump_bytes(value))
            report.files.append(key)
            return False
        if record.is_long(text):
            files.put(object_file(sharded, ".json"), text.encode())
            report.files.append(key)
        else:
            report.values[key] = document
        return True

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge chunks that several ranks hold, and commit. The coordinator calls it.

        Raises:
            AccessPatternError: a value or a part of a tensor was not written exactly once.
            StorageError: the store failed; the target is unchanged.
        """
        begun, start = self._current.begun, perf_counter()
        assert begun is not None  # prepare_global_plan() has set it
        try:
            reports: list[WriteReport] = [of_rank[0].storage_data for of_rank in results]
            values = _state_record(metadata, reports)
            manifests = [RankManifest.from_bytes(report.manifest) for report in reports]
            cut: dict[tuple[str, tuple[int, ...]], planning.CutChunk] = {}
            for chunk in itertools.chain.from_iterable(report.cut for report in reports):
                cut.setdefault((chunk.array.key, chunk.index), chunk).local.update(chunk.local)
            own = manifests[self._current.rank]
            arrays = {chunk.array.key: (chunk.array, False) for chunk in cut.values()}
            writes = [_joined(chunk) for chunk in cut.values()]
            put_chunks(begun.attempt, self.options, own, arrays.values(), writes)
            own.seconds["write"] += perf_counter() - start
            about = RootContent(
                common_backend=(record.BACKEND, record.VERSION),
                record={record.MEMBER: values.to_json()},
                world_size=len(reports),
                seconds=perf_counter() - self._current.started,
            )
            made = publish(begun.attempt, self.options, manifests, about)
            begun.abandon.detach()
        finally:
            # Give up a failed attempt now, because the next save to this place would wait for it.
            self._give_up()
        url, size, seconds = self.checkpoint_id, made["stored_bytes"], made["seconds"]
        text = f"{url}: committed, {size} bytes in {seconds:.3f} s"
        told = {"url": url, "bytes": size, "seconds": seconds, "chunks": made["chunks"]}
        log_event(logger, "commit", text, **told, world_size=made["world_size"])
        if self._marker:
            # After the commit, because programs take a folder with it for a complete checkpoint.
            self._place.replace(DCP_METADATA_NAME, MARKER)
            self._place.forget_listings()
