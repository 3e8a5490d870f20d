"""Strategies of backend ``("torch_dist", 1)``: DCP's own files, the format of Megatron-Core.

PyTorch DCP's planner decides what each rank writes. :mod:`shardstore.dcp.torch_dist_save` writes
the files, and :mod:`shardstore.dcp.files` reads them with a restricted unpickler. A flattened range
is stored as in Megatron-Core, in an array whose leading axes are the grid of shards and whose last
axis has the elements of a flattened shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from shardstore.core import DCP_BACKEND
from shardstore.dcp.files import ORIGINAL_SHAPE, DcpFiles
from shardstore.dcp.torch_dist_save import FilesSave
from shardstore.dict_utils import nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointingException,
    FormatVersionError,
)
from shardstore.loading.assemble import assemble, read_chunks
from shardstore.loading.context import context_of
from shardstore.loading.plan import plan_reads, whole_tensor
from shardstore.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from shardstore.saving.replicas import without_main_replica
from shardstore.saving.session import SaveSession, session_of
from shardstore.saving.sources import require_plain
from shardstore.storage.format import dtypes
from shardstore.storage.format.names import COMMON_OBJECT, COMMON_STATE_NAME
from shardstore.storage.movers.chunks import ReadDone, RegionRead, chunk_parts
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    ReadsOwnFormat,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)
from shardstore.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from shardstore.strategies.common import TorchCommonLoadStrategy

BACKEND, VERSION = DCP_BACKEND, 1
WRITER_THREADS = 2

_Shapes = dict[str, dict[str, tuple[int, ...]]]


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
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

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = VERSION,
        keep_only_main_replica: bool = True,
        thread_count: int = WRITER_THREADS,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(backend, version)
        if version != VERSION:
            raise FormatVersionError(
                f"backend {backend!r} has no version {version!r}, only {VERSION}"
            )
        if not isinstance(thread_count, int) or thread_count < 1:
            raise ArgumentError(f"thread_count={thread_count!r} must be a number of at least 1")
        if separation_hint is not None and (
            not isinstance(separation_hint, str)
            or "/" in separation_hint
            or separation_hint.startswith(".")
        ):
            raise ArgumentError(
                f"separation_hint={separation_hint!r} must be how keys begin, such as "
                "'optimizer.', and how a file's name may begin"
            )
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.cached_metadata = cached_metadata
        self.separation_hint = separation_hint

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: this strategy handles ShardedObjects too."""
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors and objects. Every rank calls it and waits for all others.

        Raises:
            AccessPatternError: a shard is a flattened range of an irregular shard, which the format
                cannot express.
            StorageError: the place is in an object store, or the disk failed.
            CheckpointingException: DCP raised an error on some rank; every rank raises it.
        """
        _, ranks, saving = self._planned(sharded_state_dict, checkpoint_dir)
        error: Exception | None = None
        try:
            saving.write()
        except Exception as problem:
            error = problem
        saving.finish(ranks, error)

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
        session, ranks, saving = self._planned(sharded_state_dict, checkpoint_dir)
        options = SaveOptions() if session is None else session.options
        failed: list[Exception] = []
        try:
            with nullcontext() if session is None else session.timed("stage"):
                saving.stage(
                    budget_bytes=options.staging_budget_bytes, overlap=options.overlap_staging
                )
        except Exception as problem:
            # Raised here, only this rank would see it. The finalisation raises it on every rank.
            saving.close()
            failed.append(problem)
        if session is not None:
            session.staging = saving.staging
            session.failure = session.failure or next(iter(failed), None)

        def write() -> None:
            if failed or (session is not None and session.failure is not None):
                saving.close()
                return
            with nullcontext() if session is None else session.timed("write"):
                saving.write()

        def finish() -> None:
            if session is None:
                saving.finish(ranks, failed[0] if failed else None)
                return
            try:
                # An asynchronous save has other connections between the ranks than the plan had.
                saving.finish(session.ranks, session.failure)
            except Exception as problem:
                session.failure = session.failure or problem

        return AsyncRequest(write, (), [finish])

    def _planned(
        self, state_dict: ShardedStateDict, place: str | Path
    ) -> tuple[SaveSession | None, Ranks, FilesSave]:
        """Agree with all ranks on the items that each writes. Every rank waits for all others."""
        session = session_of(place)
        ranks = Ranks.current() if session is None else session.ranks
        folder = str(place)
        error: BaseException | None = None if session is None else session.failure
        state: dict[str, Any] = {}
        shapes: _Shapes = {}
        held: list[str] = []
        if error is None:
            try:
                location = Location.of(place)
                location.require_local(f"writing the {BACKEND!r} format")
                folder = location.url
                state, shapes, held = _for_dcp(state_dict, self.keep_only_main_replica)
            except Exception as problem:
                error = problem  # plan() raises it on every rank
        url = folder if session is None else session.target.url
        planner = _Planner(shapes, held)
        saving = FilesSave(folder, url, planner, ranks, self.thread_count, self.separation_hint)
        saving.plan(state, ranks, error)
        return session, ranks, saving


class _Planner(DefaultSavePlanner):
    """Planner that keeps flat keys and sends the original shapes of flattened tensors to the
    coordinator."""

    def __init__(self, shapes: _Shapes, held: list[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shapes = shapes
        self._held = held

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=(self._shapes, self._held))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        merged: _Shapes = {}
        for plan in all_plans:
            merged.update(plan.planner_data[0])
        for rank, plan in enumerate(all_plans):
            lost = set(plan.planner_data[1]) - set(metadata.state_dict_metadata)
            if lost:
                raise without_main_replica(sorted(lost), rank)
        cast(Any, metadata).mcore_data = merged
        return [replace(plan, planner_data=None) for plan in plans], metadata


def _for_dcp(
    state_dict: ShardedStateDict, only_main: bool
) -> tuple[dict[str, Any], _Shapes, list[str]]:
    """Return flat keys with values for DCP, original shapes of flattened tensors, and keys that
    other ranks save."""
    held: list[str] = []
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    state: dict[str, Any] = {}
    shapes: _Shapes = {}
    for value in nested_values(state_dict):
        if only_main and not is_main_replica(value.replica_id):
            held.append(value.unique_key if isinstance(value, ShardedObject) else value.key)
            continue
        if isinstance(value, ShardedObject):
            state[value.unique_key] = [value.data]
        elif isinstance(value, ShardedTensor):
            if value.data is not None:
                require_plain(value.data, value.key)
                # DCP writes the memory of a tensor and ignores its conjugate and negative bits.
                value = replace(value, data=value.data.resolve_conj().resolve_neg())
            shapes.setdefault(value.key, {})
            if value.flattened_range is not None:
                shapes[value.key] = {ORIGINAL_SHAPE: value.global_shape}
                value = _folded(value)
            shards.setdefault(value.key, []).append(CheckpointableShardedTensor.from_sh_ten(value))
    for key, found in shards.items():
        state[key] = LocalShardsContainer(cast(list[torch.Tensor], found))
    return state, shapes, held


def _folded(tensor: ShardedTensor) -> ShardedTensor:
    """Return a flattened range as a shard of Megatron-Core's array for such ranges."""
    counts = tensor.axis_fragmentations
    if counts is None or any(n % c for n, c in zip(tensor.global_shape, counts, strict=True)):
        raise AccessPatternError(
            f"key {tensor.key!r} holds a flattened range of an irregular shard "
            f"(axis_fragmentations={counts} of {tensor.global_shape}), which the {BACKEND!r} "
            "format cannot express; save with ('zarr', 2)",
            key=tensor.key,
        )
    assert tensor.flattened_range is not None
    size = math.prod(tensor.local_shape)
    start, stop, _ = tensor.flattened_range.indices(size)
    data = tensor.data
    if data is not None:
        data = data.reshape((1,) * len(counts) + (-1,))
    return ShardedTensor(
        tensor.key,
        data,
        tensor.dtype,
        (1,) * len(counts) + (max(0, stop - start),),
        (*counts, size),
        (*tensor.local_chunk_offset_in_global(), start),
        None,
        replica_id=tensor.replica_id,
    )


