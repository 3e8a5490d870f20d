"""Strategies using Zarr as the underlying format: who creates, who writes what, who reads what.

Backend ``("zarr", 2)`` is Zarr v3 and the default; ``("zarr", 1)`` is the Zarr v2 layout of
Megatron-Core up to 0.15. This module is policy: plans are made in :mod:`.write_plan` and
:mod:`.read_plan` and carried out in :mod:`.carry_out`, and :mod:`shardstore.storage`
moves the bytes.
"""

from __future__ import annotations

import pickle
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import torch

from shardstore.dict_utils import dict_list_map_outplace, nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    CheckpointingException,
    FormatVersionError,
    NotACheckpointError,
)
from shardstore.loading.assemble import (
    flatten_range,
    pad_to_expected_shape,
    postprocess_numpy_array,
)
from shardstore.loading.context import context_of
from shardstore.loading.plan import TensorRead, find_array, plan_read
from shardstore.loading.replicas import read_regions
from shardstore.mapping import ShardedStateDict, ShardedTensor, StateDict, is_main_replica
from shardstore.saving.execute import _carry_out, stage
from shardstore.saving.plan import plan_writes
from shardstore.saving.session import SaveSession, session_of
from shardstore.saving.sources import WritePlan
from shardstore.sharded.layouts import Layouts, is_alone, local_layouts, merge_layouts
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import DEFAULT_TARGET_CHUNK_BYTES
from shardstore.storage.format.names import check_collisions
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.options import DEFAULT_BUDGET_BYTES, SaveOptions
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from shardstore.strategies.zarr_arrays import (  # noqa: F401  (names of the reference page)
    ZarrArray,
    _create_or_open_zarr_arrays,
    _create_zarr_array,
    _load_from_array,
    _open_zarr_array_verbose,
    _save_to_existing_array,
    _should_create_array,
    _whole_tensor,
    load_zarr_based_sharded_metadata,
)

logger = getLogger(__name__)

numpy_to_torch_dtype_dict: dict[Any, torch.dtype] = {
    dtypes.numpy_dtype(name): dtypes.torch_dtype(name) for name in dtypes.names()
}
torch_to_numpy_dtype_dict: dict[torch.dtype, Any] = {
    v: k for k, v in numpy_to_torch_dtype_dict.items()
}

BACKEND = "zarr"
V2_LAYOUT, V3_LAYOUT = 1, 2
"""Backend versions: Megatron-Core's Zarr v2 layout, and ours."""


def register_default_zarr_strategies() -> None:
    """Register default strategies related to the Zarr backend, versions 1 and 2."""
    for version in (V2_LAYOUT, V3_LAYOUT):
        save = ZarrSaveShardedStrategy(BACKEND, version)
        register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, version, save)
        load = ZarrLoadShardedStrategy()
        register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, version, load)


