"""Strategies of backend ``("torch_dist", 1)``: DCP's own files, the format of Megatron-Core.

PyTorch DCP's planner decides which rank writes each item, and makes the metadata. A file is a
sequence of items in the format of ``torch.save``; :mod:`shardstore.dcp.files` reads it with a
restricted unpickler. A flattened range is stored as in Megatron-Core, in an array whose leading
axes are the grid of shards and whose last axis has the elements of a flattened shard.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import warnings
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from shardstore import errors
from shardstore.core import DCP_BACKEND
from shardstore.coverage import ShardReport, check_reports, report_shards, without_main_replica
from shardstore.dcp.files import ORIGINAL_SHAPE, DcpFiles, append, remove_keys
from shardstore.dict_utils import nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.loading.plan import assemble, plan_reads, whole_tensors
from shardstore.loading.read import context_of, read_chunks
from shardstore.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    flat_bounds,
    is_main_replica,
)
from shardstore.saving.plan import data_of, plain_tensor
from shardstore.saving.session import session_of
from shardstore.saving.staging import Staging
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import array_of_one_chunk
from shardstore.storage.format.names import COMMON_OBJECT, COMMON_STATE_NAME, DCP_METADATA_NAME
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import behind, streams_of
from shardstore.storage.options import DEFAULTS, require_number
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.folder import store_errors
from shardstore.storage.stores.location import Location
from shardstore.strategies import base
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from shardstore.strategies.common import TorchCommonLoadStrategy
from shardstore.utils import extract_sharded_objects, sharded_tensors_of
from shardstore.values.torch_dump import dump_bytes

BACKEND, VERSION = DCP_BACKEND, 1


class TorchDistSaveShardedStrategy(base.AsyncSaveShardedStrategy):
    """Save strategy for DCP's own files, synchronous or asynchronous.

    The parameters are those of Megatron-Core 0.15's strategy of this name.

    Args:
        backend: ``"torch_dist"``.
        version: 1.
        keep_only_main_replica: only the rank with the main replica of a shard passes it to DCP.
            If False, every rank passes all its replicas, DCP chooses the rank that writes each, and
            a main replica is not required.
        thread_count: number of files that each rank writes at a time.
        cached_metadata: accepted without effect. Each save makes its plan anew, in one exchange of
            all ranks.
        separation_hint: prefix of keys. Tensors and objects with this prefix go into separate
            files, whose names begin with it too.
        cpu_shm_mode: accepted without effect, because no other process writes.

    Raises:
        FormatVersionError: ``version`` is not 1.
        ArgumentError: ``thread_count`` is not a positive number, or a file name cannot begin with
            ``separation_hint``.
    """

    can_handle_sharded_objects = True
    meets_to_plan = "always"

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(backend, version)
        if version != VERSION:
            raise errors.FormatVersionError(
                f"backend {backend!r} has no version {version!r}, only {VERSION}"
            )
        require_number("thread_count", thread_count)
        hint = separation_hint or ""
        if not isinstance(hint, str) or "/" in hint or hint.startswith("."):
            raise errors.ArgumentError(
                f"separation_hint={separation_hint!r} must be how keys begin, such as "
                "'optimizer.', and how a file's name may begin"
            )
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.separation_hint = separation_hint

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors and objects. Every rank calls it and waits for all others.

        Raises:
            AccessPatternError: a shard is a flattened range of an irregular shard, which the format
                cannot express.
            StorageError: the place is in an object store, or the disk failed.
            CheckpointingException: DCP raised an error on some rank; every rank raises it.
        """
        saving = _FilesSave(self, sharded_state_dict, checkpoint_dir)
        saving.finish(saving.write)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy this rank's tensors and objects, and return a request that writes them.

        Every rank calls it and waits for all others once. After the call the state may be changed,
        unless the copy overlaps (``overlap_staging`` of :func:`shardstore.async_save`). Objects are
        always copied before the call returns. The finalisation of the request writes ``.metadata``
        after every rank has written its files. Without ``.metadata`` nothing can be read.

        Returns:
            A request: its function writes in a thread, its finalisation runs on every rank.

        Raises: the errors of :meth:`save`. An error of one rank after the plan is made is raised on
            every rank, when the request is finalised.
        """
        saving = _FilesSave(self, sharded_state_dict, checkpoint_dir)
        try:
            saving.stage()
        except Exception as problem:
            # Raised here, only this rank would see it. Raised by write(), all ranks learn of it.
            saving.failure = problem
        return AsyncRequest(saving.write, (), [saving.finish])


class _FilesSave:
    """One rank's part of a save. Every rank makes one, and waits for all others: they decide which
    items each rank writes. Then it calls :meth:`stage` or not, :meth:`write` and :meth:`finish`.

    Args:
        strategy: the strategy, with the number and names of files.
        state_dict: tensors and objects of this rank.
        place: the place as the strategy got it.

    Attributes:
        session: the session that writes at the place, if there is one.
        failure: an error of this rank, which :meth:`write` raises.

    Raises:
        CheckpointingException: some rank failed; raised on every rank.
    """

    def __init__(
        self,
        strategy: TorchDistSaveShardedStrategy,
        state_dict: ShardedStateDict,
        place: str | Path,
    ) -> None:
        self.session = session = session_of(place)
        self.failure = None if session is None else session.failure
        self._url = str(place) if session is None else session.target.url
        self._ranks = ranks = Ranks.current() if session is None else session.ranks
        self._options = DEFAULTS if session is None else session.options
        self._threads, self._hint = strategy.thread_count, strategy.separation_hint or ""
        # Keys are flat already, and shards stay shards.
        self._planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._staging: Staging | None = None
        self._streams: list[torch.Stream | None] = []
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}
        self._written: list[tuple[MetadataIndex, filesystem._StorageInfo]] = []
        what = f"planning the save to {self._url}"
        with ranks.meet(what, self._decide, error=self.failure) as meeting:
            self._folder = Location.of(place) if session is None else session.attempt.location
            if not self._folder.is_local:
                raise self._folder.error(
                    f": the {BACKEND!r} format is written to local folders only: save to a disk, "
                    "and copy the folder"
                )
            only_main = strategy.keep_only_main_replica
            state, report = _prepared(state_dict, only_main)
            if only_main and self._options.validate_access_integrity:
                report.shards = report_shards(nested_values(state_dict))
            with store_errors("creating", self._url):
                os.makedirs(self._folder.url, exist_ok=True)
            self._planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
            plan = self._planner.create_local_plan()
            meeting.report = replace(plan, planner_data=report)
        if session is not None:
            session.awaits_plan = False
        of_others = meeting.answer[ranks.members.index(ranks.rank)]
        self._items = [item for item in plan.items if item.index not in of_others]

    def _decide(self, asked: list[SavePlan]) -> list[set[MetadataIndex]]:
        """Make the metadata, and return the items of each rank that another rank writes. The
        coordinator calls it."""
        try:
            plans, self._metadata = self._planner.create_global_plan(asked)
        except Exception as problem:
            raise errors.CheckpointingException(
                "PyTorch DCP refuses the joint plan of the ranks: "
                f"{type(problem).__name__}: {problem}"
            ) from problem
        found: list[_RankReport] = [plan.planner_data for plan in asked]
        for rank, one in zip(self._ranks.members, found, strict=True):
            if lost := set(one.copies) - set(self._metadata.state_dict_metadata):
                raise without_main_replica(sorted(lost), rank)
        check_reports([one.shards for one in found], self._ranks.members)
        cast(Any, self._metadata).mcore_data = dict(ChainMap(*(one.shapes for one in found)))
        indexes = ([{item.index for item in plan.items} for plan in of] for of in (asked, plans))
        return [own - kept for own, kept in zip(*indexes, strict=True)]

    def stage(self) -> None:
        """Copy this rank's items, so that the state may be changed. :meth:`write` uses the copy,
        and raises an error of the copying.

        Raises:
            ArgumentError: the copy is larger than the budget.
            MemoryError: the host memory is too small for the copy.
        """
        budget_bytes, size = self._options.staging_budget_bytes, 0
        chunks: dict[MetadataIndex, ChunkWrite] = {}
        for item in self._items:
            data, index = self._planner.resolve_data(item), item.index
            size += data.getbuffer().nbytes if isinstance(data, io.BytesIO) else data.nbytes
            if isinstance(data, io.BytesIO):  # the planner has just made it
                self._copies[index] = data
            elif (dtype := str(data.dtype).removeprefix("torch.")) not in dtypes.names():
                self._copies[index] = data.detach().to("cpu", copy=True)
            else:
                array = array_of_one_chunk(index.fqn, tuple(data.shape), dtype)
                source = data_of(data, index.fqn)
                chunks[index] = ChunkWrite(array, (0,) * data.ndim, source)
        if budget_bytes is not None and size > budget_bytes:
            raise errors.ArgumentError(
                f"staging_budget_bytes={budget_bytes}: DCP's files are written from a complete "
                f"copy, which takes {size} bytes on this rank; raise the budget to that size, or "
                "save with ('zarr', 2), which can copy while it writes"
            )
        self._staged = list(chunks)
        self._staging = Staging(
            list(chunks.values()), overlap=self._options.overlap_staging, threads=self._threads
        )
        if self.session is not None:
            self.session.staging = self._staging

    def write(self) -> None:
        """Write this rank's files, from the copy if there is one. It waits for no other rank.

        Raises:
            StorageError: the disk failed.
        """
        try:
            if self.failure is not None:
                raise self.failure
            if self._staging is not None:
                copies = (dtypes.as_tensor(copy.data()) for copy in self._staging.copies())
                self._copies.update(zip(self._staged, copies, strict=True))
            else:
                tensors = (i for i in self._items if i.type is not WriteItemType.BYTE_IO)
                self._streams = streams_of(map(self._planner.resolve_data, tensors))
            run_batched(self._files(), self._write_files, threads=self._threads)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):  # torch.save() hides it
                cause = cause.__cause__ or cause.__context__
            if cause is None or isinstance(error, errors.CheckpointingException):
                raise
            with store_errors(f"writing on rank {self._ranks.rank} to", self._url):
                raise cause from error
        finally:
            self._copies = {}
            if self._staging is not None:
                self._staging.close()

    def _files(self) -> list[tuple[str, list[WriteItem]]]:
        """Return the name and the items of each file; files of a prefix have about equal sizes.

        With a prefix, half of the files are for keys that have it, at least one; as in
        Megatron-Core.
        """
        most = max(1, self._threads // 2) if self._hint else self._threads
        by_prefix: dict[str, list[WriteItem]] = {"": []}
        for item in self._items:
            prefix = self._hint if item.index.fqn.startswith(self._hint) else ""
            by_prefix.setdefault(prefix, []).append(item)
        files: list[tuple[str, list[WriteItem]]] = []
        for prefix, items in by_prefix.items():
            for part in filter(None, filesystem._split_by_size_and_type(most, items)):
                files.append((f"{prefix}__{self._ranks.rank}_{len(files)}.distcp", part))
        return files

    def _write_files(self, files: Sequence[tuple[str, list[WriteItem]]]) -> None:
        for name, items in files:
            with open(os.path.join(self._folder.url, name), "wb") as file:
                for item in items:
                    data = self._copies.get(item.index)
                    if data is None:
                        data = self._planner.resolve_data(item)
                    if isinstance(data, torch.Tensor):
                        with behind(*self._streams):
                            data = data.detach().cpu()
                    self._written.append((item.index, append(file, name, data)))

    def finish(self, work: Callable[[], None] = lambda: None) -> None:
        """Report the items that this rank wrote; then the coordinator writes ``.metadata``.

        Without ``.metadata`` nothing can be read. Every rank calls it and waits for all others. If
        some rank failed, every rank raises an error.

        Args:
            work: called first; its error, or the session's, prevents the writing of ``.metadata``.
        """

        def decide(reports: list[list[tuple[MetadataIndex, filesystem._StorageInfo]]]) -> None:
            self._metadata.storage_data = dict(chain.from_iterable(reports))
            self._metadata.storage_meta = StorageMeta()  # no folder: the commit renames the folder
            self._metadata.version = filesystem.CURRENT_DCP_VERSION
            self._folder.replace(DCP_METADATA_NAME, pickle.dumps(self._metadata))

        session = self.session
        # An asynchronous save has other connections between the ranks than the plan had.
        ranks = self._ranks if session is None else session.commit_ranks
        error = self.failure if session is None else session.failure
        what = f"saving to {self._url}"
        with ranks.meet(what, decide, error=error) as meeting:
            work()
            meeting.report = self._written


class _Planner(DefaultSavePlanner):
    """DCP's planner, which writes only the memory that the tensors of an object use."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor, or an object in the format of ``torch.save``."""
        is_tensor = write_item.type is not WriteItemType.BYTE_IO
        return object if is_tensor else io.BytesIO(dump_bytes(object))


