"""What a save does on each rank, step by step.

Answers for the order of a save, synchronous or not: what is wrong on one rank is met by all before
bytes move, strategies write, all commit together. Which strategies are meant by default, and what
arguments mean, is :mod:`shardstore.serialization`'s to say; the commit itself is the session's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from shardstore.core import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    config_document,
)
from shardstore.dict_utils import extract_matching_values, nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group
from shardstore.dtensor.adoption import adopt_for_save, keys_of_plain
from shardstore.dtensor.claims import apply_claims, claims, decide_claims
from shardstore.errors import ArgumentError
from shardstore.loading.metadata import CONTENT_METADATA_KEY
from shardstore.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from shardstore.progress import Meter, ProgressCallback, callback_of
from shardstore.saving.replicas import Copies, copies_of
from shardstore.saving.session import SaveSession
from shardstore.state_dict_utils import check_lists, check_state, save_preprocess
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from shardstore.strategies.common import TorchCommonSaveStrategy
from shardstore.strategies.zarr import needs_layouts, plans_together, sharded_tensors_of
from shardstore.validation import (
    comparable,
    compare_common,
    pickled,
    validate_sharded_objects_handling,
)

__all__ = ["SaveCall", "run_save"]

SaveStrategies: TypeAlias = tuple[SaveShardedStrategy, SaveCommonStrategy]
ChooseStrategies: TypeAlias = Callable[
    [
        SaveShardedStrategy | tuple[str, int] | None,
        SaveCommonStrategy | tuple[str, int] | None,
    ],
    SaveStrategies,
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SaveCall:
    """What one rank gives to a save; the same for every way to start one.

    Attributes:
        options: how the checkpoint is written.
        error: what went wrong on this rank before; it is raised on every rank.
        later: purpose of the group in which the ranks meet for the commit; default: that of the
            call.

    All others are described at :func:`shardstore.save`.
    """

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    options: SaveOptions
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None
    async_sharded_save: bool = False
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None
    content_metadata: dict[str, Any] | None = None
    error: BaseException | None = None
    later: str | None = None


def run_save(call: SaveCall, choose: ChooseStrategies) -> tuple[SaveSession, AsyncRequest | None]:
    """Save, or begin an asynchronous save. Called by every rank, see :func:`shardstore.save`.

    Args:
        call: what this rank gives.
        choose: makes strategies of what was given for them, which may be nothing.

    Returns:
        The session, and the request that writes and commits if the save is asynchronous.
    """
    ranks = Ranks.current()
    target, error = _located(call)
    sharded: ShardedStateDict = {}
    common: StateDict = {}
    compared = b""
    copies: Copies = {}
    base: Location | None = None
    wanted = adopts = False
    callback: ProgressCallback | None = None
    try:
        if call.options.base is not None:
            base = Location.of(call.options.base)
            if not base.options:
                base = Location.given(base, call.options.storage_options)
        require_group("replica_group", call.options.replica_group)
        check_state(call.sharded_state_dict)
        if not isinstance(call.content_metadata, dict | None):
            raise ArgumentError(f"content_metadata={call.content_metadata!r:.100} must be a dict")
        callback = callback_of(call.options.progress, shows=ranks.is_coordinator)
        sharded_strategy, common_strategy = choose(call.sharded_strategy, call.common_strategy)
        if call.async_sharded_save and not isinstance(sharded_strategy, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
                "async_sharded_save out"
            )
        sharded_state_dict = adopt_for_save(call.sharded_state_dict)
        adopts = sharded_state_dict is not call.sharded_state_dict
        check_lists(sharded_state_dict)
        sharded, common = save_preprocess(sharded_state_dict, validate_access_integrity=False)
        if call.content_metadata is not None:
            common[CONTENT_METADATA_KEY] = call.content_metadata
        wanted = needs_layouts(sharded) or bool(claims(sharded))
        if call.options.validate:
            noted = isinstance(common_strategy, TorchCommonSaveStrategy)
            noted = noted and not sharded_strategy.can_handle_sharded_objects
            copies = copies_of(nested_values(sharded), objects=noted)
        if call.options.validate and ranks.world_size > 1:
            mine = comparable(common, call.preprocess_common_before_consistancy_check)
            compared = pickled(mine) if ranks.is_coordinator else b""
    except Exception as problem:
        error = error or problem
    session = SaveSession.begin(
        ranks,
        target,
        call.options,
        error=error,
        exchange_layouts=wanted,
        common=compared,
        base=base,
        tensors=sharded_tensors_of(sharded),
        copies=copies,
        later=call.later,
        adopts=adopts,
    )
    if session.rank_with_dtensors is not None:
        session.common_keys = keys_of_plain(common)
    if callback is not None:
        session.meter = Meter("save", target.url, callback)
    # What begin() let pass has both strategies.
    content_metadata = call.content_metadata  # finish() lives on, and must not keep the state

    def finish(problem: BaseException | None) -> None:
        config = _config(sharded_strategy, common_strategy)
        session.finish(
            problem,
            attributes=_attributes(content_metadata),
            documents={CONFIG_FNAME: config_document(config)},
        )

    with session.active() as place:
        try:
            if session.common_of_coordinator and not ranks.is_coordinator:
                compare_common(mine, session.common_of_coordinator, ranks.rank)
            if session.exchange_layouts:
                mine_claims = claims(sharded)
                answer = session.meet(
                    mine_claims,
                    what=session.planning,
                    error=session.failure,
                    decide=decide_claims,
                )
                apply_claims(sharded, answer)
                session.plans = plans_together(sharded_strategy)
            request = _write(
                session,
                (sharded, common),
                place,
                (sharded_strategy, common_strategy),
                call.async_sharded_save,
            )
        except Exception as problem:
            error, request = problem, None
        except BaseException as interrupt:  # nothing goes on behind the back of who interrupted
            session.files.stop(interrupt)
            raise
    if not call.async_sharded_save:
        finish(error)
        return session, None
    if request is None:
        # The other ranks are on their way: they meet this rank's error at the finalisation.
        assert error is not None
        session.fail_planning(error)
        request = AsyncRequest(None, (), [])
    session.ranks = session.later
    request = session.guarded(request)
    request.add_finalize_fn(lambda: finish(None))
    return session, request


def _located(call: SaveCall) -> tuple[Location, BaseException | None]:
    """Where to, and what went wrong on this rank so far, to be met by all ranks together."""
    try:
        return Location.given(call.checkpoint_dir, call.options.storage_options), call.error
    except ArgumentError as problem:
        return Location(shown(call.checkpoint_dir)), call.error or problem


def _write(
    session: SaveSession,
    state: tuple[ShardedStateDict, StateDict],
    place: Location,
    strategies: SaveStrategies,
    async_sharded_save: bool,
) -> AsyncRequest | None:
    """Write this rank's part of everything."""
    (tensors, common), (sharded_strategy, common_strategy) = state, strategies
    objects: ShardedStateDict | None = None
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, tensors = extract_matching_values(tensors, lambda v: isinstance(v, ShardedObject))
    try:
        if session.failure is None:
            common_strategy.save_common(common, place.place)
            if objects is not None:
                common_strategy.save_sharded_objects(objects, place.place)
    except Exception as problem:
        # The ranks may meet in the strategy: it hears of this, and lets the others know there.
        session.failure = problem
    request = None
    if async_sharded_save:
        strategy = cast(AsyncSaveShardedStrategy, sharded_strategy)
        request = strategy.async_save(tensors, place.place)
    else:
        sharded_strategy.save(tensors, place.place)
    if session.failure is not None and not async_sharded_save:
        raise session.failure
    return request


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
    return {CONTENT_METADATA_KEY: kept}
