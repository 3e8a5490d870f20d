"""Saving and loading: the entry points of trainers.

Every function is called by every rank of the default process group with its own part of the state
(no process group: a world
of one), unless its docstring says otherwise. The work is done by strategies; this module puts
their steps in order and makes
sure that what goes wrong on one rank is raised on every rank.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias, cast

import torch

from shardstore.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    config_document,
)
from shardstore.dict_utils import (
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    merge,
    nested_values,
)
from shardstore.dtensor import (
    Adopted,
    adopt_for_load,
    adopt_for_save,
    apply_claims,
    claims,
    decide_claims,
    needs_adoption,
)
from shardstore.errors import NotACheckpointError
from shardstore.exchange_utils import raise_together
from shardstore.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from shardstore.progress import Meter, ProgressCallback, callback_of
from shardstore.ranks import Ranks
from shardstore.shard_reports import check_reports, report_shards, shards_of_report
from shardstore.state_dict_utils import check_lists, load_preprocess, save_preprocess
from shardstore.storage.collector import collector_paused
from shardstore.storage.handed import is_handed
from shardstore.storage.location import Location
from shardstore.storage.options import SaveOptions
from shardstore.storage.parallel import run_together
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from shardstore.strategies.common import COMMON_STATE_FNAME
from shardstore.strategies.opened import handed_out
from shardstore.strategies.partial import part_of, with_destinations
from shardstore.strategies.session import SaveSession
from shardstore.strategies.shared_reads import (
    DEFAULT_BUDGET_BYTES,
    Sharing,
    shared_reads,
    sharing_of,
)
from shardstore.strategies.watched import watched
from shardstore.strategies.zarr import needs_layouts, sharded_tensors_of
from shardstore.utils import extract_sharded_base
from shardstore.validation import (
    StrictHandling,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

__all__ = [
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

logger = logging.getLogger(__name__)

CkptShardedMetadata: TypeAlias = dict[str, Any]

_CONTENT_METADATA_KEY = "content_metadata"
ROOT_DOCUMENT = "zarr.json"


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
    *,
    overwrite: bool = False,
    durable: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    allow_unconditional: bool = False,
    staging_budget_bytes: int | None = None,
    base: str | Path | None = None,
    compression: str | None = None,
    replica_group: Any = None,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> AsyncRequest | None:
    """Save a sharded state dict as one checkpoint, whole or not at all.

    Called by every rank, which waits for all others twice: before bytes move (so that wrong input
        on one rank fails on all,
    with nothing written) and at the commit.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, sharded objects,
            factories, non-persistent objects, and
            common values (of which rank 0's are kept). Factories in it are replaced by what they
            build. DTensors are taken as they are: see :mod:`shardstore.dtensor`.
        checkpoint_dir: where to: a folder, or a URL such as ``s3://bucket/run/step-100``. Folders
            are created; an empty folder is filled.
        sharded_strategy: how tensors are stored: a strategy, ``(backend, version)``, or the
            default ``("zarr", 2)``.
        common_strategy: how the rest is stored; default ``("torch", 1)``.
        validate_access_integrity: refuse the commit unless each tensor and object is covered
            exactly once, and log where a rank's
            common values differ from rank 0's.
        async_sharded_save: return an :class:`AsyncRequest` that does the writing; needs a strategy
            that can.
        preprocess_common_before_consistancy_check: applied to a copy of the common values before
            they are compared.
        content_metadata: kept in the checkpoint, and as plain attributes of the root group where
            it is JSON.
        overwrite: replace a checkpoint that is there. In a folder it stays readable until the new
            one takes its place; in an object store it goes first, so that there is none for a
            while, and never a mixed one.
        durable: wait until everything is on the disk before the commit.
        storage_options: of an object store, by fsspec's names (``key``, ``secret``,
            ``endpoint_url``, ``profile`` ...); what is not given comes from the environment and
            profiles.
        allow_unconditional: see :attr:`SaveOptions.allow_unconditional`.
        staging_budget_bytes: host memory for the copy of an asynchronous save; default: as much as
            this rank's state takes.
        base: an earlier checkpoint: chunks that are the same there, by a 128-bit hash, are linked
            and not written again. Each checkpoint is whole by itself, any may be deleted. What was
            spared is ``reused_bytes`` in the commit record, and logged.
        compression: ``"zstd"`` (level 1) for each chunk; default: none.
        replica_group: a process group (this rank's data-parallel group) whose ranks hold the same
            shards: they share out the chunks by size. Where they do not, main replicas write. With
            a group given, those whose ``replica_id`` is not the main one need their data too.
        progress: called with a :class:`shardstore.progress.Progress` as this rank's chunks are
            written, from any thread; or ``"bar"``: a bar on standard error, on rank 0 alone.

    Returns:
        ``None``, or the request if ``async_sharded_save``: the state may be changed by then; an
        :class:`AsyncCallsQueue` writes in a thread and commits where every rank polls it.
        :func:`shardstore.async_save` is the simple form.

    Raises:
        CheckpointExistsError: there is a checkpoint, and ``overwrite`` was not given.
        AccessPatternError: shards overlap, leave a gap, or do not fit together.
        DTypeMismatchError, ShapeMismatchError, KeyNameError: a tensor can not be stored as it is
            described.
        StorageError: the store refused (full, read-only, gone).
        RanksError: another rank failed, or did not answer in time.
    """
    options, error = SaveOptions(), None
    try:
        options = SaveOptions(
            overwrite=overwrite,
            durable=durable,
            validate=validate_access_integrity,
            staging_budget_bytes=staging_budget_bytes,
            compression=compression,
            allow_unconditional=allow_unconditional,
        )
    except ValueError as problem:
        error = problem  # met by all ranks together
    _, request = begin_save(
        sharded_state_dict,
        checkpoint_dir,
        options,
        sharded_strategy,
        common_strategy,
        async_sharded_save,
        preprocess_common_before_consistancy_check,
        content_metadata,
        base=base,
        replica_group=replica_group,
        storage_options=storage_options,
        error=error,
        progress=progress,
    )
    return request


def begin_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    options: SaveOptions,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    base: str | Path | None = None,
    replica_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    error: BaseException | None = None,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> tuple[SaveSession, AsyncRequest | None]:
    """What :func:`save` does, with the session beside the request.

    Args:
        base: see :func:`save`.
        replica_group: see :func:`save`.
        storage_options: see :func:`save`.
        error: what went wrong on this rank before; it is raised here on every rank.
        progress: see :func:`save`.
    """
    ranks = Ranks.current()
    validate_access_integrity = options.validate
    target = Location.of(checkpoint_dir, **(storage_options or {}))
    sharded: ShardedStateDict = {}
    common: StateDict = {}
    compared = b""
    wanted = False
    callback: ProgressCallback | None = None
    try:
        callback = callback_of(progress, shows=ranks.is_coordinator)
        sharded_strategy, common_strategy = _save_strategies(sharded_strategy, common_strategy)
        if async_sharded_save and not isinstance(sharded_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
                "async_sharded_save out"
            )
        sharded_state_dict = adopt_for_save(sharded_state_dict)
        check_lists(sharded_state_dict)
        sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity=False)
        if content_metadata is not None:
            common[_CONTENT_METADATA_KEY] = content_metadata
        wanted = needs_layouts(sharded) or bool(claims(sharded))
        if validate_access_integrity and ranks.world_size > 1:
            mine = _comparable(common, preprocess_common_before_consistancy_check)
            compared = _pickled(mine) if ranks.is_coordinator else b""
    except Exception as problem:
        error = error or problem
    session = SaveSession.begin(
        ranks,
        target,
        options,
        error=error,
        exchange_layouts=wanted,
        common=compared,
        base=None if base is None else Location.of(base, **(storage_options or {})),
        tensors=sharded_tensors_of(sharded),
        replica_group=replica_group,
    )
    if callback is not None:
        session.meter = Meter("save", target.url, callback)
    # What begin() let pass has both.
    sharded_strategy = cast(SaveShardedStrategy, sharded_strategy)
    common_strategy = cast(SaveCommonStrategy, common_strategy)
    if session.common_of_coordinator and not ranks.is_coordinator:
        _compare_common(mine, session.common_of_coordinator, ranks.rank)

    def finish(problem: BaseException | None) -> None:
        config = _config(sharded_strategy, common_strategy)
        session.finish(
            problem,
            attributes=_attributes(content_metadata),
            documents={CONFIG_FNAME: config_document(config)},
        )

    with session.active() as place:
        try:
            if session.exchange_layouts:
                what = f"planning the save to {session.target.url}"
                apply_claims(
                    sharded, ranks.together(claims(sharded), what=what, decide=decide_claims)
                )
            request = _write(
                sharded, common, place, sharded_strategy, common_strategy, async_sharded_save
            )
        except Exception as problem:
            error, request = problem, None
    if not async_sharded_save:
        finish(error)
        return session, None
    if request is None:
        # The other ranks are on their way: they meet this rank's error at the finalisation.
        session.failure = error
        request = AsyncRequest(None, (), [])
    request = session.guarded(request)
    request.add_finalize_fn(lambda: finish(None))
    return session, request


def _write(
    sharded: ShardedStateDict,
    common: StateDict,
    place: Location,
    sharded_strategy: SaveShardedStrategy,
    common_strategy: SaveCommonStrategy,
    async_sharded_save: bool,
) -> AsyncRequest | None:
    """Write this rank's part of everything."""
    common_strategy.save_common(common, place.place)
    tensors = sharded
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, tensors = extract_matching_values(sharded, lambda v: isinstance(v, ShardedObject))
        common_strategy.save_sharded_objects(cast(StateDict, objects), place.place)
    if async_sharded_save:
        return cast(AsyncSaveShardedStrategy, sharded_strategy).async_save(tensors, place.place)
    sharded_strategy.save(tensors, place.place)
    return None


def _save_strategies(
    sharded: SaveShardedStrategy | tuple[str, int] | None,
    common: SaveCommonStrategy | tuple[str, int] | None,
) -> tuple[SaveShardedStrategy, SaveCommonStrategy]:
    # Looked up as globals at call time: programs replace these functions to change the defaults.
    if sharded is None:
        sharded = get_default_save_sharded_strategy()
    if not isinstance(sharded, SaveShardedStrategy):
        backend, version = _backend_version(sharded, "sharded_strategy")
        found = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
        sharded = cast(SaveShardedStrategy, found)
    if common is None:
        common = get_default_save_common_strategy()
    if not isinstance(common, SaveCommonStrategy):
        backend, version = _backend_version(common, "common_strategy")
        common = cast(
            SaveCommonStrategy, get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
        )
    return sharded, common


def _backend_version(given: object, name: str) -> tuple[str, int]:
    if isinstance(given, tuple | list) and len(given) == 2:
        return given[0], given[1]
    raise CheckpointingException(
        f"{name}={given!r} is neither a strategy for saving nor a (backend, version) pair such "
        "as ('zarr', 2)"
    )


def _config(sharded: SaveShardedStrategy, common: SaveCommonStrategy) -> CheckpointingConfig:
    return CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version)