@dataclass
class _RankReport:
    """A rank's report to the coordinator, in addition to its items.

    Attributes:
        shapes: key -> original shape of a flattened tensor, as Megatron-Core's metadata has it.
        copies: keys of which the rank holds only copies.
        shards: the shards that are checked.
    """

    shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    shards: ShardReport = field(default_factory=lambda: report_shards(()))


def _prepared(state_dict: ShardedStateDict, only_main: bool) -> tuple[dict[str, Any], _RankReport]:
    """Return this rank's tensors and objects by flat key, for DCP's planner."""
    report = _RankReport()
    shards: dict[str, list[torch.Tensor]] = {}
    state: dict[str, Any] = {}
    for value in nested_values(state_dict):
        if only_main and not is_main_replica(value.replica_id):
            report.copies.append(getattr(value, "unique_key", value.key))
        elif isinstance(value, ShardedObject):
            state[value.unique_key] = [value.data]
        elif isinstance(value, ShardedTensor):
            if value.data is not None:
                # DCP writes the memory of a tensor, not its conjugate and negative bits.
                data = plain_tensor(value.data, value.key).resolve_conj().resolve_neg()
                value = replace(value, data=data)
            report.shapes.setdefault(value.key, {})
            if value.flattened_range is not None:
                report.shapes[value.key] = {ORIGINAL_SHAPE: value.global_shape}
                value = _folded(value)
            shards.setdefault(value.key, []).append(CheckpointableShardedTensor.from_sh_ten(value))
    state.update((key, LocalShardsContainer(found)) for key, found in shards.items())
    return state, report


