"""Saving and loading: the entry points of trainers.

The functions here define the arguments and their defaults. Every function is called by every rank
of the default process group with its own part of the state (no process group: a world of one),
unless its docstring says otherwise. The steps of a save are in :mod:`shardstore.saving.run`, those
of a load in :mod:`shardstore.loading.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, cast

import torch

from shardstore.core import CheckpointingException
from shardstore.errors import ArgumentError
from shardstore.loading.context import (
    CONTENT_METADATA_KEY,
    DEFAULT_BUDGET_BYTES,
    find_strategies,
    opened,
)
from shardstore.loading.plan import part_of
from shardstore.loading.run import LoadCall, run_load
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.progress import ProgressCallback
from shardstore.saving.run import SaveCall, run_save
from shardstore.saving.session import SaveSession
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.options import SaveKeywords, options_of
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from shardstore.validation import (
    CkptShardedMetadata,
    StrictHandling,
    save_integrity_manifest,
    validate_sharded_objects_handling,
)

__all__ = [
    "CkptShardedMetadata",
    "begin_save",
    "get_default_load_sharded_strategy",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

P = ParamSpec("P")
T = TypeVar("T")


def _common_strategy_may_lack(function: Callable[P, T]) -> Callable[P, T]:
    """Take positional arguments as Megatron-Core 0.19 has them too: without ``common_strategy``,
    so that a bool, of ``validate_access_integrity``, is in its place."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> T:
        if len(args) > 3 and isinstance(args[3], bool):
            args = (*args[:3], None, *args[3:])
        return function(*cast(Any, args), **kwargs)

    return cast(Callable[P, T], called)


@_common_strategy_may_lack
def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = False,
    **options: Unpack[SaveKeywords],
) -> AsyncRequest | None:
    """Save a sharded state dict as one checkpoint, whole or not at all.

    Called by every rank, which waits for all others twice: before bytes move (so that wrong input
    on one rank fails on all, with nothing written) and at the commit.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, sharded objects,
            factories, non-persistent objects, and common values (of which rank 0's are kept).
            Factories in it are replaced by what they build. DTensors are taken as they are: see
            :mod:`shardstore.dtensor`.
        checkpoint_dir: where to: a folder, or a URL such as ``s3://bucket/run/step-100``. Folders
            are created; an empty folder is filled.
        sharded_strategy: how tensors are stored: a strategy, ``(backend, version)``, or the
            default ``("zarr", 2)``.
        common_strategy: how the rest is stored; default ``("torch", 1)``. Positional arguments may
            leave it out, as Megatron-Core 0.19 does: a bool in its place is
            ``validate_access_integrity``.
        validate_access_integrity: refuse the commit unless each tensor and object is covered
            exactly once, and log where a rank's common values differ from rank 0's.
        async_sharded_save: return an :class:`AsyncRequest` that does the writing; needs a strategy
            that can.
        preprocess_common_before_consistancy_check: applied to a copy of the common values before
            they are compared.
        content_metadata: kept in the checkpoint; its JSON-serialisable part also becomes plain
            attributes of the root group.
        async_strategy: ``"mcore"`` or ``"nvrx"``, as Megatron-Core has it. The request is the
            same: it runs in its queues, in those of nvidia-resiliency-ext and in this package's.
        verify_integrity: add ``integrity.json``, the SHA-256 of each file, which ``load`` can
            verify. Reads every file once more, after the commit, on rank 0.
        **options: how the checkpoint is written, see
            :class:`~shardstore.storage.options.SaveOptions`: ``overwrite``, ``durable``,
            ``storage_options``, ``allow_unconditional``, ``staging_budget_bytes``, ``base``,
            ``verify_base``, ``compression``, ``array_documents``, ``replica_group``, ``progress``.

    Returns:
        ``None``, or the request if ``async_sharded_save``: the state may be changed by then; an
        :class:`AsyncCallsQueue` writes in a thread and commits where every rank polls it.
        :func:`shardstore.async_save` is the simple form.

    Raises:
        CheckpointExistsError: there is a checkpoint, and ``overwrite`` was not given.
        AccessPatternError: shards overlap, leave a gap, or do not fit together.
        DTypeMismatchError, ShapeMismatchError, KeyNameError: a tensor cannot be stored as it is
            described.
        ArgumentError: an argument makes no sense.
        StorageError: the store refused (full, read-only, gone).
        RanksError: another rank failed, or did not answer in time.
    """
    chosen, error = options_of("save", options, validate=validate_access_integrity)
    if async_strategy not in (None, "mcore", "nvrx"):
        error = error or ArgumentError(
            f"async_strategy={async_strategy!r:.100} must be 'mcore', 'nvrx' or None"
        )
    call = SaveCall(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        options=chosen,
        sharded_strategy=sharded_strategy,
        common_strategy=common_strategy,
        async_sharded_save=async_sharded_save,
        preprocess_common_before_consistancy_check=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        error=error,
    )
    session, request = begin_save(call)
    if verify_integrity:

        def decide(_: list[bytes]) -> bytes:
            save_integrity_manifest(session.target)
            return b""

        def note_files() -> None:
            what = f"writing integrity.json of {session.target.url}"
            session.ranks.together(what=what, decide=decide)

        if request is None:
            note_files()
        else:
            request.add_finalize_fn(note_files)
    return request


