"""The storage reader for PyTorch DCP: ``dcp.load(state, storage_reader=StorageReader(url))``.

Reads what :class:`shardstore.dcp.StorageWriter` wrote, and the tensors and values of any other
shardstore checkpoint, under any layout: regions go straight into the memory of the tensors that the
planner names. Nothing that is stored is unpickled, except objects that had no JSON form, and those
with ``weights_only``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from shardstore.dcp.place import Placed
from shardstore.dcp.sent_items import SentItems
from shardstore.dcp.stored_values import StoredValues, described
from shardstore.errors import DTypeMismatchError
from shardstore.loading.plan import require_writable
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.options import require_number

__all__ = ["StorageReader"]

STAGING_BYTES = 256 * 1024 * 1024


class StorageReader(Placed, DcpStorageReader):
    """Reads a shardstore checkpoint for ``torch.distributed.checkpoint.load``.

    DCP calls each method on the ranks that its docstring names; no method waits for other ranks.
    Every byte that is read is verified.

    Args:
        url: where from; ``None`` if DCP is given a ``checkpoint_id`` instead.
        cast: copy into tensors of another data type than the stored one, which is refused
            otherwise.
        threads: threads that read, each rank; default: one a processor, at most 8.
        storage_options: options of the store behind the URL.

    Raises:
        ArgumentError: ``threads`` is no number of at least 1.
    """

    _purpose = "read from:load"

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        cast: bool = False,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(url, storage_options)
        require_number("threads", threads, none=True)
        self._cast = cast
        self._threads = threads
        self._stored: StoredCheckpoint | None = None
        self._values: StoredValues | None = None
        self._sent: SentItems[ReadItem] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. Called by all ranks."""
        if checkpoint_id is not None:
            self._go_to(checkpoint_id)
        self._stored = self._values = self._sent = None

    def read_metadata(self) -> Metadata:
        """What is stored: one document. Called by all ranks.

        Raises:
            NotACheckpointError: nothing there that can be loaded.
        """
        stored = StoredCheckpoint(self._place, threads=self._threads)
        stored.require()
        values = StoredValues.of(stored)
        found: dict[str, Any] = {
            key: described(dtypes.torch_dtype(meta.dtype), meta.shape)
            for key, meta in stored.arrays.items()
        }
        found.update(values.described())
        self._stored, self._values = stored, values
        return Metadata(
            state_dict_metadata=found,
            planner_data={key: values.paths.get(key, (key,)) for key in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the checkpoint was opened for its metadata. Called by all ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add; but the items go to the coordinator as bytes, and are kept here. Called
        by all ranks."""
        self._sent = SentItems(plan.items)
        return replace(plan, items=cast("list[ReadItem]", self._sent))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add. Called by the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors. Called by all ranks.

        Raises:
            DTypeMismatchError: a tensor has another data type than what is stored, without
                ``cast``.
            ArgumentError: a tensor can not be filled in place: it is sparse, or expanded.
            ChunkMissingError, ChunkCorruptError: what is stored is not what was written.
            UnsafeObjectError: an object needs a class that was not allowed.
        """
        assert self._stored is not None
        assert self._values is not None
        direct: list[RegionRead] = []
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        staged: list[_Staged] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._values.pickled(item.storage_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            require_writable(target, item.storage_index.fqn)
            targets.append((item, target))
            common = self._values.tensors.get(item.storage_index.fqn)
            if common is not None:
                self._check_dtype(item, target.dtype, common.dtype)
                where: tuple[Any, ...] = (..., *_box(item, common.ndim).slices)
                with torch.no_grad():
                    target.copy_(common[where])
                continue
            meta = self._stored.arrays[item.storage_index.fqn]
            same = target.dtype == (stored := dtypes.torch_dtype(meta.dtype))
            if not same:
                self._check_dtype(item, target.dtype, stored)
            box = _box(item, len(meta.shape))
            if same and _is_direct(target):
                direct.append(RegionRead(meta, box, dtypes.as_numpy(target)))
            else:
                staged.append(_Staged(meta, box, target))
        if direct:
            self._stored.read(direct)
        _read_staged(self._stored, staged)
        for item, target in targets:
            planner.commit_tensor(item, target)
        self._sent = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _check_dtype(self, item: ReadItem, wanted: torch.dtype, stored: torch.dtype) -> None:
        key = item.storage_index.fqn
        if wanted != stored and not self._cast:
            raise DTypeMismatchError(
                f"key {key!r} is stored as {stored} in {self.checkpoint_id} but is to be loaded "
                f"into {wanted}; nothing is cast silently: load into {stored} and convert, "
                "or give the StorageReader cast=True",
                key=key,
                url=self.checkpoint_id,
            )


def _box(item: ReadItem, ndim: int) -> Box:
    """The region of the stored tensor that an item is."""
    start = item.storage_index.offset or (0,) * ndim
    offset = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    return Box(offset, tuple(item.lengths))


def _is_direct(target: torch.Tensor) -> bool:
    """Whether it has plain memory of this process."""
    return (
        target.is_cpu
        and type(target) is torch.Tensor
        and not target.is_conj()
        and not target.is_neg()
    )


class _Staged:
    """A region that goes through a buffer: onto a device, or into another data type."""

    def __init__(self, meta: ArrayMeta, box: Box, target: torch.Tensor) -> None:
        self.meta, self.box, self.target = meta, box, target
        self.nbytes = box.size * dtypes.itemsize(meta.dtype)

    def buffer(self) -> torch.Tensor:
        """Host memory for the region."""
        pinned = self.target.device.type == "cuda"
        dtype = dtypes.torch_dtype(self.meta.dtype)
        return torch.empty(self.box.shape, dtype=dtype, pin_memory=pinned)


def _read_staged(stored: StoredCheckpoint, staged: Sequence[_Staged]) -> None:
    """Read through buffers, a bounded amount at a time."""
    start = 0
    while start < len(staged):
        stop, size = start, 0
        while stop < len(staged) and (stop == start or size + staged[stop].nbytes <= STAGING_BYTES):
            size += staged[stop].nbytes
            stop += 1
        batch = [(item, item.buffer()) for item in staged[start:stop]]
        stored.read([RegionRead(i.meta, i.box, dtypes.as_numpy(b)) for i, b in batch])
        with torch.no_grad():
            for item, buffer in batch:
                item.target.copy_(buffer)
        start = stop
