"""The steps of a synchronous or asynchronous save on each rank: split the state, begin, write,
commit.

Every rank learns of an error on any rank before a byte is written, and again at the commit.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from shardstore import coverage, errors, mapping, validation
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group, tell_launched
from shardstore.dtensor.adoption import Adoption
from shardstore.dtensor.layout import apply_claims, decide_claims
from shardstore.saving import plain, replicas
from shardstore.saving.plain import PlainValues
from shardstore.saving.plan import needing_layouts
from shardstore.saving.session import Agreement, SaveSession, SplitState, Strategies
from shardstore.state_dict_utils import StateSplit
from shardstore.storage.checkpoint import latest_save, settled
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.base import read_base
from shardstore.storage.commit.publish import RootContent
from shardstore.storage.format.names import CONTENT_METADATA_KEY, node_name
from shardstore.storage.options import DEFAULTS, SaveOptions, require_bool
from shardstore.storage.runtime.parallel import collector_paused
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import AsyncSaveShardedStrategy, called

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SaveRequest:
    """The arguments of a save on one rank.

    Attributes:
        ranks: the ranks of the save.
        options: options of the save.
        strategies: the strategies; ``None`` only with an error.
        background: see :class:`SplitState`.
        error: an error in other arguments of this rank; every rank raises it.

    :func:`shardstore.save` describes all others.
    """

    state: mapping.ShardedStateDict
    checkpoint_dir: str | Path | Location
    ranks: Ranks
    options: SaveOptions = DEFAULTS
    strategies: Strategies | None
    background: str | None = None
    preprocess: Callable[[mapping.CommonStateDict], mapping.StateDict] | None = None
    content_metadata: dict[str, Any] | None = None
    verify_integrity: bool = False
    error: BaseException | None = None


class Begun(NamedTuple):
    """A save that was committed, or the request that writes and commits it."""

    session: SaveSession
    request: AsyncRequest | None


def run_save(request: SaveRequest) -> Begun:
    """Save, or begin an asynchronous save. Every rank calls it, see :func:`shardstore.save`."""
    with collector_paused():
        session, state = begin(request)
        rest: AsyncRequest | None = None
        try:
            write_common(session, state)
            rest = write_sharded(session, state)
        except Exception as problem:  # finish() raises it, on every rank
            session.failure = problem
        except BaseException:  # an interrupt; the other ranks notice that this one is gone
            session.give_up()
            raise
        if request.background is not None:
            return Begun(session, session.rest(rest))
        session.finish()
        return Begun(session, None)


class Started(NamedTuple):
    """A save that every rank has begun."""

    session: SaveSession
    state: SplitState


def begin(request: SaveRequest) -> Started:
    """Agree with all ranks to begin. Every rank calls it and waits for all others.

    Raises:
        CheckpointExistsError, StorageError: the attempt cannot begin; raised on every rank.
        AccessPatternError: the values of two ranks do not fit into one state dict.
        RanksError: another rank failed, or did not answer in time.
    """
    if request.ranks.world_size > 1:
        return _begin_together(request)
    state = split_state(request)
    if "RANK" in os.environ:
        tell_launched(state.target.url)
    agreed = Agreement(
        exchange_layouts=bool(needing_layouts(state.shards)),
        base_documents=None if state.base is None else read_base(state.base),
        copy_reporters=(request.ranks.rank,),
    )
    nodes = (node_name(shard.key) for shard in state.shards)
    attempt = checkpoints.begin(state.target, state.options, nodes)
    try:
        return Started(SaveSession(request.ranks, state, agreed, attempt), state)
    except BaseException:
        attempt.abandon()
        raise


def split_state(request: SaveRequest, *, arrays: bool = False) -> SplitState:
    """Check the arguments, build factories, and split the state. It waits for no rank.

    Args:
        request: the arguments of this rank.
        arrays: make arrays of the plain tensors, as if there were DTensors.

    Raises:
        CheckpointingException: an argument or a value of the state is wrong.
    """
    if request.error is not None:
        raise request.error
    options, ranks = request.options, request.ranks
    target = Location.of(request.checkpoint_dir, options.storage_options)
    if latest_save:
        settled(target)
    base = None if options.base is None else Location.of(options.base)
    if base is not None and not base.options:
        base = Location.of(base, target.options)
    if options.replica_group is not None:
        require_group("replica_group", options.replica_group)
    require_bool("verify_integrity", request.verify_integrity)
    assert request.strategies is not None  # else there is an error
    sharded_strategy, common_strategy = strategies = request.strategies
    is_async = isinstance(sharded_strategy, AsyncSaveShardedStrategy)
    if request.background is not None and not is_async:
        raise errors.CheckpointingException(
            f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
            "async_sharded_save out or use another strategy"
        )
    adoption = Adoption(frozenset(ranks.members), loading=False, arrays=arrays)
    split = StateSplit(request.state, loading=False, adopt=adoption)
    if adoption.has_distributed and adoption.left:  # plain tensors came first
        split = StateSplit(request.state, loading=False, adopt=adoption)
    tensors, values = ((one.backend, one.version) if one else None for one in strategies)
    about = RootContent(common_backend=values, sharded_backend=tensors or ("", 0))
    if request.content_metadata is not None:
        about = _with_content(about, request.content_metadata, split)
    state = SplitState(
        target=target,
        options=options,
        shards=[shard for _, shard in split.shards],
        common=split.common,
        strategies=strategies,
        about=about,
        base=base,
        background=request.background,
        verify_integrity=request.verify_integrity,
    )
    if common_strategy is not None and (key := common_strategy.object_key) is not None:
        number = ranks.members.index(ranks.rank)
        state.shards.append(mapping.ShardedObject(key, state.common, (1,), (0,), replica_id=number))
    if checks := options.validate_access_integrity:
        noted = getattr(common_strategy, "notes_objects", False)
        noted = noted and not sharded_strategy.can_handle_sharded_objects
        state.copies = _copies(split.found, objects=noted)
    if ranks.world_size > 1:
        compared = validation.preprocessed(state.common, request.preprocess) if checks else None
        state.plain = PlainValues.of(split, compared)
    return state


def _copies(
    shards: Iterable[mapping.ShardedTensor | mapping.ShardedObject], *, objects: bool
) -> list[str]:
    """Return the keys of the tensors, and unique keys of the objects, that this rank holds only as
    copies or empty ranges.

    Args:
        shards: the shards of this rank.
        objects: whether the strategy that writes the objects records them in the manifest.
    """
    main: set[str] = set()
    copied: set[str] = set()
    for item in shards:
        is_main = mapping.is_main_replica(item.replica_id)
        if isinstance(item, mapping.ShardedObject):
            if objects:
                (main if is_main else copied).add(item.unique_key)
        elif not (empty := mapping.is_empty_range(item)) or 0 not in item.global_shape:
            (main if is_main and not empty else copied).add(item.key)
    return sorted(copied - main)


def _with_content(about: RootContent, content: object, split: StateSplit) -> RootContent:
    """Put ``content_metadata`` into the content of the root document and into the common values."""
    if not isinstance(content, dict):
        raise errors.ArgumentError(f"content_metadata={content!r:.100} must be a dict")
    name, common = CONTENT_METADATA_KEY, split.common
    is_sharded = any(path[0] == name for path, _ in split.shards)
    if is_sharded or not isinstance(common.get(name, {}), dict):
        raise errors.StructureError(
            f"content_metadata= would replace the value at {name!r} in the state, which is no dict "
            "of an earlier load; rename that key",
            key=name,
        )
    common[name] = content
    return replace(about, attributes={name: _attributes(content)})


def write_common(session: SaveSession, state: SplitState) -> None:
    """Compare the common values with the coordinator's. Write them, and the sharded objects."""
    sharded_strategy, common_strategy = state.strategies
    agreed = session.agreed
    if agreed.common and not session.ranks.is_coordinator:
        equal = session.options.replicas == "equal"
        mine = validation.comparable((state.plain and state.plain.compared) or {})
        validation.compare_common(mine, agreed.common, session.ranks, equal=equal)
    if common_strategy is None:
        return
    takes_objects = not sharded_strategy.can_handle_sharded_objects
    if takes_objects and not common_strategy.can_handle_sharded_objects:
        # It raises an error.
        validation.validate_sharded_objects_handling(sharded_strategy, common_strategy)
    try:
        if session.failure is None:
            called(common_strategy.save_common, state.common, session)
            if takes_objects:
                objects = {
                    str(number): shard
                    for number, shard in enumerate(state.shards)
                    if isinstance(shard, mapping.ShardedObject)
                }
                called(common_strategy.save_sharded_objects, objects, session)
    except Exception as problem:
        # Raised at the next step of all ranks, in the strategy or at the commit.
        session.failure = problem


