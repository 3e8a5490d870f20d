"""The storage reader for PyTorch DCP: ``dcp.load(state, storage_reader=StorageReader(url))``.

Reads what :class:`shardstore.dcp.StorageWriter` wrote, and the tensors and values of any other
shardstore checkpoint, under any layout: regions go straight into the memory of the tensors that the
planner names. Nothing that is stored is unpickled, except objects that had no JSON form, and those
with ``weights_only``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from shardstore.dcp.place import Placed
from shardstore.errors import DTypeMismatchError, MissingKeyError
from shardstore.mapping import ShardedObject
from shardstore.storage import dtypes
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.chunks import RegionRead
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.grid import Box
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.strategies.common_json import StatePath, StateRecord
from shardstore.validation import verify_checkpoint_and_load_strategy

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
        self._cast = cast
        self._threads = threads
        self._stored: StoredCheckpoint | None = None
        self._record = StateRecord()
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. Called by all ranks."""
        if checkpoint_id is not None:
            self._go_to(checkpoint_id)
        self._stored, self._record, self._values = None, StateRecord(), {}

    def read_metadata(self) -> Metadata:
        """What is stored: one document. Called by all ranks.

        Raises:
            NotACheckpointError: nothing there that can be loaded.
        """
        stored = StoredCheckpoint(self._place, threads=self._threads)
        stored.require()
        found: dict[str, Any] = {key: _described(meta) for key, meta in stored.arrays.items()}
        paths: dict[str, StatePath] = {key: (key,) for key in found}
        record = None
        if stored.root is not None:
            record = StateRecord.from_root(stored.root.attributes, self._place.url)
        if record is None:
            # Not written by DCP: the common part, leaf by leaf.
            _, common = verify_checkpoint_and_load_strategy(self._place.url)
            self._values = {}
            _flatten(common.load_common(self._place.url), (), self._values, paths)
            record = StateRecord(paths)
        else:
            paths.update({key: (key,) for key in (*record.values, *record.files)})
            paths.update(record.paths)
        for key in (*record.values, *record.files, *self._values):
            found[key] = BytesStorageMetadata()
        self._stored, self._record = stored, record
        return Metadata(
            state_dict_metadata=found,
            planner_data={key: paths[key] for key in found},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the checkpoint was opened for its metadata. Called by all ranks."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add. Called by all ranks."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add. Called by the coordinator."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items into the planner's tensors. Called by all ranks.

        Raises:
            DTypeMismatchError: a tensor has another data type than what is stored, without
                ``cast``.
            ChunkMissingError, ChunkCorruptError: what is stored is not what was written.
            UnsafeObjectError: an object needs a class that was not allowed.
        """
        assert self._stored is not None
        direct: list[RegionRead] = []
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        staged: list[_Staged] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(item.storage_index.fqn))
                continue
            target = planner.resolve_tensor(item).detach()
            meta, box = self._region(item, target)
            targets.append((item, target))
            if _is_direct(target, meta):
                direct.append(RegionRead(meta, box, dtypes.as_numpy(target)))
            else:
                staged.append(_Staged(meta, box, target))
        if direct:
            self._stored.read(direct)
        _read_staged(self._stored, staged)
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _region(self, item: ReadItem, target: torch.Tensor) -> tuple[ArrayMeta, Box]:
        assert self._stored is not None
        key = item.storage_index.fqn
        meta = self._stored.arrays[key]
        start = item.storage_index.offset or (0,) * len(meta.shape)
        offset = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
        stored = dtypes.torch_dtype(meta.dtype)
        if target.dtype != stored and not self._cast:
            raise DTypeMismatchError(
                f"key {key!r} is stored as {stored} in {self.checkpoint_id} but is to be loaded "
                f"into {target.dtype}; nothing is cast silently: load into {stored} and convert, "
                "or give the StorageReader cast=True",
                key=key,
                url=self.checkpoint_id,
            )
        return meta, Box(offset, tuple(item.lengths))

    def _value(self, key: str) -> io.BytesIO:
        """A value as the planner wants it: what ``torch.load`` reads, made anew in this process."""
        url = self.checkpoint_id
        if key in self._values:
            value = self._values[key]
        elif key in self._record.values:
            value = self._record.value(key, url)
        elif key in self._record.files:
            wanted = {key: ShardedObject(key, None, (1,), (0,))}
            value = TorchCommonLoadStrategy().load_sharded_objects(wanted, url)[key]
        else:
            raise MissingKeyError(f"value {key!r} is not in the checkpoint {url}", key=key, url=url)
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return stream


def _described(meta: ArrayMeta) -> TensorStorageMetadata:
    """A tensor to DCP's planner: of one piece, since any region of it can be read."""
    shape = torch.Size(meta.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    return TensorStorageMetadata(TensorProperties(dtypes.torch_dtype(meta.dtype)), shape, [whole])


def _flatten(
    state: Any, path: StatePath, values: dict[str, Any], paths: dict[str, StatePath]
) -> None:
    if isinstance(state, Mapping):
        for name, value in state.items():
            _flatten(value, (*path, str(name)), values, paths)
        return
    key = ".".join(map(str, path))
    if key in paths:
        return
    values[key], paths[key] = state, path


def _is_direct(target: torch.Tensor, meta: ArrayMeta) -> bool:
    return (
        target.device.type == "cpu"
        and type(target) is torch.Tensor
        and target.layout is torch.strided
        and target.dtype == dtypes.torch_dtype(meta.dtype)
        and not target.is_conj()
        and not target.is_neg()
        and not any(
            stride == 0 and size > 1
            for stride, size in zip(target.stride(), target.shape, strict=True)
        )
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
