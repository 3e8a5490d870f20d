"""The steps of a synchronous or asynchronous save on each rank: prepare, agree, write, commit.

Every rank learns of an error on any rank before a byte is written, and again at the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from shardstore.dict_utils import extract_matching_values, nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group
from shardstore.dtensor.adoption import adopt_for_save, keys_of_plain
from shardstore.dtensor.layout import apply_claims, claims
from shardstore.errors import ArgumentError, CheckpointingException
from shardstore.loading.context import CONTENT_METADATA_KEY
from shardstore.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from shardstore.progress import Meter, callback_of
from shardstore.saving.replicas import copies_of
from shardstore.saving.session import Part, SaveSession
from shardstore.state_dict_utils import check_lists, check_state, save_preprocess
from shardstore.storage.commit.inventory import write_integrity
from shardstore.storage.commit.publish import About
from shardstore.storage.format.names import INTEGRITY_NAME
from shardstore.storage.options import SaveOptions, require_bool
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from shardstore.utils import sharded_tensors_of
from shardstore.validation import (
    comparable,
    compare_common,
    pickled,
    validate_sharded_objects_handling,
)

ChooseStrategies: TypeAlias = Callable[[Any, Any], tuple[SaveShardedStrategy, SaveCommonStrategy]]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SaveCall:
    """The arguments of a save on one rank.

    Attributes:
        options: how the checkpoint is written.
        error: an earlier error of this rank, which every rank raises.
        later: purpose of the process group for the commit; default: that of the call.

    :func:`shardstore.save` describes the others.
    """

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    options: SaveOptions
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None
    async_sharded_save: bool = False
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None
    content_metadata: dict[str, Any] | None = None
    verify_integrity: bool = False
    error: BaseException | None = None
    later: str | None = None


def run_save(call: SaveCall, choose: ChooseStrategies) -> tuple[SaveSession, AsyncRequest | None]:
    """Save, or begin an asynchronous save. Every rank calls it, see :func:`shardstore.save`.

    Args:
        call: the arguments of this rank.
        choose: returns the strategies for these arguments, which may be ``None``.

    Returns:
        The session, and the request that writes and commits if the save is asynchronous.
    """
    ranks = Ranks.current()
    try:
        part = prepare(call, ranks, choose)
    except Exception as problem:
        target = Location(shown(call.checkpoint_dir))
        part = Part(target=target, options=call.options, error=call.error or problem)
    session = SaveSession.begin(ranks, part, later=call.later)
    in_background = call.async_sharded_save

    def work(session: SaveSession) -> AsyncRequest | None:
        return _write(session, part, in_background=in_background)

    request = session.run(work, part.about, in_background=in_background)
    if call.verify_integrity:

        def decide(_: list[bytes]) -> bytes:
            write_integrity(session.target)
            return b""

        what = f"writing {INTEGRITY_NAME} of {session.target.url}"
        add = partial(session.ranks.together, what=what, decide=decide)
        if request is None:
            add()
        else:
            request.add_finalize_fn(add)
    return session, request


def prepare(call: SaveCall, ranks: Ranks, choose: ChooseStrategies) -> Part:
    """Check the arguments, build factories, and split the state. It waits for no rank.

    Raises:
        CheckpointingException: an argument or a value of the state is wrong.
    """
    options, content = call.options, call.content_metadata
    target = Location.given(call.checkpoint_dir, options.storage_options)
    if call.error is not None:
        raise call.error
    base: Location | None = None
    if options.base is not None:
        base = Location.of(options.base)
        if not base.options:
            base = Location.given(base, target.options)
    require_group("replica_group", options.replica_group)
    require_bool("async_sharded_save", call.async_sharded_save)
    require_bool("verify_integrity", call.verify_integrity)
    check_state(call.sharded_state_dict)
    if not isinstance(content, dict | None):
        raise ArgumentError(f"content_metadata={content!r:.100} must be a dict")
    callback = callback_of(options.progress, shows=ranks.is_coordinator)
    sharded_strategy, common_strategy = choose(call.sharded_strategy, call.common_strategy)
    if call.async_sharded_save and not isinstance(sharded_strategy, AsyncSaveShardedStrategy):
        raise CheckpointingException(
            f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
            "async_sharded_save out or use another strategy"
        )
    state_dict = adopt_for_save(call.sharded_state_dict)
    check_lists(state_dict)
    sharded, common = save_preprocess(state_dict, validate_access_integrity=False)
    if content is not None:
        common[CONTENT_METADATA_KEY] = content
    if (key := common_strategy.object_key) is not None:
        sharded[key] = ShardedObject(key, common, (1,), (0,), replica_id=ranks.rank)
    part = Part(
        target=target,
        options=options,
        sharded=sharded,
        tensors=sharded_tensors_of(sharded),
        common=common,
        strategies=(sharded_strategy, common_strategy),
        about=About(
            common_backend=(common_strategy.backend, common_strategy.version),
            sharded_backend=(sharded_strategy.backend, sharded_strategy.version),
            attributes={} if content is None else {CONTENT_METADATA_KEY: _attributes(content)},
        ),
        base=base,
        claims=claims(sharded),
        adopts=state_dict is not call.sharded_state_dict,
        meter=Meter("save", target.url, callback),
    )
    if options.validate_access_integrity:
        noted = common_strategy.notes_objects and not sharded_strategy.can_handle_sharded_objects
        part.copies = copies_of(nested_values(state_dict), objects=noted)
        if ranks.world_size > 1:
            part.compared = comparable(common, call.preprocess_common_before_consistancy_check)
            part.told = pickled(part.compared) if ranks.is_coordinator else b""
    return part


def _write(session: SaveSession, part: Part, *, in_background: bool) -> AsyncRequest | None:
    """Write this rank's part by the strategies. For an asynchronous save, return the request."""
    assert part.strategies is not None  # else begin() has raised this rank's error
    sharded_strategy, common_strategy = part.strategies
    agreed, place = session.agreed, session.attempt.location.place
    session.plans = agreed.exchange_layouts and _meets_to_plan(sharded_strategy)
    if session.ranks.is_coordinator:
        if agreed.rank_with_dtensors is not None:
            session.common_keys = keys_of_plain(part.common)
    elif agreed.common:
        compare_common(part.compared, agreed.common, session.ranks.rank)
    tensors, objects = part.sharded, None
    apply_claims(tensors, agreed.owners)
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, tensors = extract_matching_values(tensors, lambda v: isinstance(v, ShardedObject))
    try:
        if session.failure is None:
            common_strategy.save_common(part.common, place)
            if objects is not None:
                common_strategy.save_sharded_objects(objects, place)
    except Exception as problem:
        # The strategy may communicate with the other ranks, and then reports this error to them.
        session.failure = problem
    if in_background:
        return cast(AsyncSaveShardedStrategy, sharded_strategy).async_save(tensors, place)
    sharded_strategy.save(tensors, place)
    if session.failure is not None:
        raise session.failure
    return None


def _meets_to_plan(strategy: object) -> bool:
    """Return whether a strategy, or the strategy that it wraps, exchanges layouts between ranks."""
    while (base := getattr(strategy, "base_strategy", None)) is not None:
        strategy = base
    return bool(getattr(strategy, "meets_to_plan", False))


def _attributes(content_metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``content_metadata`` as JSON, with the texts of values that have no JSON form."""
    kept = {}
    for name, value in content_metadata.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            kept[str(name)] = str(value)
    return kept