def begin_save(call: SaveCall) -> tuple[SaveSession, AsyncRequest | None]:
    """:func:`save` with the session beside the request, which has the commit record."""
    with collector_paused():
        return run_save(call, _save_strategies)


def _save_strategies(
    sharded: SaveShardedStrategy | tuple[str, int] | None,
    common: SaveCommonStrategy | tuple[str, int] | None,
) -> tuple[SaveShardedStrategy, SaveCommonStrategy]:
    # Looked up as globals at call time: programs replace these functions to change the defaults.
    sharded = get_default_save_sharded_strategy() if sharded is None else sharded
    common = get_default_save_common_strategy() if common is None else common
    if not isinstance(sharded, SaveShardedStrategy):
        sharded = cast(
            SaveShardedStrategy, _registered(sharded, StrategyAction.SAVE_SHARDED, "sharded")
        )
    if not isinstance(common, SaveCommonStrategy):
        common = cast(SaveCommonStrategy, _registered(common, StrategyAction.SAVE_COMMON, "common"))
    return sharded, common


def _registered(given: object, action: StrategyAction, name: str) -> object:
    if isinstance(given, tuple | list) and len(given) == 2:
        return get_default_strategy(action, *given)
    raise CheckpointingException(
        f"{name}_strategy={given!r} is neither a strategy for saving nor a (backend, version) pair "
        "such as ('zarr', 2)"
    )


