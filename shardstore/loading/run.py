"""The steps of a load on each rank.

:func:`run_load` prepares this rank's request, lets one rank read the documents for all, opens the
checkpoint, matches the request with the stored entries, reads, and assembles the state dict.
An error of any rank is raised on every rank at the end of each step, so that no tensor changes
unless every rank can read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch

from shardstore import coverage, errors, validation
from shardstore.core import CONFIG_FNAME, DCP_BACKEND, stored_config
from shardstore.dict_utils import Path as StatePath
from shardstore.dict_utils import dotted, leaves, shaped_like
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import Members, require_group
from shardstore.dtensor.adoption import Adoption
from shardstore.dtensor.layout import (
    apply_claims,
    are_adopted,
    claims,
    decide_claims,
    is_claimed,
)
from shardstore.loading.given import NOTHING, SHOWN, fill_given, value_at, warn_unloaded
from shardstore.loading.plan import require_fitting, with_destinations
from shardstore.loading.read import LoadContext, read_documents
from shardstore.loading.replicas import SHARES, ReadGroup, groups_reading_alone, read_group
from shardstore.mapping import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
)
from shardstore.progress import Meter, ProgressCallback, callback_of, log_event, metered
from shardstore.state_dict_utils import HeldShards, StateSplit, is_plain
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint, latest_save, settled
from shardstore.storage.commit.identity import warn_of_dcp
from shardstore.storage.format.names import COMMON_OBJECT, COMMON_STATE_NAME
from shardstore.storage.options import DEFAULT_BUDGET_BYTES, require_bool, require_number
from shardstore.storage.runtime.parallel import collector_paused
from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy, called
from shardstore.values.torch_dump import require_loadable

logger = logging.getLogger(__name__)

StoredMetadata: TypeAlias = Callable[
    [str | Path, LoadShardedStrategy, LoadCommonStrategy], validation.CkptShardedMetadata
]

Loaded: TypeAlias = StateDict | tuple[StateDict, set[str], set[str]]
"""The state dict; with a ``RETURN_*`` mode also the missing and the unexpected keys."""

DOCUMENTS = ("zarr.json", CONFIG_FNAME, COMMON_STATE_NAME)
"""Documents that every rank of a load needs. One rank reads them for all."""


@dataclass(kw_only=True, eq=False, repr=False)
class LoadRequest:
    """The arguments of :func:`shardstore.load` on one rank.

    Attributes:
        ranks: the ranks that load together.
        stored_metadata: returns the entries of the checkpoint, if keys are compared.
        mode: the mode for keys that do not match.
        device: device of new tensors; ``None``: the host.
        callback: what gets the progress.
        error: the error in the arguments, if there is one; every rank raises it.

    :func:`shardstore.load` describes all others.
    """

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    ranks: Ranks
    stored_metadata: StoredMetadata
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None
    validate_access_integrity: bool = True
    strict: str | validation.StrictHandling = validation.StrictHandling.ASSUME_OK_UNEXPECTED
    verify_integrity: bool = False
    storage_options: Mapping[str, Any] | None = None
    map_location: str | torch.device | None = None
    replica_group: Any = None
    share_replicas: str = "auto"
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES
    cast: bool | Literal["warn"] = False
    progress: ProgressCallback | Literal["bar"] | None = None
    mode: validation.StrictHandling = field(init=False)
    device: torch.device | None = field(init=False, default=None)
    callback: ProgressCallback | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        try:
            self.mode = validation.parse_strict_flag(self.strict)
            require_bool("validate_access_integrity", self.validate_access_integrity)
            require_bool("verify_integrity", self.verify_integrity)
            require_number("exchange_budget_bytes", self.exchange_budget_bytes)
            if self.cast not in (True, False, "warn"):
                raise errors.ArgumentError(
                    f"cast={self.cast!r:.100} must be True, False or 'warn'; the state dict names "
                    "the data types"
                )
            if self.share_replicas not in SHARES:
                raise errors.ArgumentError(
                    f"share_replicas={self.share_replicas!r} must be 'auto', 'always' or 'never'"
                )
            if self.map_location is not None:
                self.device = _device(self.map_location)
            if type(torch.empty(0, device="cpu")) is not torch.Tensor:
                raise errors.ArgumentError(
                    "a mode of torch is active, such as FakeTensorMode, whose tensors have no "
                    "values: load outside of it. shardstore.open() gives shapes and data types"
                )
            if self.replica_group is not None:
                require_group("replica_group", self.replica_group)
            if self.progress is not None:
                self.callback = callback_of(self.progress, shows=self.ranks.is_coordinator)
        except Exception as error:  # every rank raises it
            self.error = error

    @property
    def compares_all(self) -> bool:
        """Whether the stored keys are compared with the keys of all ranks together."""
        return validation.StrictHandling.requires_global_app_metadata(self.mode)


def _device(map_location: str | torch.device) -> torch.device:
    """Return the device of new tensors. Raise :class:`ArgumentError` if there is no such device, or
    it has no memory."""
    try:
        device = torch.device(map_location)
        torch.empty(0, device=device)  # is it there?
    except (RuntimeError, TypeError, AssertionError) as error:
        raise errors.ArgumentError(
            f"map_location={map_location!r:.100} must be a device, as in 'cpu' or 'cuda:0', or "
            f"None; without one, new tensors are in host memory ({error})"
        ) from error
    if device.type == "meta":
        raise errors.ArgumentError(
            f"map_location={map_location!r} is a device without memory; "
            "load_tensors_metadata() returns keys, shapes and data types without loading"
        )
    return device


def was_replaced(ranks: Ranks, problem: Exception) -> bool:
    """Return whether a load failed because the checkpoint was replaced in the meantime, so that
    another load may succeed, and log it. Every rank calls it with its own error, and waits for all
    others."""
    texts: list[str] = []
    with suppress(Exception):  # a rank was lost
        if not ranks.is_broken:
            texts = causes(ranks, problem, (ReplacedError,), what="comparing errors of a load")
    if texts:
        logger.warning("%s; loading what is there now", problem)
    return bool(texts)


def causes(
    ranks: Ranks, problem: Exception, kinds: tuple[type[Exception], ...], what: str
) -> list[str]:
    """Return the first different texts of the ranks' errors if all are of these kinds, or say that
    another rank failed; else an empty list.

    Every rank calls it with its own error, and waits for all others.

    Args:
        ranks: the ranks that failed together.
        problem: the error of this rank.
        kinds: the expected classes of errors.
        what: the operation, for error texts.
    """
    others = "" if isinstance(problem, errors.RanksError) else None
    text = str(problem) if isinstance(problem, kinds) else others

    def decide(reports: list[str | None]) -> list[str]:
        given = dict.fromkeys(reports)
        return [] if None in given else [text for text in given if text][:SHOWN]

    found: list[str] = ranks.together(text, what=what, decide=decide)
    return found


def run_load(request: LoadRequest) -> Loaded:
    """Load a checkpoint. Every rank calls it and waits for all others, see :func:`shardstore.load`.

    Args:
        request: the arguments of this rank.

    Raises:
        ReplacedError: the checkpoint was replaced in the meantime, see :func:`was_replaced`.
    """
    started, ranks = perf_counter(), request.ranks
    location: Location
    try:
        location = Location.of(request.checkpoint_dir, request.storage_options)
    except Exception as problem:  # every rank raises it
        location = LocalFolder(shown(request.checkpoint_dir))
        request.error = request.error or problem
    if latest_save and request.error is None:
        settled(location)
    what = f"loading {location.url}"
    with metered("load", location.url, request.callback) as meter, collector_paused():
        opened = open_checkpoint(request, location, meter)
        context = opened.context
        try:
            if opened.requested is None:
                opened = _adopted(request, opened)
            with ranks.meet(what), context.stored.unless_replaced():
                matched = match_keys(request, opened)
            with ranks.meet(what), context.stored.unless_replaced():
                loaded = read_matched(context, matched)
        except errors.CheckpointingException as problem:
            _name_as_dcp_does(context, problem)
            raise
        is_adopted = are_adopted(matched.wanted.found)
        fill_given(matched.from_common, opened.adoption.left if is_adopted else {}, loaded, context)
        loaded = cast(StateDict, shaped_like(request.sharded_state_dict, loaded))
        # Without adopted tensors keys are no paths, and the other modes compare them.
        if is_adopted and request.mode is validation.StrictHandling.ASSUME_OK_UNEXPECTED:
            arrays = partial(called, matched.for_tensors.load_tensors_metadata, context)
            url, rank = location.url, ranks.rank
            warn_unloaded(matched.wanted, opened.adoption, loaded, arrays, url, rank)
    if ranks.is_coordinator:
        warn_of_dcp(location)
        url, size, seconds = location.url, meter.now.bytes_total, perf_counter() - started
        text = f"{url}: loaded, {size} bytes on rank {ranks.rank} in {seconds:.3f} s"
        world = ranks.world_size
        log_event(logger, "load", text, url=url, bytes=size, seconds=seconds, world_size=world)
    if validation.StrictHandling.requires_returning_mismatch_keys(request.mode):
        return loaded, matched.missing, matched.unexpected
    return loaded


def _name_as_dcp_does(context: LoadContext, error: errors.CheckpointingException) -> None:
    """Make an error of a load from DCP's own files DCP's error too, as Megatron-Core raises it."""
    with suppress(errors.CheckpointingException):
        config = stored_config(context.stored)
        if config is not None and config.sharded_backend == DCP_BACKEND:
            error.__class__ = errors.kind_of_dcp(type(error))  # type: ignore[arg-type]


# -- the checkpoint, and what is wanted ------------------------------------------------------------


class OpenedLoad(NamedTuple):
    """An opened checkpoint, and what this rank wants of it.

    Attributes:
        context: the context of the load.
        adoption: makes sharded tensors of DTensors and plain tensors.
        wanted: the parts of the state dict.
        needs_keys: whether the stored keys say which of its plain tensors are arrays.
        common: the stored common values, if they were loaded to say so.
        requested: the keys of all ranks, if a rank compares them with the stored keys; ``None`` if
            a rank needs the stored keys first.
    """

    context: LoadContext
    adoption: Adoption
    wanted: StateSplit
    needs_keys: bool
    requested: set[str] | None
    common: StateDict | None = None


class _Answer(NamedTuple):
    """The coordinator's answer at the beginning of a load.

    Attributes:
        url: the checkpoint.
        documents: those of its documents that every rank needs.
        requested: see :class:`OpenedLoad`.
        reading_alone: the groups that do not share their reading.
    """

    url: str
    documents: dict[str, bytes | None]
    requested: set[str] | None
    reading_alone: frozenset[Members] = frozenset()


def open_checkpoint(request: LoadRequest, location: Location, meter: Meter) -> OpenedLoad:
    """Let one rank read the documents of the checkpoint for all, and check what all ranks want.
    Every rank calls it and waits for all others.

    Args:
        request: the arguments of this rank.
        location: the checkpoint.
        meter: counts the read bytes.
    """
    ranks, state, group = request.ranks, request.sharded_state_dict, None
    adoption = Adoption(frozenset(ranks.members), loading=True)
    decision, is_alone = _Decision(request, location), ranks.world_size == 1
    decide = (lambda _: None) if is_alone else decision.make
    with ranks.meet(f"loading {location.url}", decide, _joined) as meeting:
        if request.error is not None:
            raise request.error
        wanted = StateSplit(state, loading=True, adopt=adoption)
        needs_keys = bool(adoption.left) and (adoption.has_distributed or are_adopted(wanted.found))
        if not wanted.has_shards:
            others = {dotted(at): one for at, one in wanted.others}
            require_loadable(others, "the value", refuse_meta=False)
        if request.replica_group is not None:
            group = read_group(request.replica_group, request.share_replicas, location)
        if not is_alone:
            meeting.report = _report(request, wanted, group, needs_keys)
    if is_alone:
        stored = read_documents(location, DOCUMENTS, verify_integrity=request.verify_integrity)
        requested = None if needs_keys else _requested(request, wanted, stored)
    else:
        answer: _Answer = meeting.answer
        # A rank with another place than the coordinator's reads its documents itself.
        documents = answer.documents if answer.url == location.url else {}
        stored = decision.stored or StoredCheckpoint(location, documents=documents)
        requested = answer.requested
        if group is not None and group.members in answer.reading_alone:
            group = None
    context = LoadContext(
        stored=stored,
        cast=request.cast,
        budget_bytes=request.exchange_budget_bytes,
        group=request.replica_group if group is not None and group.shares else None,
        meter=meter,
    )
    return OpenedLoad(context, adoption, wanted, needs_keys, requested)


def _requested(request: LoadRequest, wanted: StateSplit, stored: StoredCheckpoint) -> set[str]:
    """Do for one rank alone what :meth:`_Decision.make` does: check its shards, and return their
    keys."""
    shards = [shard for _, shard in wanted.shards]
    is_checked = request.validate_access_integrity and stored.documents[CONFIG_FNAME] is not None
    if is_checked and not coverage.are_whole(shards):
        coverage.check_reports([coverage.report_shards(shards)], range(1))
    return {shard.key for shard in shards}


# -- the agreement of several ranks ----------------------------------------------------------------


class _Report(NamedTuple):
    """The report of one or more ranks about their requests.

    Attributes:
        shards: report of the shards, without shards if none are compared; ``None`` if those of a
            rank are not known yet.
        has_empty: whether a rank's state dict has empty dicts or lists, and keys are known.
        groups: reports about groups that share the reading.
    """

    shards: coverage.ShardReport | None
    has_empty: bool
    groups: Sequence[ReadGroup | None] = ()


def _report(
    request: LoadRequest,
    wanted: StateSplit,
    group: ReadGroup | None = None,
    needs_keys: bool = False,
    *,
    is_final: bool = False,
) -> _Report:
    """Return this rank's report."""
    compared = request.validate_access_integrity or request.compares_all
    has_empty = compared and any(wanted.empty)
    groups = () if is_final else (group,)
    shards = [shard for _, shard in wanted.shards]
    if not is_final and (needs_keys or any(map(is_claimed, shards))):
        return _Report(None, has_empty, groups)
    return _Report(coverage.report_shards(shards if compared else ()), has_empty, groups)


