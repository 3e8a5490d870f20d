"""Saving and loading: the entry points for trainers.

Every rank of the default process group calls these functions with its own part of the state, unless
a docstring says otherwise. A process without a process group is one rank. The steps of a save are
in :mod:`shardstore.saving.run`, those of a load in :mod:`shardstore.loading.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, cast

import torch

from shardstore.dict_utils import shaped_like
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError
from shardstore.loading.plan import part_of
from shardstore.loading.read import opened
from shardstore.loading.run import LoadRequest, run_load, was_replaced
from shardstore.mapping import CommonStateDict, ShardedStateDict, StateDict
from shardstore.progress import ProgressCallback
from shardstore.saving.run import SaveRequest, run_save
from shardstore.saving.session import Strategies
from shardstore.storage.commit.inventory import check_integrity, write_integrity
from shardstore.storage.format.names import CONTENT_METADATA_KEY, INTEGRITY_NAME
from shardstore.storage.options import (
    DEFAULT_BUDGET_BYTES,
    DEFAULTS,
    SaveKeywords,
    SaveOptions,
    options_of,
)
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    called,
    get_default_strategy,
)
from shardstore.validation import CkptShardedMetadata as CkptShardedMetadata
from shardstore.validation import (
    StrictHandling,
    strategy_of,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])


def _common_strategy_may_lack(function: F) -> F:
    """Make a function also accept the positional arguments of Megatron-Core 0.19, which has no
    ``common_strategy``: a bool in its place is ``validate_access_integrity``."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 3 and isinstance(args[3], bool):
            args = (*args[:3], None, *args[3:])
        return function(*args, **kwargs)

    return cast(F, called)


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
    *,
    process_group: Any = None,
    options: SaveOptions | None = None,
    **keywords: Unpack[SaveKeywords],
) -> AsyncRequest | None:
    """Save a sharded state dict as one checkpoint, completely or not at all.

    Every rank calls it and waits for all others twice: before any byte is written, so that wrong
    input on one rank is an error on all of them and nothing is written, and at the commit.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, sharded objects,
            factories, non-persistent objects, and common values. Factories are replaced by what
            they build. DTensors and plain tensors need no description.
            :mod:`shardstore.saving.plain` says which rank's value is saved.
        checkpoint_dir: the target: a folder, or a URL such as ``s3://bucket/run/step-100``. Missing
            folders are created. Other files in an existing folder stay.
        sharded_strategy: how tensors are stored: a strategy, ``(backend, version)``, or the
            default ``("zarr", 2)``.
        common_strategy: how the other values are stored; default ``("torch", 1)``. Positional
            arguments may leave it out, as in Megatron-Core 0.19: a bool in its place is
            ``validate_access_integrity``.
        validate_access_integrity: check that each element of each tensor, and each object, is saved
            exactly once, else raise an error; log differences of a rank's common values from rank
            0's.
        async_sharded_save: return an :class:`AsyncRequest` that writes the tensors. The strategy
            must support this.
        preprocess_common_before_consistancy_check: called with a copy of the common values; the
            ranks compare its results.
        content_metadata: a dict that is stored in the checkpoint, in place of a dict of that name
            in the state, as an earlier load returned it. Its JSON-serialisable part also
            becomes attributes of the root group.
        async_strategy: ``"mcore"`` or ``"nvrx"``, as in Megatron-Core. Both return the same
            request, for its queues, for those of nvidia-resiliency-ext and for this package's.
        verify_integrity: add ``integrity.json``, the SHA-256 of each file, which ``load`` can
            verify. Rank 0 reads every file again after the commit.
        process_group: the ranks that save together; default: all. Only these ranks call this
            function, and together they hold the state. Its first rank counts as rank 0. Groups
            without a common rank may save to different places at the same time.
        options: how the checkpoint is written; default: ``SaveOptions()``.
        **keywords: single options, in place of those in ``options``: ``overwrite``, ``durable``,
            ``storage_options``, ``allow_unconditional``, ``staging_budget_bytes``, ``base``,
            ``verify_base``, ``compression``, ``array_documents``, ``constants``, ``pack``,
            ``replica_group``, ``replicas``, ``progress``.
            :class:`~shardstore.storage.options.SaveOptions` describes them.

    Returns:
        ``None``. With ``async_sharded_save``, the request: the caller may change the state at once,
        and passes the request to an :class:`AsyncCallsQueue`, which writes in a thread and commits
        when every rank polls it. :func:`shardstore.async_save` is simpler.

    Raises:
        CheckpointExistsError: the target holds a checkpoint, and ``overwrite`` was not given.
        AccessPatternError: shards overlap, leave a gap, or do not fit together; values of two ranks
            do not fit into one state dict, or differ with ``replicas="equal"``.
        DTypeMismatchError, ShapeMismatchError, KeyNameError: a tensor cannot be stored as it is
            described.
        ArgumentError: an argument has a wrong type or value; or this rank is not a member of
            ``process_group``.
        StorageError: the store failed (full, read-only, unreachable).
        RanksError: another rank failed, or did not answer in time.
    """
    ranks, error = Ranks.of(process_group), None
    if async_sharded_save is not False or async_strategy is not None:
        error = _async_error(async_strategy, async_sharded_save, ranks)
    request = save_request(
        "save",
        sharded_strategy,
        common_strategy,
        options,
        keywords,
        {"validate_access_integrity": validate_access_integrity},
        state=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        ranks=ranks,
        background="" if async_sharded_save else None,
        preprocess=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        verify_integrity=verify_integrity,
        error=error,
    )
    return run_save(request).request


