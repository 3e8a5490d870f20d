"""The steps of a synchronous or asynchronous save on each rank: prepare, agree, write, commit.

Every rank learns of an error on any rank before a byte is written, and again at the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shardstore.dict_utils import nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group
from shardstore.dtensor.adoption import adopt_for_save
from shardstore.dtensor.layout import claim_among
from shardstore.errors import ArgumentError, CheckpointingException, StructureError
from shardstore.loading.context import CONTENT_METADATA_KEY
from shardstore.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factories,
)
from shardstore.saving.plain import PlainValues
from shardstore.saving.replicas import copies_of
from shardstore.saving.session import Part, SaveSession
from shardstore.state_dict_utils import check_state, number_lists, save_preprocess
from shardstore.storage.commit.publish import About
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.options import SaveOptions, require_bool
from shardstore.storage.stores.location import Location
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from shardstore.utils import extract_sharded_objects
from shardstore.validation import (
    comparable,
    compare_common,
    preprocessed,
    validate_sharded_objects_handling,
)


def run_save(
    ranks: Ranks, place: str | Path, prepared: Callable[[bool], Part]
) -> tuple[SaveSession, AsyncRequest | None]:
    """Save, or begin an asynchronous save. Every rank calls it, see :func:`shardstore.save`.

    Args:
        ranks: the ranks of the save.
        place: the target as the caller gave it, for error texts.
        prepared: returns this rank's part of the save, see :func:`prepare`; its argument is
            ``arrays``. Every rank raises its error.

    Returns:
        The session, and the request that writes and commits if the save is asynchronous.
    """
    with collector_paused():
        session, part = SaveSession.begin(ranks, place, prepared)
        return session, session.run(lambda session: _write(session, part))


def prepare(
    given_state: ShardedStateDict,
    checkpoint_dir: str | Path,
    options: SaveOptions,
    strategies: tuple[SaveShardedStrategy, SaveCommonStrategy],
    *,
    ranks: Ranks,
    arrays: bool = False,
    background: str | None = None,
    preprocess: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    verify_integrity: bool = False,
) -> Part:
    """Check the arguments, build factories, and split the state. It waits for no rank.

    Args:
        ranks: the ranks of the save.
        arrays: see :func:`adopt_for_save`.
        background: see :class:`Part`.

    :func:`shardstore.save` describes the other arguments.

    Raises:
        CheckpointingException: an argument or a value of the state is wrong.
    """
    target = Location.of(checkpoint_dir, options.storage_options)
    base = None if options.base is None else Location.of(options.base)
    if base is not None and not base.options:
        base = Location(base.url, target.options)
    require_group("replica_group", options.replica_group)
    require_bool("verify_integrity", verify_integrity)
    check_state(given_state)
    if not isinstance(content_metadata, dict | None):
        raise ArgumentError(f"content_metadata={content_metadata!r:.100} must be a dict")
    sharded_strategy, common_strategy = strategies
    if background is not None and not isinstance(sharded_strategy, AsyncSaveShardedStrategy):
        raise CheckpointingException(
            f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
            "async_sharded_save out or use another strategy"
        )
    state_dict = adopt_for_save(given_state, arrays=arrays)
    apply_factories(state_dict)
    state_dict, _ = number_lists(state_dict, built=True)
    sharded, common = save_preprocess(state_dict, validate_access_integrity=False)
    claim_among(sharded, ranks)
    attributes = {}
    if content_metadata is not None:
        if CONTENT_METADATA_KEY in sharded or not isinstance(
            common.get(CONTENT_METADATA_KEY, {}), dict
        ):
            raise StructureError(
                f"content_metadata= would replace the value at {CONTENT_METADATA_KEY!r} in the "
                "state, which is no dict of an earlier load; rename that key",
                key=CONTENT_METADATA_KEY,
            )
        common[CONTENT_METADATA_KEY] = content_metadata
        attributes[CONTENT_METADATA_KEY] = _attributes(content_metadata)
    if (key := common_strategy.object_key) is not None:
        number = ranks.members.index(ranks.rank)
        sharded[key] = ShardedObject(key, common, (1,), (0,), replica_id=number)
    part = Part(
        target=target,
        options=options,
        sharded=sharded,
        common=common,
        strategies=strategies,
        about=About(
            common_backend=(common_strategy.backend, common_strategy.version),
            sharded_backend=(sharded_strategy.backend, sharded_strategy.version),
            attributes=attributes,
        ),
        base=base,
        background=background,
        verify_integrity=verify_integrity,
    )
    if options.validate_access_integrity:
        noted = common_strategy.notes_objects and not sharded_strategy.can_handle_sharded_objects
        part.copies = copies_of(nested_values(state_dict), objects=noted)
    if ranks.world_size > 1:
        compared = preprocessed(common, preprocess) if options.validate_access_integrity else None
        part.plain = PlainValues.of(given_state, sharded, common, compared)
    return part


def _write(session: SaveSession, part: Part) -> AsyncRequest | None:
    """Write this rank's part by the strategies. For an asynchronous save, return the request."""
    assert part.strategies is not None  # prepare() has set them
    sharded_strategy, common_strategy = part.strategies
    agreed, place = session.agreed, session.attempt.location.place
    innermost: object = sharded_strategy
    while (base := getattr(innermost, "base_strategy", None)) is not None:
        innermost = base
    # When the strategy lets the ranks meet to plan: "always", to exchange "layouts", or never.
    meets = getattr(innermost, "meets_to_plan", None)
    session.plans = meets == "always" or (meets == "layouts" and session.plans)
    if agreed.common and not session.ranks.is_coordinator:
        equal = session.options.replicas == "equal"
        mine = comparable((part.plain and part.plain.compared) or {})
        compare_common(mine, agreed.common, session.ranks, equal=equal)
    tensors, objects = part.sharded, None
    if not sharded_strategy.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
        objects, tensors = extract_sharded_objects(tensors)
    try:
        if session.failure is None:
            common_strategy.save_common(part.common, place)
            if objects is not None:
                common_strategy.save_sharded_objects(objects, place)
    except Exception as problem:
        # Raised at the next step of all ranks, in the strategy or at the commit.
        session.failure = problem
    if part.background is not None:
        return cast(AsyncSaveShardedStrategy, sharded_strategy).async_save(tensors, place)
    sharded_strategy.save(tensors, place)
    return None


def _attributes(content_metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``content_metadata`` as JSON, with the texts of values that have no JSON form."""
    kept = {}
    for name, value in content_metadata.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            kept[str(name)] = str(value)
    return kept
