"""The steps of a synchronous or asynchronous save on each rank: split the state, agree, write,
commit.

Every rank learns of an error on any rank before a byte is written, and again at the commit.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import xxhash

from shardstore.coverage import check_same, digest_of, not_alone, report_shards
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group
from shardstore.dtensor.adoption import adopt, dtensors_of
from shardstore.dtensor.layout import apply_claims, claimed, claims, decide_claims
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointingException,
    StructureError,
)
from shardstore.loading.context import CONTENT_METADATA_KEY
from shardstore.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    StateDict,
)
from shardstore.saving import plain, replicas
from shardstore.saving.plain import PlainValues
from shardstore.saving.session import Agreement, Part, SaveSession, Strategies
from shardstore.state_dict_utils import StateSplit, require_dict
from shardstore.storage.commit import checkpoints
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.base import read_base
from shardstore.storage.commit.publish import About
from shardstore.storage.options import SaveOptions, require_bool
from shardstore.storage.runtime.collector import collector_paused
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.async_utils import AsyncRequest
from shardstore.strategies.base import (
    AsyncSaveShardedStrategy,
    called,
)
from shardstore.validation import (
    comparable,
    compare_common,
    pickled,
    preprocessed,
    validate_sharded_objects_handling,
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SaveRequest:
    """The arguments of a save on one rank.

    Attributes:
        ranks: the ranks of the save.
        options: returns the options of the save. Every rank raises its error.
        strategies: returns the strategies for tensors and for common values; without the latter,
            only tensors are saved. Every rank raises its error.
        background: see :class:`Part`.
        error: an error in other arguments of this rank; every rank raises it.

    :func:`shardstore.save` describes all others.
    """

    state: ShardedStateDict
    checkpoint_dir: str | Path | Location
    ranks: Ranks
    options: Callable[[], SaveOptions]
    strategies: Callable[[], Strategies]
    background: str | None = None
    preprocess: Callable[[CommonStateDict], StateDict] | None = None
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
        session, part = begin(request)
        rest: AsyncRequest | None = None
        try:
            write_common(session, part)
            rest = write_sharded(session, part)
        except Exception as problem:  # finish() raises it, on every rank
            session.failure = problem
        except BaseException:  # an interrupt; the other ranks notice that this one is gone
            session.give_up()
            raise
        if request.background is not None:
            return Begun(session, session.rest(rest))
        session.finish()
        return Begun(session, None)


def begin(request: SaveRequest) -> tuple[SaveSession, Part]:
    """Agree with all ranks to begin. Every rank calls it and waits for all others.

    Raises:
        CheckpointExistsError, StorageError: the attempt cannot begin; raised on every rank.
        AccessPatternError: the values of two ranks do not fit into one state dict.
        RanksError: another rank failed, or did not answer in time.
    """
    desk, what = _Desk(request.ranks), f"saving to {shown(request.checkpoint_dir)}"
    ranks = request.ranks
    try:
        part, agreed = _agree(request, desk, what, arrays=False)
        if agreed is None:  # the ranks hold different plain tensors, which must become arrays
            part, agreed = _agree(request, desk, what, arrays=True)
        assert agreed is not None
        apply_claims(part.shards, agreed.owners, ranks.rank)
        if agreed.digests is not None and part.plain is not None:
            equal = part.options.replicas == "equal"
            unite = partial(part.plain.unite, part.target.url, ranks.members, equal)
            ranks.step(what, partial(part.plain.differing, agreed.digests), bytes, unite)
        attempt = checkpoints.join(part.target, agreed.attempt_id, part.options)
        session = SaveSession(ranks, part, agreed, attempt)
    except BaseException:
        if desk.attempt is not None:
            desk.attempt.abandon()
        raise
    if not ranks.is_coordinator:
        try:
            attempt.require_seen()
        except Exception as problem:  # raised in the next step of all ranks
            session.failure = problem
    return session, part


def _agree(
    request: SaveRequest, desk: _Desk, what: str, *, arrays: bool
) -> tuple[Part, Agreement | None]:
    """Return this rank's part of the save, and the agreement; ``None`` if plain tensors must
    become arrays first."""
    ranks, part, said, error = request.ranks, None, b"", None
    try:
        part = desk.part = split_state(request, arrays=arrays)
        said = pickle.dumps(_Opening.of(part, ranks))
    except Exception as problem:
        error = problem
    answer = ranks.together(said, what=what, error=error, decide=desk.decide)
    assert part is not None  # else there is an error
    if isinstance(agreed := pickle.loads(answer), dict):  # the first rank of each digest
        told = part.shards if ranks.rank in agreed.values() else ()
        _, answer = ranks.step(what, partial(report_shards, told), bytes, desk.compare)
        agreed = pickle.loads(answer)
    return part, agreed


class _Opening(NamedTuple):
    """A rank's report at the beginning of a save."""

    place: str
    described: bytes
    needs_layouts: bool
    plain: plain.Report | None
    copies: bytes
    claims: bytes
    offer: replicas.Offer | None

    @classmethod
    def of(cls, part: Part, ranks: Ranks) -> _Opening:
        """Return this rank's report."""
        checks = part.options.validate_access_integrity and ranks.world_size > 1
        return cls(
            f"to {part.target.url} with base={part.base and part.base.url}",
            digest_of(part.shards) if checks else b"",
            bool(not_alone(part.tensors)),
            None if part.plain is None else part.plain.report(),
            xxhash.xxh3_128_digest("\n".join(part.copies).encode()) if part.copies else b"",
            claims(part.shards),
            replicas.offer(part.tensors, part.options.replica_group),
        )