def _folded(tensor: ShardedTensor) -> ShardedTensor:
    """Return a flattened range as a shard of Megatron-Core's array for such ranges."""
    counts = tensor.axis_fragmentations
    if counts is None or any(n % c for n, c in zip(tensor.global_shape, counts, strict=True)):
        raise errors.AccessPatternError(
            f"key {tensor.key!r} holds a flattened range of an irregular shard "
            f"(axis_fragmentations={counts} of {tensor.global_shape}), which the {BACKEND!r} "
            "format cannot express; save with ('zarr', 2)",
            key=tensor.key,
        )
    size = math.prod(tensor.local_shape)
    start, stop = flat_bounds(tensor)
    ones = (1,) * len(counts)
    return ShardedTensor(
        tensor.key,
        None if tensor.data is None else tensor.data.reshape(*ones, -1),
        tensor.dtype,
        (*ones, max(0, stop - start)),
        (*counts, size),
        (*tensor.local_chunk_offset_in_global(), start),
        None,
        replica_id=tensor.replica_id,
    )


def _files(place: str | Path) -> DcpFiles:
    return DcpFiles.open(context_of(place).stored.location)


class TorchDistLoadShardedStrategy(base.ReadsOwnFormat, base.LoadShardedStrategy):
    """Load strategy for DCP's own files, of Megatron-Core or of this package.

    Args:
        cache_metadata, stream_ckpt_dequant, checkpoint_name: arguments of Megatron-Core, without
            effect. Each load reads the metadata, and a quantised tensor is filled by its ``copy_``.
        cast: used if :func:`shardstore.load` is called without ``cast``; see there.
    """

    _backend, _versions = BACKEND, (VERSION,)
    can_handle_sharded_objects = True
    cached_global_metadata = None

    def __init__(
        self,
        cache_metadata: bool = False,
        stream_ckpt_dequant: bool = True,
        checkpoint_name: str | Path | None = None,
        *,
        cast: bool | Literal["warn"] = False,
    ) -> None:
        self.cast = cast

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read tensors and objects; fill given tensors in place.

        Any rank may call it; it waits for no other.

        Raises:
            MissingKeyError, ShapeMismatchError, DTypeMismatchError: stored and requested keys,
                shapes or data types differ.
            DamagedCheckpointError: a file is missing, truncated or malformed. The format has no
                checksums, so changed bytes of a tensor are not found.
            UnsafeObjectError: an object needs a class that is not allowed.
        """
        files, context = _files(checkpoint_dir), context_of(checkpoint_dir)
        url = files.location.url
        tensors = sharded_tensors_of(sharded_state_dict)
        plan = plan_reads(tensors, files.arrays, url, cast=context.cast or self.cast)
        read_chunks(context, plan, read=files.read)
        found, _ = extract_sharded_objects(sharded_state_dict)
        objects = {id(one): files.read_unwrapped(one.unique_key) for one in nested_values(found)}
        return assemble(plan, sharded_state_dict, url, objects)

    def load_tensors_metadata(
        self, checkpoint_dir: str | Path, metadata: object = None
    ) -> ShardedStateDict:
        """Return key -> unsharded ShardedTensor without data, for each stored tensor.

        Args:
            checkpoint_dir: checkpoint to read.
            metadata: argument of Megatron-Core, without effect; the file is read.
        """
        return whole_tensors(_files(checkpoint_dir).arrays)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the tensors as above, and unique key -> ShardedObject for each stored object."""
        files = _files(checkpoint_dir)
        found = whole_tensors(files.arrays)
        for key in files.objects:
            sharded = ShardedObject.empty_from_unique_key(key)
            found[sharded.unique_key] = sharded
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove tensors that were saved with ``separation_hint=key_prefix``. One rank calls it.

        In this format many tensors share a file. If no file holds only keys with this prefix, it
        warns and changes nothing, as in Megatron-Core.
        """
        if not remove_keys(Location.of(checkpoint_dir), key_prefix):
            warnings.warn(
                f"{checkpoint_dir} is unchanged: none of its files holds only keys that begin with "
                f"{key_prefix!r}. Save with separation_hint={key_prefix!r}, or convert the "
                "checkpoint to ('zarr', 2) (`shardstore convert`), and remove them there",
                stacklevel=2,
            )


class TorchDistCommonSaveStrategy(base.SaveCommonStrategy):
    """Save strategy that stores the common part as a sharded object, as Megatron-Core 0.19 does."""

    object_key = COMMON_OBJECT

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Do nothing: the sharded strategy saves the object with the others."""


class TorchDistCommonLoadStrategy(TorchCommonLoadStrategy):
    """Loads the common part from ``common.pt`` if it exists, else from DCP's files."""

    _backend, _versions = BACKEND, (VERSION,)

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load the common part.

        Raises:
            NotACheckpointError, DamagedCheckpointError, UnsafeObjectError: see
                :meth:`TorchCommonLoadStrategy.load_common`.
        """
        if context_of(checkpoint_dir).stored.has_file(COMMON_STATE_NAME):
            return super().load_common(checkpoint_dir)
        key = ShardedObject(COMMON_OBJECT, None, (1,), (0,)).unique_key
        return cast(StateDict, _files(checkpoint_dir).read_unwrapped(key))
