"""The storage writer for PyTorch DCP: ``dcp.save(state, storage_writer=StorageWriter(url))``.

DCP brings the ranks and their collectives, the planner says what each rank writes; this module
turns that into chunks of Zarr arrays and commits them. Nothing is pickled unasked: values that are
no tensors go into the root document as JSON, long ones into JSON files of their own, and a value
without a JSON form is refused.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardstore.dcp.reader import Placed, forget_listings
from shardstore.dcp.write_items import Grids, Piece, Report, Task, with_items, write_items
from shardstore.distributed.groups import group_size
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointingException,
    KeyNameError,
)
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.publish import About, publish, write_chunks
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.format.names import DCP_METADATA_NAME as METADATA_NAME
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.options import SaveOptions, WriterKeywords, options_of
from shardstore.values.record import BACKEND, MEMBER, VERSION, StateRecord

__all__ = ["StorageWriter", "put_together", "state_record"]


def state_record(metadata: Metadata, reports: Sequence[Report]) -> StateRecord:
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


def put_together(
    reports: Sequence[Report], rank: int, attempt: Attempt, options: SaveOptions
) -> bytes:
    """Write the chunks that several ranks hold. Called by the coordinator.

    Args:
        reports: of all ranks.
        rank: the coordinator's.
        attempt: where to.
        options: how.

    Returns:
        A manifest of these chunks.

    Raises:
        AccessPatternError: the ranks together hold less, or more, than a whole chunk.
        StorageError: the store refused.
    """
    start = perf_counter()
    manifest = RankManifest(rank)
    metas: dict[str, ArrayMeta] = {}
    chunks: dict[tuple[str, tuple[int, ...]], list[Piece]] = {}
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
    manifest.seconds = {"write": perf_counter() - start}
    return manifest.to_bytes()


def _joined(meta: ArrayMeta, index: tuple[int, ...], pieces: Sequence[Piece]) -> NDArray[Any]:
    box = meta.grid.box(index)
    dtype = dtypes.numpy_dtype(meta.dtype)
    held = sum(piece.within.size for piece in pieces)
    if held != box.size:
        raise AccessPatternError(
            f"Invalid access pattern: the ranks together hold {held} of the {box.size} elements "
            f"of key {meta.key!r} offset {box.offset} shape {box.shape}",
            key=meta.key,
            chunk=index,
        )
    out: NDArray[Any] = np.empty(box.shape, dtype)
    for piece in pieces:
        data = np.frombuffer(piece.data, np.uint8).view(dtype).reshape(piece.within.shape)
        where: tuple[Any, ...] = (..., *piece.within.slices)
        out[where] = data
    return out


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
            DTypeMismatchError, KeyNameError: a tensor can not be stored.
        """
        plans = [with_items(rank, plan) for rank, plan in enumerate(plans)]
        grids = Grids(plans, self.options.target_chunk_bytes)
        self._give_up()
        attempt = checkpoints.begin(self._place, self.options)
        self._attempt = attempt
        self._abandon = weakref.finalize(self, _abandon, attempt, os.getpid())
        return [
            replace(plan, storage_data=grids.task(rank, plan, attempt.id))
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
        report = write_items(
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
        record = state_record(metadata, reports)
        manifests = [report.manifest for report in reports]
        manifests.append(put_together(reports, self._rank, attempt, self.options))
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