@dataclass
class _Desk:
    """What the coordinator does at the beginning of a save.

    Attributes:
        ranks: the ranks of the save.
        part: the coordinator's part.
        openings: the reports by rank.
        attempt: the attempt that it began.
    """

    ranks: Ranks
    part: Part | None = None
    openings: dict[int, _Opening] = field(default_factory=dict)
    attempt: Attempt | None = None

    def decide(self, reports: list[bytes]) -> bytes:
        """Return the agreement; ``None`` if plain tensors must become arrays; or the first rank of
        each digest, if the ranks hold different shards."""
        self.openings = dict(zip(self.ranks.members, map(pickle.loads, reports), strict=True))
        told = [one.plain for one in self.openings.values() if one.plain is not None]
        if plain.must_be_arrays(told):
            return pickle.dumps(None)
        first = {one.described: rank for rank, one in reversed(self.openings.items())}
        return pickle.dumps(self._agreed() if len(first) == 1 else first)

    def compare(self, reports: list[bytes]) -> bytes:
        """Check that the ranks describe each tensor and object alike; return the agreement."""
        check_same(reports, self.ranks.members)
        return pickle.dumps(self._agreed())

    def _agreed(self) -> Agreement:
        """Check the ranks' reports, and begin an attempt."""
        part = self.part
        assert part is not None
        (first, own), *_ = self.openings.items()
        for rank, opening in self.openings.items():
            if opening.place != own.place:
                raise AccessPatternError(
                    f"rank {first} saves {own.place} but rank {rank} {opening.place}; give every "
                    "rank the same place and base",
                    rank=rank,
                )
        part.target.require_shared(len(self.openings))
        common, digests = b"", None
        told = [opening.plain for opening in self.openings.values() if opening.plain is not None]
        if part.plain is not None and any(report.has_shards for report in told):
            if part.plain.compared is not None:
                common = pickled(comparable(part.plain.compared))
        elif part.plain is not None and len({report.values for report in told}) > 1:
            digests = part.plain.digests
        base = None if part.base is None else read_base(part.base)
        self.attempt = checkpoints.begin(part.target, part.options)
        # The first rank with each set of copies.
        tellers = {one.copies: rank for rank, one in reversed(self.openings.items()) if one.copies}
        return Agreement(
            self.attempt.id,
            any(opening.needs_layouts for opening in self.openings.values()),
            common,
            digests,
            base,
            replicas.agree(opening.offer for opening in self.openings.values()),
            list(tellers.values()),
            decide_claims([opening.claims for opening in self.openings.values()], [*self.openings]),
        )