def _joined(reports: Sequence[_Report]) -> _Report:
    """Join the reports of several ranks into one."""
    shards = [report.shards for report in reports if report.shards is not None]
    return _Report(
        coverage.join_reports(shards) if len(shards) == len(reports) else None,
        any(report.has_empty for report in reports),
        [one for report in reports for one in report.groups],
    )


@dataclass
class _Decision:
    """What the coordinator does for all ranks at the beginning of a load.

    Attributes:
        request: the arguments of this rank.
        location: the checkpoint.
        stored: the opened checkpoint, on the coordinator.
    """

    request: LoadRequest
    location: Location
    stored: StoredCheckpoint | None = None

    def make(self, reports: Sequence[_Report]) -> _Answer:
        """Read the documents, and check the requests of all ranks. The coordinator calls it."""
        request, location = self.request, self.location
        groups = (one for report in reports for one in report.groups)
        members = request.ranks.members
        alone = groups_reading_alone(dict(zip(members, groups, strict=True)), location.url)
        stored = read_documents(location, DOCUMENTS, verify_integrity=request.verify_integrity)
        self.stored, requested = stored, None
        if all(report.shards is not None for report in reports):
            has_config = stored.documents[CONFIG_FNAME] is not None
            requested = _checked(request, reports) if has_config else set[str]()
        return _Answer(location.url, stored.documents, requested, alone)


