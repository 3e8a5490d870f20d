"""Backend ``("torch_dist", 1)``: DCP's own files, as Megatron-Core writes and reads them today.

Tensors and sharded objects go through PyTorch DCP's file system writer; they are read by
:mod:`shardstore.dcp.files`, which trusts nothing. Flattened ranges take the form that Megatron-Core
gives them: the grid of shards, and behind it the elements of a flattened shard.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from shardstore.dcp.files import ORIGINAL_SHAPE, DcpFiles
from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.errors import (
    AccessPatternError,
    CheckpointingException,
    FormatVersionError,
    NotACheckpointError,
    StorageError,
)
from shardstore.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from shardstore.storage import dtypes
from shardstore.storage.location import Location
from shardstore.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from shardstore.strategies.casting import read_converting
from shardstore.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from shardstore.strategies.planned_writes import require_plain
from shardstore.strategies.read_plan import find_array, plan_read
from shardstore.strategies.unwritten import without_main_replica

__all__ = [
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "register_default_torch_dist_strategies",
]

BACKEND, VERSION = "torch_dist", 1
WRITER_THREADS = 2

_Shapes = dict[str, dict[str, tuple[int, ...]]]


class TorchDistSaveShardedStrategy(SaveShardedStrategy):
    """Save strategy for DCP's own files.

    Args:
        backend: ``"torch_dist"``.
        version: 1.
        threads: files that each rank writes at a time.
    """

    def __init__(
        self, backend: str = BACKEND, version: int = VERSION, *, threads: int = WRITER_THREADS
    ) -> None:
        super().__init__(backend, version)
        self._threads = threads

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's tensors and objects. Called by every rank, which waits for all others.

        Raises:
            AccessPatternError: a flattened range of an irregular shard, which the format lacks.
            StorageError: the place is in an object store.
            CheckpointingException: DCP failed, here or on another rank.
        """
        Location.of(checkpoint_dir).require_local(f"writing the {BACKEND!r} format")
        state, shapes, held = _for_dcp(sharded_state_dict)
        folder = str(checkpoint_dir)
        writer = FileSystemWriter(
            folder, thread_count=self._threads, sync_files=False, overwrite=True
        )
        alone = not (dist.is_available() and dist.is_initialized())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                save(state, storage_writer=writer, planner=_Planner(shapes, held), no_dist=alone)
        except CheckpointException as error:
            # Derived from BaseException, and not to be missed by who catches errors.
            raise _own(error, folder) from error


class _Planner(DefaultSavePlanner):
    """Keeps flat keys, and brings the original shapes of flattened tensors to the coordinator."""

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


def _own(error: CheckpointException, url: str) -> CheckpointingException:
    """DCP's error as one of ours: the cause, if that is one already."""
    texts = []
    for rank, (cause, _) in error.failures.items():
        if isinstance(cause, CheckpointingException):
            return cause
        if isinstance(cause, OSError) and cause.errno is not None:
            failure = StorageError(
                f"writing {url} failed on rank {rank}: {os.strerror(cause.errno)}"
            )
            failure.errno, failure.rank, failure.url = cause.errno, rank, url
            return failure
        texts.append(f"rank {rank}: {type(cause).__name__}: {cause}")
    return CheckpointingException(f"PyTorch DCP failed: {'; '.join(texts)}")


def _for_dcp(state_dict: ShardedStateDict) -> tuple[dict[str, Any], _Shapes, list[str]]:
    """Flat keys with what DCP takes, original shapes of flattened tensors, keys left to others."""
    held: list[str] = []
    shards: dict[str, list[CheckpointableShardedTensor]] = {}
    state: dict[str, Any] = {}
    shapes: _Shapes = {}
    for value in nested_values(state_dict):
        if not is_main_replica(value.replica_id):
            held.append(value.unique_key if isinstance(value, ShardedObject) else value.key)
            continue
        if isinstance(value, ShardedObject):
            state[value.unique_key] = [value.data]
        elif isinstance(value, ShardedTensor):
            if value.data is not None:
                require_plain(value.data, value.key)
                # DCP writes the memory of a tensor, whatever view of it the tensor is.
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
    """A flattened range as a shard of the array that Megatron-Core keeps such ranges in."""
    counts = tensor.axis_fragmentations
    if counts is None or any(n % c for n, c in zip(tensor.global_shape, counts, strict=True)):
        raise AccessPatternError(
            f"key {tensor.key!r} holds a flattened range of an irregular shard "
            f"(axis_fragmentations={counts} of {tensor.global_shape}), which the {BACKEND!r} "
            "format has no form for; save with ('zarr', 2)",
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


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Load strategy for DCP's own files, by Megatron-Core or by this package."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Yes."""
        return True

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read tensors, into those given where there are any, and objects.

        Any rank may call it; it waits for no other.

        Raises:
            MissingKeyError, ShapeMismatchError, DTypeMismatchError: what is stored is not what is
                asked for.
            DamagedCheckpointError: what is stored is not what was written, as far as can be seen:
                the format has no checksums.
            UnsafeObjectError: an object needs a class that was not allowed.
        """
        files = DcpFiles.open(checkpoint_dir)
        planned = {}
        for value in nested_values(sharded_state_dict):
            if isinstance(value, ShardedTensor):
                meta = find_array(files.arrays, value, files.location.url)
                planned[id(value)] = plan_read(value, meta)
        regions = [region for read in planned.values() for region in read.regions]
        read_converting(lambda reads, _: files.read(reads), regions)

        def loaded(value: Any) -> Any:
            if isinstance(value, ShardedObject):
                return _unwrapped(files.read_object(value.unique_key))
            return planned[id(value)].finish()

        return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key -> sharded tensor without data, whole, for each stored tensor."""
        return _whole_tensors(DcpFiles.open(checkpoint_dir))

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The same, sharded objects under their unique keys included."""
        files = DcpFiles.open(checkpoint_dir)
        found = _whole_tensors(files)
        for key in files.objects:
            sharded = ShardedObject.empty_from_unique_key(key)
            found[sharded.unique_key] = sharded
        return found

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise unless the checkpoint was written by this backend."""
        if loaded_backend != BACKEND:
            raise NotACheckpointError(
                f"the checkpoint was written by backend {loaded_backend!r}, this strategy reads "
                f"{BACKEND!r}; leave sharded_strategy out to have the right one chosen"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the checkpoint was written by a version that this one reads."""
        if loaded_version != VERSION:
            raise FormatVersionError(
                f"the checkpoint has version {loaded_version!r} of the {BACKEND!r} backend, this "
                f"version of shardstore reads {VERSION}: upgrade shardstore to load it"
            )


def _whole_tensors(files: DcpFiles) -> ShardedStateDict:
    found: ShardedStateDict = {}
    for key, meta in files.arrays.items():
        zeros, ones = (0,) * len(meta.shape), (1,) * len(meta.shape)
        dtype = dtypes.torch_dtype(meta.dtype)
        found[key] = ShardedTensor(key, None, dtype, meta.shape, meta.shape, zeros, ones)
    return found


def _unwrapped(value: Any) -> Any:
    """Megatron-Core keeps an object in a list of one."""
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