def _async_error(strategy: object, is_async: object, ranks: Ranks) -> ArgumentError | None:
    """Return the error in the arguments of an asynchronous save, if there is one."""
    if strategy not in (None, "mcore", "nvrx"):
        return ArgumentError(f"async_strategy={strategy!r:.100} must be 'mcore', 'nvrx' or None")
    if not isinstance(is_async, bool):
        return ArgumentError(f"async_sharded_save={is_async!r:.100} must be True or False")
    if is_async and ranks.members != Ranks.current().members:
        return ArgumentError(
            "async_sharded_save=True waits for all ranks; use async_save(process_group=)"
        )
    return None


def save_request(
    caller: str,
    sharded: SaveShardedStrategy | tuple[str, int] | None,
    common: SaveCommonStrategy | tuple[str, int] | None,
    given: SaveOptions | None,
    keywords: Mapping[str, Any],
    further: Mapping[str, Any],
    *,
    error: BaseException | None,
    **arguments: Any,
) -> SaveRequest:
    """Return the request of a save. An error in the arguments becomes its ``error``, which every
    rank raises.

    Args:
        caller: name of the called function, for error texts.
        sharded: how tensors are stored, see :func:`save`.
        common: how the other values are stored, see :func:`save`.
        given: the options; ``None``: the defaults.
        keywords: the caller's keywords, in place of those in ``given``.
        further: options that are not keywords, in place of those in ``given`` unless they are the
            default.
        error: an error that was found before.
        **arguments: other fields of the request.
    """
    options, strategies = DEFAULTS, None
    more = {name: x for name, x in further.items() if x is not getattr(DEFAULTS, name)}
    try:
        if given is not None or keywords or more:
            options = options_of(caller, keywords, options=given, **more)
        # Looked up at call time, because programs replace these functions to change the defaults.
        if sharded is None:
            sharded = get_default_save_sharded_strategy()
        if common is None:
            common = get_default_save_common_strategy()
        if not isinstance(sharded, SaveShardedStrategy):
            sharded = strategy_of(SaveShardedStrategy, sharded, StrategyAction.SAVE_SHARDED)
        if not isinstance(common, SaveCommonStrategy):
            common = strategy_of(SaveCommonStrategy, common, StrategyAction.SAVE_COMMON)
        strategies = Strategies(
            cast(SaveShardedStrategy, sharded), cast(SaveCommonStrategy, common)
        )
    except Exception as problem:
        error = error or problem
    return SaveRequest(options=options, strategies=strategies, error=error, **arguments)


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

    Every rank calls it with the layout that it wants, and waits for the others. One rank reads the
    documents for all. Given tensors are filled in place; chunks are read directly into their memory
    if it can be written directly. For a sharded tensor without data, the load makes a new tensor.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, objects, factories and
            non-persistent objects. DTensors and plain tensors need no description.
        checkpoint_dir: folder or URL of a committed checkpoint.
        sharded_strategy: how tensors are read; default: the strategy of the checkpoint's backend.
        common_strategy: how the other values are read; default: the strategy of the checkpoint's
            backend for them. See :func:`save` for positional arguments.
        validate_access_integrity: check that all ranks together ask for each element of each
            tensor exactly once.
        strict: what to do about keys that only the checkpoint or only the state dict has, see
            :class:`StrictHandling`.
        verify_integrity: first compare each file with ``integrity.json``, on the coordinator.
        process_group: the ranks that load together; default: all. Only these ranks call this
            function, and together they ask for each element of a tensor once.
        storage_options: see :func:`save`.
        map_location: device of new tensors; default: the CPU. Given tensors keep their device.
        replica_group: a process group (this rank's data-parallel group) whose ranks share the
            reading: one rank reads each chunk and sends it to the others. All its ranks pass it,
            with the same ``share_replicas``, and load the same checkpoint.
        share_replicas: ``"always"``, ``"never"`` or ``"auto"``: share if the checkpoint is in an
            object store or the group spans hosts (as ``LOCAL_WORLD_SIZE`` says).
        exchange_budget_bytes: host memory for chunks that are sent to other ranks, copied to a
            device or cast. Ranks that share use the smallest of their budgets.
        cast: allow tensors whose data type differs from the stored one; values are converted as by
            ``Tensor.copy_``. A cast that loses more than precision or range remains an error: a
            float to an integer, an integer to one that lacks some of its values, a complex to a
            real number, a number to a bool. Values in whose places no tensor is given are not
            cast.
            ``"warn"`` allows every cast of ``Tensor.copy_``, as Megatron-Core does; each rank logs
            one warning with the number of tensors.
        progress: called while this rank's tensors are filled, see :func:`save`.

    Returns:
        The common values with the loaded state merged in. With a ``RETURN_*`` mode, a tuple of
        this, the missing keys and the unexpected keys.

    Raises:
        NotACheckpointError, FormatVersionError: the place holds no checkpoint, or one of a format
            that this version cannot read.
        MissingKeyError, ShapeMismatchError, DTypeMismatchError: stored and requested keys, shapes
            or data types differ. Data types may differ with ``cast``, if the cast is allowed.
        ChunkMissingError, ChunkCorruptError, DamagedCheckpointError: stored data is missing or
            damaged.
        UnsafeObjectError: a pickled class is not allowed.
        ArgumentError: a given tensor cannot be filled in place because it is sparse or expanded;
            or only some ranks of a group want to share their reading.
        RanksError: another rank failed, or did not answer in time.
    """
    request = LoadRequest(
        sharded_state_dict=sharded_state_dict,
        checkpoint_dir=checkpoint_dir,
        sharded_strategy=sharded_strategy,
        common_strategy=common_strategy,
        validate_access_integrity=validate_access_integrity,
        strict=strict,
        verify_integrity=verify_integrity,
        ranks=Ranks.of(process_group),
        storage_options=storage_options,
        map_location=map_location,
        replica_group=replica_group,
        share_replicas=share_replicas,
        exchange_budget_bytes=exchange_budget_bytes,
        cast=cast,
        progress=progress,
        stored_metadata=load_sharded_metadata,  # looked up now, because programs replace it
    )
    try:
        return run_load(request)
    except Exception as problem:
        if not was_replaced(request.ranks, problem):
            raise
    return run_load(request)


def load_plain_tensors(
    checkpoint_dir: str | Path,
    *,
    keys: Iterable[str] | None = None,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None = None,
    map_location: str | torch.device | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StateDict:
    """Load unsharded tensors by key, whole or in part.

    Every rank calls it; the ranks may ask for different keys. An error on one rank is raised on
    all.

    Args:
        checkpoint_dir: folder or URL of a committed checkpoint.
        keys: tensors to load; default: all of them and the common values.
        region: slices of the leading axes, for every tensor or by key. Only the chunks that overlap
            them are read. The step must be 1.
        map_location: device of the tensors; default: the CPU.
        storage_options: see :func:`save`.

    Returns:
        Key -> tensor. With neither ``keys`` nor ``region``, the common values too.

    Raises:
        MissingKeyError: a key is not in the checkpoint.
        ArgumentError: a region has a step, more axes than the tensor, or a key that is not in
            ``keys``.
        RanksError: another rank failed, or did not answer in time.
    """

    def parts() -> tuple[ShardedStateDict, list[str] | None]:
        """Return the wanted tensors, and their keys; ``None``: all keys."""
        place = Location.of(checkpoint_dir, storage_options).place
        if isinstance(keys, str) or not isinstance(keys, Iterable | None):
            raise ArgumentError(f"keys={keys!r} must be a list of keys, such as ['weight']")
        tensors = load_tensors_metadata(place)
        if keys is None and region is None:
            return tensors, None
        known = region if isinstance(region, Mapping) else tensors
        chosen = list(known if keys is None else keys)
        if isinstance(region, Mapping) and (left := sorted(region.keys() - chosen)):
            raise ArgumentError(f"region= has slices of {left[:4]}, which keys= does not name")
        return {key: part_of(tensors, key, region, str(place)) for key in chosen}, chosen

    with Ranks.current().meet(f"reading {shown(checkpoint_dir)}"):
        wanted, chosen = parts()
    loaded: Any = load(
        wanted,
        checkpoint_dir,
        validate_access_integrity=False,  # ranks may ask for the same elements
        storage_options=storage_options,
        map_location=map_location,
    )
    return loaded if chosen is None else {key: loaded[key] for key in chosen}


def get_default_save_sharded_strategy(
    backend: str = "zarr", version: int | None = None
) -> SaveShardedStrategy:
    """Return the strategy that saves sharded tensors; default: the newest version of Zarr."""
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return cast(SaveShardedStrategy, found)


def get_default_save_common_strategy(
    backend: str = "torch", version: int | None = None
) -> SaveCommonStrategy:
    """Return the strategy that saves common values with a backend, by default ``torch.save``."""
    found = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return cast(SaveCommonStrategy, found)


# -- queries: one rank can call them alone ---------------------------------------------------------


def load_common_state_dict(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> StateDict:
    """Load only the common values. Any rank may call it; it waits for no other.

    Raises:
        NotACheckpointError, DamagedCheckpointError, UnsafeObjectError: as :func:`load`.
    """
    with opened(checkpoint_dir, storage_options) as context:
        _, strategy = verify_checkpoint_and_load_strategy(context.stored)
        return cast(StateDict, shaped_like({}, called(strategy.load_common, context)))


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the ``content_metadata`` of the save, ``None`` if it had none.

    Any rank may call it; it waits for no other.

    Args:
        checkpoint_dir: a checkpoint; not needed with ``preloaded_state_dict``.
        preloaded_state_dict: a loaded state dict or common state dict to take it from.
        storage_options: see :func:`shardstore.save`.

    Raises:
        ArgumentError: neither ``checkpoint_dir`` nor ``preloaded_state_dict`` is given.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ArgumentError(
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
    """Return a description of each stored tensor: key -> unsharded :class:`ShardedTensor`, no data.

    The result can be passed to :func:`shardstore.load`. Any rank may call it; it waits for no
    other.

    Raises:
        NotACheckpointError, FormatVersionError, DamagedCheckpointError: as :func:`load`.
    """
    with opened(checkpoint_dir, storage_options) as context:
        strategy, _ = verify_checkpoint_and_load_strategy(context.stored, sharded_strategy)
        return called(strategy.load_tensors_metadata, context)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """Do what :func:`load_tensors_metadata` does, and add sharded objects by their unique keys."""
    with opened(checkpoint_dir, storage_options) as context:
        sharded, common = verify_checkpoint_and_load_strategy(
            context.stored, sharded_strategy, common_strategy
        )
        metadata = dict(called(sharded.load_sharded_metadata, context))
        if not sharded.can_handle_sharded_objects:
            validate_sharded_objects_handling(sharded, common)
            metadata.update(called(common.load_sharded_metadata, context))
        return metadata


def remove_sharded_tensors(
    checkpoint_dir: str | Path, key_prefix: str, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Remove all tensors whose key starts with a prefix. One rank calls it.

    It removes the tensors from the root document before it deletes their chunks, so that no reader
    finds a tensor without its chunks. If the checkpoint has an ``integrity.json``, every file is
    compared with it first, and the hashes of the remaining files are written again.

    Raises:
        ArgumentError: the prefix is no string.
        DamagedCheckpointError: a file differs from ``integrity.json``; nothing is removed.
    """
    if not isinstance(key_prefix, str):
        raise ArgumentError(f"key_prefix={key_prefix!r:.100} must be a string")
    with opened(checkpoint_dir, storage_options) as context:
        strategy, _ = verify_checkpoint_and_load_strategy(context.stored)
    location = context.stored.location
    if has_hashes := location.exists(INTEGRITY_NAME):
        check_integrity(location)
    strategy.remove_sharded_tensors(location.place, key_prefix)
    if has_hashes:
        write_integrity(location)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that loads the tensors of a checkpoint."""
    with opened(checkpoint_dir) as context:
        return verify_checkpoint_and_load_strategy(context.stored)[0]