def _checked(request: LoadRequest, reports: Sequence[_Report]) -> set[str]:
    """Check that the main replicas of all ranks cover each tensor once.

    Returns:
        The keys of all ranks if a rank compares them with the stored keys, else an empty set.
    """
    shards = [report.shards for report in reports if report.shards is not None]
    if request.validate_access_integrity:
        coverage.check_reports(shards, request.ranks.members)
    compares = request.compares_all or any(report.has_empty for report in reports)
    return coverage.keys_of(shards) if compares else set()


def _adopted(request: LoadRequest, opened: OpenedLoad) -> OpenedLoad:
    """Find the stored arrays of plain tensors and DTensors on every rank, and check the shards of
    all ranks."""
    ranks, context, wanted = request.ranks, opened.context, opened.wanted
    what = f"loading {context.stored.location.url}"

    def owners(claimed: list[Any]) -> Any:
        return decide_claims(dict(zip(ranks.members, claimed, strict=True)))

    with ranks.meet(what, owners) as meeting, context.stored.unless_replaced():
        strategy, for_common = validation.verify_checkpoint_and_load_strategy(
            context.stored, request.sharded_strategy, request.common_strategy
        )
        common, adoption = None, opened.adoption
        if opened.needs_keys:
            adoption.arrays = {*called(strategy.load_tensors_metadata, context)}
            if are_adopted(wanted.found):  # a tensor that is stored nowhere is a missing array
                common = called(for_common.load_common, context)
                left = (path for path in adoption.left if value_at(common, path) is NOTHING)
                adoption.arrays |= {*map(dotted, left)}
            adoption.left = {}
            wanted = StateSplit(request.sharded_state_dict, loading=True, adopt=adoption)
        shards = [shard for _, shard in wanted.shards]
        meeting.report = claims(shards)
    apply_claims(shards, meeting.answer, ranks.rank)
    with ranks.meet(what, partial(_checked, request), _joined) as meeting:
        meeting.report = _report(request, wanted, is_final=True)
    return opened._replace(wanted=wanted, requested=meeting.answer, common=common)