class TorchDistLoadShardedStrategy(ReadsOwnFormat, LoadShardedStrategy):
    """Load strategy for DCP's own files, of Megatron-Core or of this package.

    Args:
        cache_metadata, stream_ckpt_dequant, checkpoint_name: arguments of Megatron-Core, without
            effect. Each load reads the metadata, and a quantised tensor is filled by its ``copy_``.
        cast: used if :func:`shardstore.load` is called without ``cast``; see there.
    """

    _backend, _versions = BACKEND, (VERSION,)
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

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True: this strategy handles ShardedObjects too."""
        return True

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
        files = DcpFiles.open(checkpoint_dir)
        context, url = context_of(checkpoint_dir), files.location.url
        values = list(nested_values(sharded_state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        plan = plan_reads(tensors, files.arrays, url, cast=context.cast or self.cast)

        def read(reads: Sequence[RegionRead], done: ReadDone | None) -> None:
            files.read(reads)
            if done is not None:
                for region in reads:
                    done(region.out.nbytes, sum(1 for _ in chunk_parts(region)))

        read_chunks(context, plan, read=read)
        objects = {
            id(value): _unwrapped(files.read_object(value.unique_key))
            for value in values
            if isinstance(value, ShardedObject)
        }
        return assemble(plan, sharded_state_dict, url, objects)

    def load_tensors_metadata(
        self, checkpoint_dir: str | Path, metadata: object = None
    ) -> ShardedStateDict:
        """Return key -> unsharded ShardedTensor without data, for each stored tensor.

        Args:
            checkpoint_dir: checkpoint to read.
            metadata: argument of Megatron-Core, without effect; the file is read.
        """
        return _whole_tensors(DcpFiles.open(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the tensors as above, and unique key -> ShardedObject for each stored object."""
        files = DcpFiles.open(checkpoint_dir)
        found = _whole_tensors(files)
        for key in files.objects:
            sharded = ShardedObject.empty_from_unique_key(key)
            found[sharded.unique_key] = sharded
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Raise an error, because many tensors share a file in this format.

        Raises:
            CheckpointingException: always; it names other ways.
        """
        raise CheckpointingException(
            f"tensors whose keys begin with {key_prefix!r} cannot be removed from "
            f"{checkpoint_dir}: in the {BACKEND!r} format many tensors share a file. Load the "
            "other tensors and save them anew, or convert the checkpoint to ('zarr', 2) "
            "(`shardstore convert`) and remove them there",
            url=str(checkpoint_dir),
        )


class TorchDistCommonSaveStrategy(SaveCommonStrategy):
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
        if context_of(checkpoint_dir).stored.has_document(COMMON_STATE_NAME):
            return super().load_common(checkpoint_dir)
        key = ShardedObject(COMMON_OBJECT, None, (1,), (0,)).unique_key
        loaded: StateDict = _unwrapped(DcpFiles.open(checkpoint_dir).read_object(key))
        return loaded


def _whole_tensors(files: DcpFiles) -> ShardedStateDict:
    return {
        key: whole_tensor(key, meta.shape, dtypes.torch_dtype(meta.dtype))
        for key, meta in files.arrays.items()
    }


def _unwrapped(value: Any) -> Any:
    """Return the item of a list of one, in which Megatron-Core stores an object."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == 1:
        return value[0]
    return value


def register_default_torch_dist_strategies() -> None:
    """Register the default strategies of the backend."""
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, BACKEND, VERSION, TorchDistSaveShardedStrategy()
    )
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, BACKEND, VERSION, TorchDistLoadShardedStrategy()
    )
    register_default_strategy(
        StrategyAction.SAVE_COMMON, BACKEND, VERSION, TorchDistCommonSaveStrategy(BACKEND, VERSION)
    )
    register_default_strategy(
        StrategyAction.LOAD_COMMON, BACKEND, VERSION, TorchDistCommonLoadStrategy()
    )