def write_sharded(session: SaveSession, state: SplitState) -> AsyncRequest | None:
    """Write the tensors. For an asynchronous save, return the request."""
    strategy, _ = state.strategies
    method = "save" if state.background is None else "async_save"
    with_objects = strategy.can_handle_sharded_objects
    shards = {
        str(number): shard
        for number, shard in enumerate(state.shards)
        if with_objects or isinstance(shard, mapping.ShardedTensor)
    }
    return cast(AsyncRequest | None, called(getattr(strategy, method), shards, session))


def _attributes(content_metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``content_metadata`` as JSON, with the texts of values that have no JSON form."""
    kept = {}
    for name, value in content_metadata.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            kept[str(name)] = str(value)
    return kept


# -- the agreement of several ranks ----------------------------------------------------------------


def _begin_together(request: SaveRequest) -> Started:
    """Do what :func:`begin` does, for several ranks."""
    ranks, what = request.ranks, f"saving to {shown(request.checkpoint_dir)}"
    desk = _Desk(ranks)
    try:
        state, agreed = _agree(request, desk, what)
        apply_claims(state.shards, agreed.owners, ranks.rank)
        if agreed.digests is not None and state.plain is not None:
            equal = state.options.replicas == "equal"
            unite = partial(state.plain.unite, state.target.url, ranks.members, equal)
            with ranks.meet(what, unite) as meeting:
                meeting.report = state.plain.differing(agreed.digests)
        attempt = checkpoints.join(state.target, agreed.attempt_id, state.options)
        session = SaveSession(ranks, state, agreed, attempt)
    except BaseException:
        if desk.attempt is not None:
            desk.attempt.abandon()
        raise
    if not ranks.is_coordinator:
        try:
            attempt.require_seen()
        except Exception as problem:  # raised in the next step of all ranks
            session.failure = problem
    return Started(session, state)


class _Agreed(NamedTuple):
    """The split state of this rank, and the agreement of all ranks."""

    state: SplitState
    agreement: Agreement


def _agree(request: SaveRequest, desk: _Desk, what: str, *, arrays: bool = False) -> _Agreed:
    """Split the state of every rank, and agree. If the ranks hold different plain tensors, these
    become arrays, as with ``arrays``."""
    ranks = request.ranks
    with ranks.meet(what, desk.decide) as meeting:
        state = desk.state = split_state(request, arrays=arrays)
        meeting.report = _Opening.of(state, ranks)
    answer: Agreement | _Differing | None = meeting.answer
    if isinstance(answer, _Differing):
        with ranks.meet(what, desk.compare) as meeting:
            meeting.report = coverage.report_shards(
                state.shards if ranks.rank in answer.ranks else ()
            )
        answer = meeting.answer
    if answer is None:
        return _agree(request, desk, what, arrays=True)
    assert isinstance(answer, Agreement)
    return _Agreed(state, answer)


class _Opening(NamedTuple):
    """A rank's report at the beginning of a save.

    Attributes:
        place: target and base of the rank, for comparison.
        described: digest of what the rank says about its tensors and objects.
        needs_layouts: whether it has irregular or flattened tensors.
        plain: report about the values that are not sharded.
        copies: digest of the keys of which it holds only copies.
        claims: the shards that it claims, with samples if ranks compare them.
        group: report about its replica group.
    """

    place: str
    described: bytes
    needs_layouts: bool
    plain: plain.ValueReport | None
    copies: bytes
    claims: Mapping[Any, bytes]
    group: replicas.GroupReport | None

    @classmethod
    def of(cls, state: SplitState, ranks: Ranks) -> _Opening:
        """Return this rank's report."""
        compares = state.options.validate_access_integrity
        return cls(
            f"to {state.target.url} with base={state.base and state.base.url}",
            coverage.digest_of(state.shards) if compares else b"",
            bool(needing_layouts(state.shards)),
            None if state.plain is None else state.plain.report(),
            xxhash.xxh3_128_digest("\n".join(state.copies).encode()) if state.copies else b"",
            plain.samples_of(state.shards, compares=compares),
            replicas.report_group(state.tensors, state.options.replica_group),
        )


class _Differing(NamedTuple):
    """The answer if ranks describe their tensors and objects differently: the first ranks of each
    description report their shards."""

    ranks: Collection[int]


@dataclass
class _Desk:
    """What the coordinator does at the beginning of a save.

    Attributes:
        ranks: the ranks of the save.
        state: the split state of the coordinator.
        openings: the reports by rank.
        attempt: the attempt that it began.
    """

    ranks: Ranks
    state: SplitState | None = None
    openings: dict[int, _Opening] = field(default_factory=dict)
    attempt: Attempt | None = None

    def decide(self, reports: list[_Opening]) -> Agreement | _Differing | None:
        """Return the answer to the reports; ``None``: plain tensors must become arrays first."""
        self.openings = dict(zip(self.ranks.members, reports, strict=True))
        of_values = [one.plain for one in self.openings.values() if one.plain is not None]
        if plain.must_be_arrays(of_values):
            return None
        first = {one.described: rank for rank, one in reversed(self.openings.items())}
        return self._agreed() if len(first) == 1 else _Differing(set(first.values()))

    def compare(self, reports: list[coverage.ShardReport]) -> Agreement:
        """Check that the ranks describe each tensor and object alike; return the answer."""
        coverage.check_same(reports, self.ranks.members)
        return self._agreed()

    def _agreed(self) -> Agreement:
        """Check the ranks' reports, and begin an attempt."""
        state, openings = self.state, self.openings
        assert state is not None
        (first, own), *_ = openings.items()
        for rank, opening in openings.items():
            if opening.place != own.place:
                raise errors.AccessPatternError(
                    f"rank {first} saves {own.place} but rank {rank} {opening.place}; give every "
                    "rank the same place and base",
                    rank=rank,
                )
        state.target.require_shared(len(openings))
        common, digests = b"", None
        of_values = [opening.plain for opening in openings.values() if opening.plain is not None]
        if state.plain is not None and any(report.has_shards for report in of_values):
            if state.plain.compared is not None:
                common = validation.pickled(validation.comparable(state.plain.compared))
        elif state.plain is not None and len({report.values for report in of_values}) > 1:
            digests = state.plain.digests
        claimed_by = {rank: opening.claims for rank, opening in openings.items()}
        equal = state.options.replicas == "equal"
        plain.compare_samples(claimed_by, state.target.url, equal=equal)
        base = None if state.base is None else read_base(state.base)
        nodes = (node_name(shard.key) for shard in state.shards)
        self.attempt = checkpoints.begin(state.target, state.options, nodes)
        # The first rank with each set of copies.
        copy_reporters = {
            one.copies: rank for rank, one in reversed(openings.items()) if one.copies
        }
        return Agreement(
            attempt_id=self.attempt.id,
            exchange_layouts=any(opening.needs_layouts for opening in openings.values()),
            common=common,
            digests=digests,
            base_documents=base,
            shares=replicas.agree_on_groups(opening.group for opening in openings.values()),
            copy_reporters=tuple(copy_reporters.values()),
            owners=decide_claims(claimed_by),
        )