# -- comparison with the checkpoint ----------------------------------------------------------------


def _require_nothing_below(empty: Iterable[StatePath], left: set[str], url: str) -> None:
    """Raise an error if arrays that no rank asks for (``left``) are stored below an empty dict or
    list. Common values there are loaded, but an array needs a layout."""
    for name in map(dotted, filter(None, empty)):
        if found := sorted(key for key in left if f"{key}.".startswith(f"{name}.")):
            raise errors.MissingKeyError(
                f"the state dict is empty at {name!r}, where {url} has {len(found)} array(s), "
                f"such as {found[0]!r}; an empty dict or list does not say under which layout to "
                "load them. Make the tensors first (an optimizer's by "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or leave "
                f"{name!r} out of the state dict",
                key=found[0],
                url=url,
            )


class Matched(NamedTuple):
    """A request that was compared with the stored entries.

    Attributes:
        wanted: what is loaded.
        items: its tensors and objects by number, with destinations.
        common: the stored common values.
        for_tensors, for_common: the strategies.
        missing, unexpected: the keys that do not match.
        from_common: path -> a DTensor that is stored as a common value.
    """

    wanted: StateSplit
    items: ShardedStateDict
    common: StateDict
    for_tensors: LoadShardedStrategy
    for_common: LoadCommonStrategy
    missing: set[str]
    unexpected: set[str]
    from_common: Mapping[StatePath, HeldShards]