def _attributes(content_metadata: dict[str, Any] | None) -> dict[str, Any]:
    """What of the content metadata is JSON, as attributes of the root group."""
    if content_metadata is None:
        return {}
    kept = {}
    for name, value in content_metadata.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            kept[str(name)] = str(value)
    return {_CONTENT_METADATA_KEY: kept}


def _comparable(
    common: StateDict, preprocess: Callable[[CommonStateDict], StateDict] | None
) -> StateDict:
    copied = cast(StateDict, dict_list_map_outplace(lambda value: value, common))
    return preprocess(copied) if preprocess is not None else copied


def _pickled(common: StateDict) -> bytes:
    try:
        return pickle.dumps(common)
    except Exception as error:
        raise CheckpointingException(
            f"the common (non-sharded) state can not be pickled: {type(error).__name__}: "
            f"{error}; keep such values out with "
            "LocalNonpersistentObject"
        ) from error


def _compare_common(mine: StateDict, of_coordinator: bytes, rank: int) -> None:
    try:
        theirs = pickle.loads(of_coordinator)
        only_theirs, only_mine, mismatched = diff(theirs, mine)
    except Exception as error:
        logger.warning(
            "Rank %d common state dict could not be compared with rank 0's: %s", rank, error
        )
        return
    if only_theirs or only_mine or mismatched:
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. Keys only on rank "
            "0: %s, "
            "Keys only on %d: %s, Mismatched keys: %s",
            rank,
            only_theirs,
            rank,
            only_mine,
            mismatched,
        )


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    storage_options: Mapping[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    replica_group: Any = None,
    share_replicas: str = "auto",
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES,
    progress: ProgressCallback | Literal["bar"] | None = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint under any layout.

    Called by every rank with the layout that it wants; one rank reads the documents for all.
    Tensors are read straight into
    the memory of those that the state dict holds, where it can be written directly; where a
    sharded tensor has no data, a new
    tensor takes its place.

    Args:
        sharded_state_dict: nested dicts and lists with sharded tensors, objects, factories and
            non-persistent objects.
        checkpoint_dir: a committed checkpoint, a folder or a URL.
        sharded_strategy: default: what the checkpoint's own backend needs.
        common_strategy: the same for the common part.
        validate_access_integrity: check that all ranks together ask for each tensor exactly once.
        strict: what to do about keys that only one side has, see :class:`StrictHandling`.
        storage_options: see :func:`save`.
        map_location: device of the tensors that are made where a sharded tensor has no data;
            default: the CPU. Tensors that are given stay where they are.
        replica_group: a process group (this rank's data-parallel group) that may share the reading:
            each chunk is read once in the group and sent on. All its ranks load the same
            checkpoint.
        share_replicas: ``"always"``, ``"never"`` or ``"auto"``: where the bytes come over a
            network (an object store, or a group on more than one host).
        exchange_budget_bytes: host memory for chunks under way between ranks.
        progress: called as this rank's tensors fill, see :func:`save`.

    Returns:
        The common state with the loaded state merged in; with a ``RETURN_*`` mode a tuple of it,
        the missing and the
        unexpected keys.

    Raises:
        NotACheckpointError, FormatVersionError: nothing there that can be loaded.
        MissingKeyError, ShapeMismatchError, DTypeMismatchError: what is stored is not what is
            asked for.
        ChunkMissingError, ChunkCorruptError, DamagedCheckpointError: what is stored is not what
            was written.
        UnsafeObjectError: a class is needed that was not allowed.
        RanksError: another rank failed, or did not answer in time.
    """
    ranks = Ranks.current()
    location = Location.of(checkpoint_dir, **(storage_options or {}))
    what = f"loading {location.url}"
    error: BaseException | None = None
    report = b""
    mode = StrictHandling.ASSUME_OK_UNEXPECTED
    wanted: ShardedStateDict = {}
    adopted = Adopted(sharded_state_dict)
    reported = compared = False
    started = perf_counter()
    callback: ProgressCallback | None = None
    try:
        callback = callback_of(progress, shows=ranks.is_coordinator)
        checkpoint_dir = _place(location).place
        mode = parse_strict_flag(strict)
        compared = StrictHandling.requires_global_app_metadata(mode)
        reported = validate_access_integrity or compared
        if not needs_adoption(sharded_state_dict):
            wanted, nonpersistent, factories = _prepared(sharded_state_dict)
            report = report_shards(nested_values(wanted) if reported else ())
    except Exception as problem:
        error = problem

    def check(reports: list[bytes]) -> bytes:
        if validate_access_integrity:
            with collector_paused():
                check_reports(reports)
        return pickle.dumps(reports if compared else None)

    def decide(reports: list[bytes]) -> bytes:
        documents = _documents_for_all(location)
        if documents[location.url, CONFIG_FNAME] is None or not all(reports):
            return pickle.dumps((documents, None))
        return pickle.dumps((documents, check(reports)))

    answer = ranks.together(report, what=what, error=error, decide=decide)
    documents, checked = pickle.loads(answer)
    meter = Meter("load", location.url, callback)
    with handed_out(documents), watched(meter):
        if checked is None:
            # What plain tensors and DTensors stand for takes the stored keys, and who holds them.
            try:
                adopted = _adopted(sharded_state_dict, checkpoint_dir, sharded_strategy)
                wanted, nonpersistent, factories = _prepared(adopted.state)
                report = claims(wanted)
            except Exception as problem:
                error = problem
            apply_claims(
                wanted, ranks.together(report, what=what, error=error, decide=decide_claims)
            )
            report = report_shards(nested_values(wanted) if reported else ())
            checked = ranks.together(report, what=what, decide=check)
        try:
            for_tensors, for_common = verify_checkpoint_and_load_strategy(
                checkpoint_dir, sharded_strategy, common_strategy
            )
            common_state = for_common.load_common(checkpoint_dir)
            merge(common_state, nonpersistent)
            local = stored = None
            if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
                stored = load_sharded_metadata(checkpoint_dir, for_tensors, for_common)
                local = [v.without_data() for v in nested_values(wanted)]
            reports = pickle.loads(checked)
            everyone = None if reports is None else [shards_of_report(r) for r in reports]
            wanted, missing, unexpected = validate_integrity_and_strict_load(
                wanted, mode, False, local, everyone, stored
            )
            sharing = sharing_of(replica_group, share_replicas, location, exchange_budget_bytes)
            if map_location is not None:
                wanted = with_destinations(wanted, torch.device(map_location))
        except Exception as problem:
            error = problem
        ranks.together(what=what, error=error)

        try:
            loaded = _read(wanted, checkpoint_dir, for_tensors, for_common, sharing)
            merge(common_state, loaded)
            result = adopted.restore(apply_factory_merges(common_state, factories))
        except Exception as problem:
            error = problem
        ranks.together(what=what, error=error)
    if ranks.is_coordinator:
        _log_load(location.url, meter.bytes_total, perf_counter() - started, ranks.world_size)
    if StrictHandling.requires_returning_mismatch_keys(mode):
        return result, missing, unexpected
    return result


def _log_load(url: str, size: int, seconds: float, world_size: int) -> None:
    logger.info(
        "%s: loaded, %d bytes on rank 0 in %.3f s",
        url,
        size,
        seconds,
        extra={
            "event": "load",
            "url": url,
            "bytes": size,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(size / max(seconds, 1e-9)),
            "world_size": world_size,
        },
    )


def _read(
    wanted: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy,
    common_strategy: LoadCommonStrategy,
    sharing: Sharing | None = None,
) -> StateDict:
    loaded: StateDict = {}
    tensors: Any = wanted
    failed: Exception | None = None
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, tensors = extract_matching_values(wanted, lambda v: isinstance(v, ShardedObject))
        try:
            loaded = common_strategy.load_sharded_objects(cast(StateDict, objects), checkpoint_dir)
        except Exception as problem:
            failed = problem
    if sharing is not None:
        # Before tensors travel, so that nobody waits for a rank that could not load its objects.
        raise_together(failed, sharing.group, f"loading objects of {checkpoint_dir}")
    if failed is not None:
        raise failed
    with shared_reads(sharing):
        merge(loaded, sharded_strategy.load(tensors, checkpoint_dir))
    return loaded


def _prepared(state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict, StateDict]:
    """The shards to load, the non-persistent objects, and the factories."""
    wanted, nonpersistent, factories = load_preprocess(state_dict)
    return extract_sharded_base(wanted)[0], nonpersistent, factories


def _adopted(
    state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None,
) -> Adopted:
    """The state dict with its plain tensors and DTensors as what is stored under their paths."""
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    return adopt_for_load(state_dict, lambda: strategy.load_tensors_metadata(checkpoint_dir))


def _documents_for_all(location: Location) -> Mapping[tuple[str, str], bytes | None]:
    """The documents that every rank needs, read by one and handed to all."""
    names = (ROOT_DOCUMENT, CONFIG_FNAME, COMMON_STATE_FNAME)

    def read(name: str) -> bytes | None:
        try:
            return location.read(name)
        except FileNotFoundError:
            return None

    if location.is_local:
        return {(location.url, name): read(name) for name in names}
    found = run_together(*(partial(read, name) for name in names))
    return {(location.url, name): data for name, data in zip(names, found, strict=True)}


@contextmanager
def _one_root(location: Location) -> Iterator[None]:
    """Within, the root document of an object store, which is all that metadata takes, is asked for
    once."""
    if location.is_local or is_handed(location, ROOT_DOCUMENT):
        yield
        return
    root: bytes | None = None
    with suppress(FileNotFoundError):
        root = location.read(ROOT_DOCUMENT)
    with handed_out({(location.url, ROOT_DOCUMENT): root}):
        yield


def load_common_state_dict(
    checkpoint_dir: str | Path, *, storage_options: Mapping[str, Any] | None = None
) -> StateDict:
    """Load the common part alone. Any rank may call it; it waits for no other."""
    checkpoint_dir = _place(checkpoint_dir, storage_options).place
    _, common_strategy = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common_strategy.load_common(checkpoint_dir)


def load_content_metadata(
    checkpoint_dir: str | Path | None = None,
    *,
    preloaded_state_dict: StateDict | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """What was given to :func:`save` as ``content_metadata``; ``None`` if nothing was.

    Args:
        checkpoint_dir: a checkpoint, unless ``preloaded_state_dict`` is given.
        preloaded_state_dict: a loaded state dict or common state dict to take it from.
        storage_options: see :func:`save`.

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
    return preloaded_state_dict.get(_CONTENT_METADATA_KEY)


def load_tensors_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """Key -> sharded tensor without data, whole and unsharded; can be handed to :func:`load`.

    Any rank may call it; it waits for no other.
    """
    location = _place(checkpoint_dir, storage_options)
    with _one_root(location):
        strategy, _ = verify_checkpoint_and_load_strategy(location.place, sharded_strategy)
        return strategy.load_tensors_metadata(location.place)


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> CkptShardedMetadata:
    """As :func:`load_tensors_metadata`, sharded objects under their unique keys included."""
    location = _place(checkpoint_dir, storage_options)
    with _one_root(location):
        sharded, common = verify_checkpoint_and_load_strategy(
            location.place, sharded_strategy, common_strategy
        )
        metadata = dict(sharded.load_sharded_metadata(location.place))
        if not sharded.can_handle_sharded_objects:
            validate_sharded_objects_handling(sharded, common)
            metadata.update(common.load_sharded_metadata(location.place))
    return metadata


def load_plain_tensors(
    checkpoint_dir: str | Path,
    *,
    keys: Iterable[str] | None = None,
    region: Sequence[slice] | Mapping[str, Sequence[slice]] | None = None,
    map_location: str | torch.device | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> StateDict:
    """Load tensors by key under no sharding at all: all of them whole, or parts.

    Called by every rank; each gets everything that it asks for.

    Args:
        checkpoint_dir: a committed checkpoint.
        keys: tensors to load; default: all, with the common state. With keys, or a region, the
            result is the tensors alone.
        region: slices of leading axes, of every tensor or by key; only chunks that they touch are
            read. Steps other than 1 are refused.
        map_location: device of the tensors; default: the CPU.

    Raises:
        MissingKeyError: a key is not in the checkpoint.
        ValueError: a region has a step, or more axes than the tensor.
    """
    checkpoint_dir = Location.of(checkpoint_dir, **(storage_options or {})).place
    tensors = load_tensors_metadata(checkpoint_dir)
    if keys is None and region is None:
        # Every rank asks for everything: the access pattern is not a partition and is not checked.
        whole = load(
            tensors, checkpoint_dir, validate_access_integrity=False, map_location=map_location
        )
        return cast(StateDict, whole)
    chosen = list(tensors if keys is None else keys)
    if isinstance(region, Mapping) and keys is None:
        chosen = list(region)
    parts = {key: part_of(tensors, key, region, str(checkpoint_dir)) for key in chosen}
    loaded = load(parts, checkpoint_dir, validate_access_integrity=False, map_location=map_location)
    return {key: cast(StateDict, loaded)[key] for key in chosen}


def remove_sharded_tensors(
    checkpoint_dir: str | Path,
    key_prefix: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Remove all tensors whose key starts with a prefix. Called by one rank.

    The root document loses them first, so that no reader meets a hole.
    """
    checkpoint_dir = _place(checkpoint_dir, storage_options).place
    strategy, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)


def get_default_save_sharded_strategy(
    backend: str = "zarr", version: int = 2
) -> SaveShardedStrategy:
    """The default strategy for saving sharded tensors."""
    found = get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    return cast(SaveShardedStrategy, found)


def get_default_save_common_strategy(
    backend: str = "torch", version: int = 1
) -> SaveCommonStrategy:
    """The default strategy for saving the common part."""
    found = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return cast(SaveCommonStrategy, found)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """The strategy that a checkpoint's own backend needs for loading."""
    return verify_checkpoint_and_load_strategy(_place(checkpoint_dir).place)[0]


def _place(
    checkpoint_dir: str | Path | Location, storage_options: Mapping[str, Any] | None = None
) -> Location:
    """The location of a path or URL.

    Raises:
        NotACheckpointError: it is a file.
    """
    location = Location.of(checkpoint_dir, **(storage_options or {}))
    if location.is_local and location.path.is_file():
        raise NotACheckpointError(
            f"{location.url} is a file; give the folder that save() wrote", url=location.url
        )
    return location