def sharded_tensors_of(state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """All sharded tensors of a nested state dict."""
    return [value for value in nested_values(state_dict) if isinstance(value, ShardedTensor)]


def needs_layouts(state_dict: ShardedStateDict) -> bool:
    """Whether a rank holds tensors that others must hear of: irregular cuts, flattened ranges."""
    return any(
        is_main_replica(tensor.replica_id) and not is_alone(tensor)
        for tensor in sharded_tensors_of(state_dict)
    )


def plans_together(strategy: object) -> bool:
    """Whether a strategy, or the one that it wraps, has ranks meet where :func:`needs_layouts`."""
    while (base := getattr(strategy, "base_strategy", None)) is not None:
        strategy = base
    return isinstance(strategy, ZarrSaveShardedStrategy)


class ZarrSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Save strategy for the Zarr backend, at once or in the background.

    Args:
        backend: ``"zarr"``.
        version: 2 for Zarr v3, 1 for the Zarr v2 layout of Megatron-Core.
        target_chunk_bytes: large shards are cut into chunks of about this many bytes (version 2).
        threads: threads that write, on each rank.
        mover: see :attr:`SaveOptions.mover`.
        budget_bytes: see :attr:`SaveOptions.budget_bytes`.
        array_documents: see :attr:`SaveOptions.array_documents`; what :func:`shardstore.save` is
            given counts too, and ``False`` of either is enough (version 2).

    Raises:
        FormatVersionError: there is no such version, or arrays of version 1 were to have no
            documents.
    """

    def __init__(
        self,
        backend: str,
        version: int,
        *,
        target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES,
        threads: int | None = None,
        mover: str = "auto",
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        array_documents: bool = True,
    ) -> None:
        super().__init__(backend, version)
        if version not in (V2_LAYOUT, V3_LAYOUT):
            raise FormatVersionError(
                f"backend {backend!r} has no version {version!r}; 2 is Zarr v3 (default), 1 the "
                "Zarr v2 layout of "
                "Megatron-Core"
            )
        self.options = SaveOptions(
            target_chunk_bytes=target_chunk_bytes,
            threads=threads,
            mover=mover,
            budget_bytes=budget_bytes,
            array_documents=array_documents,
        )
        if version == V2_LAYOUT:
            _require_documents(self.options)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part of the sharded tensors.

        Called by every rank. Within :func:`shardstore.save` it writes into the attempt and
        returns; called by
        itself it also waits for all ranks and commits the arrays (a root group and nothing else).

        Args:
            sharded_state_dict: nested state dict with sharded tensors.
            checkpoint_dir: where to.

        Raises:
            AccessPatternError, DTypeMismatchError, KeyNameError, StorageError: as the package's
                errors say.
        """
        session = session_of(checkpoint_dir)
        if session is not None:
            self._write(session, sharded_state_dict)
            return
        ranks = Ranks.current()
        wanted = needs_layouts(sharded_state_dict)
        session = SaveSession.begin(ranks, checkpoint_dir, self.options, exchange_layouts=wanted)
        error: BaseException | None = None
        with session.active():
            try:
                self._write(session, sharded_state_dict)
            except Exception as problem:
                error = problem
        session.finish(error)

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Copy this rank's part of the sharded tensors, and describe the writing that is left.

        Called by every rank. The state may be changed when it returns, unless the save overlaps its
        copying (:func:`shardstore.async_save`). Pieces of chunks that ranks share are exchanged
        here; the background speaks to nobody. Called by itself it commits the arrays, like
        :meth:`save`, when the request is finalised.

        Args:
            sharded_state_dict: nested state dict with sharded tensors.
            checkpoint_dir: where to.

        Returns:
            The writing, for a thread, and the commit, for every rank together.
        """
        session = session_of(checkpoint_dir)
        if session is not None:
            return self._staged(session, sharded_state_dict)
        wanted = needs_layouts(sharded_state_dict)
        session = SaveSession.begin(
            Ranks.current(), checkpoint_dir, self.options, exchange_layouts=wanted
        )
        try:
            request = session.guarded(self._staged(session, sharded_state_dict))
        except Exception as problem:
            # Raised here it would be this rank's alone; it is met by all at the finalisation.
            session.fail_planning(problem)
            request = AsyncRequest(None, (), [])
        opened = session
        request.add_finalize_fn(lambda: opened.finish(None))
        return request

    def _staged(self, session: SaveSession, state_dict: ShardedStateDict) -> AsyncRequest:
        plan, created = self._plan(session, state_dict)
        return stage(session, self.options, plan, created)

    def _write(self, session: SaveSession, state_dict: ShardedStateDict) -> None:
        _carry_out(session, self.options, *self._plan(session, state_dict))

    def _plan(
        self, session: SaveSession, state_dict: ShardedStateDict
    ) -> tuple[WritePlan, list[tuple[ArrayMeta, str]]]:
        tensors = sharded_tensors_of(state_dict)
        ranks = session.ranks
        session.zarr_format = 2 if self.version == V2_LAYOUT else 3
        layouts = Layouts()
        what = session.planning
        if session.exchange_layouts:
            report = local_layouts(tensors, ranks.rank)
            with session.timed("exchange"):
                answer = session.meet(
                    report,
                    what=what,
                    error=session.failure,
                    decide=lambda reports: pickle.dumps(merge_layouts(reports)),
                )
            layouts = pickle.loads(answer)
        elif session.failure is not None:
            raise session.failure
        error: Exception | None = None
        plan = WritePlan()
        try:
            if session.zarr_format == 2 and session.options.compression is not None:
                raise FormatVersionError(
                    "the Zarr v2 layout of Megatron-Core is never compressed: leave compression "
                    "out, or save with backend ('zarr', 2)"
                )
            if session.zarr_format == 2:
                _require_documents(session.options)
            session.manifest.array_documents = (
                session.options.array_documents and self.options.array_documents
            )
            with session.timed("plan"), collector_paused():
                check_collisions(tensor.key for tensor in tensors)
                plan = plan_writes(
                    tensors,
                    ranks.rank,
                    zarr_format=session.zarr_format,
                    target_chunk_bytes=self.options.target_chunk_bytes,
                    layouts=layouts,
                    compression=session.options.compression,
                    shared=session.shared,
                )
                if session.zarr_format == 2:
                    nodes = {write.array.node for write in plan.writes}
                    nodes |= {cut.array.node for cut in plan.cut if cut.owner == ranks.rank}
                    session.attempt.announce(nodes, ranks.rank)
                created = [
                    (meta, text)
                    for meta, first in plan.arrays
                    for text in [session.manifest.add_array(meta, created=first)]
                    if first
                ]
        except Exception as problem:
            error, created = problem, []
        if session.exchange_layouts:
            # Before pieces travel, so that nobody waits for a rank that could not plan.
            session.meet(what=what, error=error)
            session.plans = False
        if error is not None:
            raise error
        if session.meter is not None:
            session.expect(write.array for write in plan.writes)
            session.expect(cut.array for cut in plan.cut if cut.owner == ranks.rank)
        return plan, created


def _require_documents(options: SaveOptions) -> None:
    if not options.array_documents:
        raise FormatVersionError(
            "the Zarr v2 layout of Megatron-Core has no root document that could describe its "
            "arrays: leave array_documents out, or save with backend ('zarr', 2)"
        )


class ZarrLoadShardedStrategy(LoadShardedStrategy):
    """Load strategy for the Zarr backend, both versions."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Read the sharded tensors, into the tensors given where there are any.

        Any rank may call it; it waits for no other, unless its group shares the reading.

        Args:
            sharded_state_dict: nested state dict whose leaves are sharded tensors.
            checkpoint_dir: a committed checkpoint.

        Returns:
            The same structure, with tensors.

        Raises:
            MissingKeyError, ShapeMismatchError, DTypeMismatchError: what is stored is not what is
                asked for.
            ChunkMissingError, ChunkCorruptError: what is stored is not what was written.
        """
        context = context_of(checkpoint_dir)
        stored = context.stored
        planned: dict[int, TensorRead] = {}
        error: Exception | None = None
        try:
            stored.require()
            with collector_paused():
                for tensor in sharded_tensors_of(sharded_state_dict):
                    meta = find_array(stored.arrays, tensor, stored.location.url, cast=context.cast)
                    planned[id(tensor)] = plan_read(tensor, meta)
        except Exception as problem:
            error = problem  # met by all that read together
        regions = [region for read in planned.values() for region in read.regions]
        read_regions(context, regions, error)

        def loaded(value: Any) -> Any:
            if not isinstance(value, ShardedTensor):
                raise CheckpointingException(
                    f"{type(value).__name__} among the sharded tensors to load from "
                    f"{checkpoint_dir}; "
                    "the common strategy loads other objects"
                )
            return planned[id(value)].finish()

        return cast(StateDict, dict_list_map_outplace(loaded, sharded_state_dict))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key -> sharded tensor without data, whole, for each stored array."""
        stored = context_of(checkpoint_dir).stored
        stored.require()
        return {
            key: _whole_tensor(key, meta.shape, dtypes.torch_dtype(meta.dtype))
            for key, meta in stored.arrays.items()
        }

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove all tensors whose key starts with a prefix. Called by one rank."""
        stored = StoredCheckpoint(Location.of(checkpoint_dir))
        stored.require()
        stored.remove(key_prefix)

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless the checkpoint was written by the Zarr backend."""
        if loaded_version != BACKEND:
            raise NotACheckpointError(
                f"the checkpoint was written by backend {loaded_version!r}, this strategy reads "
                f"{BACKEND!r}; "
                "leave sharded_strategy out to have the right one chosen"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless the checkpoint was written by a version that this one reads (1 or 2)."""
        if loaded_version not in (V2_LAYOUT, V3_LAYOUT):
            raise FormatVersionError(
                f"the checkpoint has version {loaded_version!r} of the {BACKEND!r} backend, this "
                "version of shardstore "
                f"reads {V2_LAYOUT} and {V3_LAYOUT}: upgrade shardstore to load it"
            )


__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "flatten_range",
    "load_zarr_based_sharded_metadata",
    "numpy_to_torch_dtype_dict",
    "pad_to_expected_shape",
    "postprocess_numpy_array",
    "register_default_zarr_strategies",
    "torch_to_numpy_dtype_dict",
]