def match_keys(request: LoadRequest, opened: OpenedLoad) -> Matched:
    """Compare the request, and the keys that all ranks ask for, with the stored entries, in the
    mode of ``strict``."""
    context, wanted, requested = opened.context, opened.wanted, opened.requested or set()
    for_tensors, for_common = validation.verify_checkpoint_and_load_strategy(
        context.stored, request.sharded_strategy, request.common_strategy
    )
    common = opened.common
    if common is None:
        common = called(for_common.load_common, context)
    state, adoption = request.sharded_state_dict, opened.adoption
    held = {at: one for at, one in adoption.held.items() if is_plain(value_at(common, at))}
    if held:
        url = context.stored.location.url
        arrays = called(for_tensors.load_tensors_metadata, context)
        held = {at: one for at, one in held.items() if dotted(at) not in arrays}
        for at, one in held.items():
            require_fitting(one.shards, value_at(common, at), url, context.cast)
        keys = {item.key for _, item in wanted.shards} | {*map(dotted, adoption.held)}
        keys -= {*map(dotted, held)}
        wanted = StateSplit(state, loading=True, adopt=adoption, keys=keys)
    items: ShardedStateDict = {str(number): one for number, (_, one) in enumerate(wanted.shards)}
    missing, unexpected = set[str](), set[str]()
    if request.mode is not validation.StrictHandling.ASSUME_OK_UNEXPECTED:
        found = called(
            lambda place: request.stored_metadata(place, for_tensors, for_common).values(), context
        )
        stored = {item.key for item in found} - {COMMON_OBJECT}
        kept, missing, unexpected = validation.compare_keys(items, request.mode, requested, stored)
        # With DTensors of which this rank holds nothing.
        named = {*map(dotted, adoption.held.keys() - held.keys())}
        if kept is not items or named - stored:
            keys = {item.key for item in kept.values()} | named & stored
            wanted = StateSplit(state, loading=True, adopt=adoption, keys=keys)
            items = {str(number): one for number, (_, one) in enumerate(wanted.shards)}
    elif any(wanted.empty) and request.validate_access_integrity:
        arrays = called(for_tensors.load_tensors_metadata, context)
        _require_nothing_below(wanted.empty, {*arrays} - requested, context.stored.location.url)
    if request.device is not None:
        items = with_destinations(items, request.device)
    return Matched(wanted, items, common, for_tensors, for_common, missing, unexpected, held)