def split_state(request: SaveRequest, *, arrays: bool) -> Part:
    """Check the arguments, build factories, and split the state. It waits for no rank.

    Args:
        request: the arguments of this rank.
        arrays: make arrays of the plain tensors, as if there were DTensors.

    Raises:
        CheckpointingException: an argument or a value of the state is wrong.
    """
    if request.error is not None:
        raise request.error
    options, ranks = request.options(), request.ranks
    target = Location.of(request.checkpoint_dir, options.storage_options)
    base = None if options.base is None else Location.of(options.base)
    if base is not None and not base.options:
        base = Location.of(base, target.options or options.storage_options)
    require_group("replica_group", options.replica_group)
    require_bool("verify_integrity", request.verify_integrity)
    sharded_strategy, common_strategy = strategies = request.strategies()
    is_async = isinstance(sharded_strategy, AsyncSaveShardedStrategy)
    if request.background is not None and not is_async:
        raise CheckpointingException(
            f"Cannot apply async_save to non-async strategy {sharded_strategy}; leave "
            "async_sharded_save out or use another strategy"
        )
    require_dict(request.state)
    adopts = arrays or dtensors_of(request.state)
    state = adopt(request.state) if adopts else request.state
    split = StateSplit(state, loading=False, adopt=partial(claimed, frozenset(ranks.members)))
    part = Part(
        target=target,
        options=options,
        shards=[shard for _, shard in split.shards],
        common=split.common,
        strategies=strategies,
        about=_about(request.content_metadata, split, strategies),
        base=base,
        background=request.background,
        verify_integrity=request.verify_integrity,
    )
    if common_strategy is not None and (key := common_strategy.object_key) is not None:
        number = ranks.members.index(ranks.rank)
        part.shards.append(ShardedObject(key, part.common, (1,), (0,), replica_id=number))
    if checks := options.validate_access_integrity:
        noted = getattr(common_strategy, "notes_objects", False)
        noted = noted and not sharded_strategy.can_handle_sharded_objects
        part.copies = replicas.copies_of(split.found, objects=noted)
    if ranks.world_size > 1:
        compared = preprocessed(part.common, request.preprocess) if checks else None
        part.plain = PlainValues.of(split, compared)
    return part


def _about(content: object, split: StateSplit, strategies: Strategies) -> About:
    """Return the content of the root document. Put ``content_metadata`` into the common values."""
    tensors, values = ((one.backend, one.version) if one else None for one in strategies)
    about = About(common_backend=values, sharded_backend=tensors or ("", 0))
    if content is None:
        return about
    if not isinstance(content, dict):
        raise ArgumentError(f"content_metadata={content!r:.100} must be a dict")
    name, common = CONTENT_METADATA_KEY, split.common
    is_sharded = any(path[0] == name for path, _ in split.shards)
    if is_sharded or not isinstance(common.get(name, {}), dict):
        raise StructureError(
            f"content_metadata= would replace the value at {name!r} in the state, which is no dict "
            "of an earlier load; rename that key",
            key=name,
        )
    common[name] = content
    return replace(about, attributes={name: _attributes(content)})


def write_common(session: SaveSession, part: Part) -> None:
    """Compare the common values with the coordinator's. Write them, and the sharded objects."""
    sharded_strategy, common_strategy = part.strategies
    agreed = session.agreed
    if agreed.common and not session.ranks.is_coordinator:
        equal = session.options.replicas == "equal"
        mine = comparable((part.plain and part.plain.compared) or {})
        compare_common(mine, agreed.common, session.ranks, equal=equal)
    if common_strategy is None:
        return
    takes_objects = not sharded_strategy.can_handle_sharded_objects
    if takes_objects:
        validate_sharded_objects_handling(sharded_strategy, common_strategy)
    try:
        if session.failure is None:
            called(common_strategy.save_common, part.common, session)
            if takes_objects:
                objects = (shard for shard in part.shards if isinstance(shard, ShardedObject))
                called(common_strategy.save_sharded_objects, _flat(objects), session)
    except Exception as problem:
        # Raised at the next step of all ranks, in the strategy or at the commit.
        session.failure = problem


def write_sharded(session: SaveSession, part: Part) -> AsyncRequest | None:
    """Write the tensors. For an asynchronous save, return the request."""
    strategy, _ = part.strategies
    method = "save" if part.background is None else "async_save"
    shards = part.shards if strategy.can_handle_sharded_objects else part.tensors
    return cast(AsyncRequest | None, called(getattr(strategy, method), _flat(shards), session))


def _flat(shards: Iterable[ShardedBase]) -> ShardedStateDict:
    """Return shards as a state dict for a strategy, which need not walk the caller's."""
    return {str(number): shard for number, shard in enumerate(shards)}


def _attributes(content_metadata: dict[str, Any]) -> dict[str, Any]:
    """Return ``content_metadata`` as JSON, with the texts of values that have no JSON form."""
    kept = {}
    for name, value in content_metadata.items():
        try:
            kept[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            kept[str(name)] = str(value)
    return kept