@_common_strategy_may_lack
def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: Any = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    replica_group: Any = None,
    share_replicas: str = "auto",
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    cast: bool | Literal["warn"] = False,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint under any layout.

    Called by every rank with the layout that it wants; one rank reads the documents for all.
    Tensors are read straight into the memory of those that the state dict holds, where it can be
    written directly; where a sharded tensor has no data, a new tensor takes its place.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, objects, factories and
            non-persistent objects.
        checkpoint_dir: a committed checkpoint, a folder or a URL.
        sharded_strategy: default: what the checkpoint's own backend needs.
        common_strategy: the same for the common part; see :func:`save` for positional arguments.
        validate_access_integrity: check that all ranks together ask for each tensor exactly once.
        strict: what to do about keys that only one side has, see :class:`StrictHandling`.
        verify_integrity: verify each file against ``integrity.json`` first, on the coordinator.
        process_group: the ranks that load together; default: all. They alone call this function,
            and each tensor is asked for once among them.
        storage_options: see :func:`save`.
        map_location: device of the tensors that are made where a sharded tensor has no data;
            default: the CPU. Tensors that are given stay where they are.
        replica_group: a process group (this rank's data-parallel group) that may share the reading:
            each chunk is read once in the group and sent on. All its ranks give it, with the same
            ``share_replicas``, and load the same checkpoint.
        share_replicas: ``"always"``, ``"never"`` or ``"auto"``: where the bytes come over a
            network (an object store, or a group on more than one host, as ``LOCAL_WORLD_SIZE``
            tells).
        exchange_budget_bytes: host memory for chunks on their way to other ranks or to a device, or
            being cast. Ranks that share go by the smallest of theirs.
        cast: fill tensors of another data type than the stored one, values as ``Tensor.copy_``
            converts them, which is an error otherwise. What loses more than precision or range (a
            float to an integer, a complex to a real number, a number to a bool: what
            ``torch.can_cast`` denies) stays one. Sharded objects and common values are as stored.
            ``"warn"`` casts whatever ``copy_`` does, as Megatron-Core, with one warning on each
            rank that counts its tensors.
        progress: called as this rank's tensors fill, see :func:`save`.

    Returns:
        The common state with the loaded state merged in; with a ``RETURN_*`` mode a tuple of it,
        the missing and the unexpected keys.

    Raises:
        NotACheckpointError, FormatVersionError: nothing there that can be loaded.
        MissingKeyError, ShapeMismatchError, DTypeMismatchError: what is stored is not what is
            asked for (the last: without ``cast``, or where it does not help).
        ChunkMissingError, ChunkCorruptError, DamagedCheckpointError: what is stored is not what
            was written.
        UnsafeObjectError: a class is needed that was not allowed.
        ArgumentError: a tensor that is given cannot be filled in place: it is sparse, or expanded.
            Or a part of a group's ranks would share their reading, and the others would not.
        RanksError: another rank failed, or did not answer in time.
    """
    call = LoadCall(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        sharded_strategy=sharded_strategy,
        common_strategy=common_strategy,
        validate_access_integrity=validate_access_integrity,
        strict=strict,
        verify_integrity=verify_integrity,
        process_group=process_group,
        storage_options=storage_options,
        map_location=map_location,
        replica_group=replica_group,
        share_replicas=share_replicas,
        exchange_budget_bytes=exchange_budget_bytes,
        cast=cast,
        progress=progress,
    )
    # Looked up here at call time, as programs replace it.
    return run_load(call, load_sharded_metadata)


def load_plain_tensors(
    checkpoint_dir: str | Path,
    *,
    keys: Iterable[str] | None = None,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None = None,
    map_location: str | torch.device | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StateDict:
    """Load tensors by key under no sharding at all: all of them whole, or parts.

    Called by every rank; each gets everything that it asks for. What one rank asks for in vain is
    an error on all.

    Args:
        checkpoint_dir: a committed checkpoint.
        keys: tensors to load; default: all, with the common state. With keys, or a region, the
            result is the tensors alone.
        region: slices of leading axes, of every tensor or by key; only chunks that they touch are
            read. Steps other than 1 are refused.
        map_location: device of the tensors; default: the CPU.
        storage_options: see :func:`save`.

    Raises:
        MissingKeyError: a key is not in the checkpoint.
        ArgumentError: a region has a step, or more axes than the tensor.
        RanksError: another rank failed, or did not answer in time.
    """
    wanted: ShardedStateDict = {}
    chosen: list[str] | None = None
    error: BaseException | None = None
    try:
        wanted, chosen = _parts(checkpoint_dir, keys, region, storage_options)
    except Exception as problem:
        error = problem
    call = LoadCall(
        sharded_state_dict=wanted,
        checkpoint_dir=checkpoint_dir,
        # Ranks may ask for the same: the access pattern is not a partition and is not checked.
        validate_access_integrity=False,
        storage_options=storage_options,
        map_location=map_location,
        error=error,
    )
    loaded = cast(StateDict, run_load(call, load_sharded_metadata))
    return loaded if chosen is None else {key: loaded[key] for key in chosen}


def _parts(
    checkpoint_dir: str | Path,
    keys: Iterable[str] | None,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None,
    storage_options: Mapping[str, Any] | None,
) -> tuple[ShardedStateDict, list[str] | None]:
    """What :func:`load_plain_tensors` asks for, and which keys; ``None`` where it is everything."""
    place = Location.given(checkpoint_dir, storage_options).place
    if isinstance(keys, str) or not isinstance(keys, Iterable | None):
        raise ArgumentError(f"keys={keys!r} must be a list of keys, such as ['weight']")
    tensors = load_tensors_metadata(place)
    if keys is None and region is None:
        return tensors, None
    chosen = list(tensors if keys is None else keys)
    if isinstance(region, Mapping) and keys is None:
        chosen = list(region)
    return {key: part_of(tensors, key, region, str(place)) for key in chosen}, chosen


def get_default_save_sharded_strategy(
    backend: str = "zarr", version: int | None = None
) -> SaveShardedStrategy:
    """The default strategy for saving sharded tensors, of the backend's newest version."""
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return cast(SaveShardedStrategy, found)


def get_default_save_common_strategy(
    backend: str = "torch", version: int | None = None
) -> SaveCommonStrategy:
    """The default strategy for saving the common part."""
    found = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return cast(SaveCommonStrategy, found)


# -- queries, which any rank may make alone --------------------------------------------------------


def load_common_state_dict(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> StateDict:
    """Load the common part alone. Any rank may call it; it waits for no other."""
    with opened(checkpoint_dir, storage_options) as context:
        _, common_strategy = find_strategies(context)
        return common_strategy.load_common(context.stored.location.place)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return what :func:`shardstore.save` was given as ``content_metadata``; ``None`` if nothing.

    Args:
        checkpoint_dir: a checkpoint, unless ``preloaded_state_dict`` is given.
        preloaded_state_dict: a loaded state dict or common state dict to take it from.
        storage_options: see :func:`shardstore.save`.

    Raises:
        CheckpointingException: neither was given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise CheckpointingException(
                "load_content_metadata needs checkpoint_dir or preloaded_state_dict"
            )
        preloaded_state_dict = load_common_state_dict(
            checkpoint_dir, storage_options=storage_options
        )
    return preloaded_state_dict.get(CONTENT_METADATA_KEY)


def load_tensors_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """Return key -> sharded tensor without data, whole and unsharded.

    It can be handed to :func:`shardstore.load`. Any rank may call it; it waits for no other.
    """
    with opened(checkpoint_dir, storage_options) as context:
        strategy, _ = find_strategies(context, sharded_strategy)
        return strategy.load_tensors_metadata(context.stored.location.place)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """As :func:`load_tensors_metadata`, sharded objects under their unique keys included."""
    with opened(checkpoint_dir, storage_options) as context:
        place = context.stored.location.place
        sharded, common = find_strategies(context, sharded_strategy, common_strategy)
        metadata = dict(sharded.load_sharded_metadata(place))
        if not sharded.can_handle_sharded_objects:
            validate_sharded_objects_handling(sharded, common)
            metadata.update(common.load_sharded_metadata(place))
        return metadata


def remove_sharded_tensors(
    checkpoint_dir: str | Path,
    key_prefix: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove all tensors whose key starts with a prefix. Called by one rank.

    The root document loses them first, so that no reader meets a hole.
    """
    with opened(checkpoint_dir, storage_options) as context:
        strategy, _ = find_strategies(context)
        strategy.remove_sharded_tensors(context.stored.location.place, key_prefix)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that a checkpoint's own backend needs for loading."""
    with opened(checkpoint_dir) as context:
        return find_strategies(context)[0]