def read_matched(context: LoadContext, matched: Matched) -> StateDict:
    """Read sharded objects, then tensors; the ranks of a group may share the tensors' reading.
    Merge them with common values, non-persistent objects and factories."""
    tensors, loaded = matched.items, dict[str, Any]()
    # Objects come first, so that no rank waits in the exchange for a rank that failed to load them.
    with context.together():
        if not matched.for_tensors.can_handle_sharded_objects:
            if not matched.for_common.can_handle_sharded_objects:
                validation.validate_sharded_objects_handling(
                    matched.for_tensors, matched.for_common
                )
            objects = {n: one for n, one in tensors.items() if isinstance(one, ShardedObject)}
            tensors = {n: one for n, one in tensors.items() if n not in objects}
            loaded = called(matched.for_common.load_sharded_objects, objects, context)
    try:
        loaded = {**loaded, **called(matched.for_tensors.load, tensors, context)}
    except errors.MissingKeyError as error:
        raise _explained(error, matched.common, context.stored.location.url) from None
    return matched.wanted.merged(matched.common, loaded)


def _explained(
    error: errors.MissingKeyError, common: StateDict, url: str
) -> errors.MissingKeyError:
    """Return the error for an array that is missing: another one if a common value has its name, or
    a similar one."""
    tensors = {dotted(at): at for at, one in leaves(common) if isinstance(one, torch.Tensor)}
    if (at := tensors.get(error.key or "")) is None:
        close = get_close_matches(error.key or "", tensors, n=SHOWN)
        text = f"{error}; among its common values are the tensors {close}"
        return errors.MissingKeyError(text, key=error.key, url=url) if close else error
    is_in_tuple = value_at(common, at) is NOTHING
    return errors.MissingKeyError(
        f"key {error.key!r} is a common value in {url}, and no array, because it was saved "
        f"as a plain tensor{' in a tuple' * is_in_tuple}: give the load a plain tensor "
        f"{'in a tuple' if is_in_tuple else 'or a DTensor'}, without shard() and ShardedTensor",
        key=error.key,
        url=url,
    )
