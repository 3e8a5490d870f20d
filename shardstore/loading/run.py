"""The steps of a load on each rank.

:func:`run_load` prepares this rank's request, lets one rank read the documents for all, opens the
checkpoint, matches the request with the stored entries, reads, and assembles the state dict.
An error of any rank is raised on every rank at the end of each step, so that no tensor changes
unless every rank can read.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch

from shardstore.core import CONFIG_FNAME, DCP_BACKEND, stored_config
from shardstore.coverage import check_reports, join_reports, keys_of, report_shards
from shardstore.dict_utils import Path as StatePath
from shardstore.dict_utils import dict_list_map_outplace, dotted, shaped_like, united
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import require_group
from shardstore.dtensor.adoption import adopt, needs_adoption
from shardstore.dtensor.layout import apply_claims, claimed, claims, decide_claims, is_claimed
from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    MissingKeyError,
    RanksError,
    kind_of_dcp,
)
from shardstore.loading.context import LoadContext, find_strategies, read_documents
from shardstore.loading.plan import with_destinations
from shardstore.loading.replicas import Offer, agree, offer
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from shardstore.progress import Meter, ProgressCallback, callback_of, log_event, metered
from shardstore.state_dict_utils import StateSplit
from shardstore.storage.checkpoint import ReplacedError, StoredCheckpoint
from shardstore.storage.commit.inventory import check_integrity
from shardstore.storage.format.names import COMMON_OBJECT, COMMON_STATE_NAME
from shardstore.storage.options import DEFAULT_BUDGET_BYTES, require_bool, require_number
from shardstore.storage.runtime.collector import collector_paused
from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy, called
from shardstore.utils import extract_sharded_objects
from shardstore.validation import (
    CkptShardedMetadata,
    StrictHandling,
    compare_keys,
    parse_strict_flag,
    validate_sharded_objects_handling,
)
from shardstore.values.torch_values import require_loadable

logger = logging.getLogger(__name__)

StoredMetadata: TypeAlias = Callable[
    [str | Path, LoadShardedStrategy, LoadCommonStrategy], CkptShardedMetadata
]

DOCUMENTS = ("zarr.json", CONFIG_FNAME, COMMON_STATE_NAME)
"""Documents that every rank of a load needs. One rank reads them for all."""
SHOWN = 3
"""Number of errors or findings that a text names."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadCall:
    """The arguments of :func:`shardstore.load` on one rank.

    Attributes:
        stored_metadata: returns the entries of the checkpoint, if keys are compared.

    :func:`shardstore.load` describes all others.
    """

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    stored_metadata: StoredMetadata
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None
    validate_access_integrity: bool = True
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    verify_integrity: bool = False
    process_group: Any = None
    storage_options: Mapping[str, Any] | None = None
    map_location: str | torch.device | None = None
    replica_group: Any = None
    share_replicas: str = "auto"
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES
    cast: bool | Literal["warn"] = False
    progress: ProgressCallback | Literal["bar"] | None = None

    @property
    def mode(self) -> StrictHandling:
        """The mode for keys that do not match."""
        return parse_strict_flag(self.strict)

    @property
    def compares_all(self) -> bool:
        """Whether the stored keys are compared with the keys of all ranks together."""
        return StrictHandling.requires_global_app_metadata(self.mode)

    @property
    def device(self) -> torch.device | None:
        """Device of new tensors; ``None``: the host."""
        try:
            device = None if self.map_location is None else torch.device(self.map_location)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"map_location={self.map_location!r:.100} must be a device, as in 'cpu' or "
                "'cuda:0', or None; without one, new tensors are in host memory"
            ) from error
        if device is not None and device.type == "meta":
            raise ArgumentError(
                f"map_location={self.map_location!r} is a device without memory; "
                "load_tensors_metadata() returns keys, shapes and data types without loading"
            )
        return device

    def checked_offer(self, location: Location) -> Offer:
        """Check the arguments, and return this rank's report about its group."""
        require_group("replica_group", self.replica_group)
        require_bool("validate_access_integrity", self.validate_access_integrity)
        require_bool("verify_integrity", self.verify_integrity)
        require_number("exchange_budget_bytes", self.exchange_budget_bytes)
        if self.cast not in (True, False, "warn"):
            raise ArgumentError(
                f"cast={self.cast!r:.100} must be True, False or 'warn'; the state dict names the "
                "data types"
            )
        _ = self.mode, self.device
        return offer(self.replica_group, self.share_replicas, location)


class _Request(StateSplit):
    """The request of one rank.

    Attributes:
        wanted: the tensors and objects to load.
    """

    def __init__(
        self, state: ShardedStateDict, ranks: Ranks, keys: Container[str] | None = None
    ) -> None:
        adopt = partial(claimed, frozenset(ranks.members))
        super().__init__(state, loading=True, adopt=adopt, keys=keys)
        self.restricted = partial(_Request, state, ranks)
        self.wanted = [shard for _, shard in self.shards]

    @property
    def needs_stored(self) -> bool:
        """Whether the request depends on the stored arrays, or on the claims of other ranks."""
        return needs_adoption(self.others, self.found) or any(map(is_claimed, self.wanted))


def run_load(call: LoadCall) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load a checkpoint. Every rank calls it and waits for all others, see :func:`shardstore.load`.

    Args:
        call: the arguments of this rank.
    """
    ranks = Ranks.of(call.process_group)
    try:
        return _run_once(call, ranks)
    except Exception as problem:
        replaced: list[str] = []
        with suppress(Exception):  # a rank was lost
            replaced = [] if ranks.is_broken else causes(ranks, problem, (ReplacedError,), what="")
        if not replaced:
            raise
        logger.warning("%s; loading what is there now", problem)
    return _run_once(call, ranks)


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
    others = "" if isinstance(problem, RanksError) else None
    text = str(problem) if isinstance(problem, kinds) else others

    def decide(reports: list[bytes]) -> bytes:
        told = dict.fromkeys(json.loads(report) for report in reports)
        texts = [] if None in told else [text for text in told if text]
        return json.dumps(texts[:SHOWN]).encode()

    found: list[str] = json.loads(
        ranks.together(json.dumps(text).encode(), what=what, decide=decide)
    )
    return found


def _run_once(call: LoadCall, ranks: Ranks) -> StateDict | tuple[StateDict, set[str], set[str]]:
    started = perf_counter()
    location: Location = LocalFolder(shown(call.checkpoint_dir))
    callback, error = None, None
    try:
        location = Location.of(call.checkpoint_dir, call.storage_options)
        callback = callback_of(call.progress, shows=ranks.is_coordinator)
    except ArgumentError as problem:
        error = problem
    step = partial(ranks.step, f"loading {location.url}")
    with metered("load", location.url, callback) as meter, collector_paused():
        (offered, request), answer = step(
            lambda: _prepare(call, location, ranks),
            lambda prepared: pickle.dumps(_report(call, prepared[1], prepared[:1])),
            lambda said: _agree(call, location, _parsed(said), ranks),
            _joined,
            error=error,
        )
        context, asked = open_checkpoint(call, location, offered, answer, meter)
        watched = context.stored.unless_replaced()
        with _errors_of(context):
            if asked is None:
                # Every rank finds the stored arrays of its plain tensors and DTensors.
                request, owners = step(
                    watched(partial(_adopt, call, context, request, ranks)),
                    lambda adopted: claims(adopted.wanted),
                    lambda reports: decide_claims(reports, ranks.members),
                )
                apply_claims(request.wanted, owners, ranks.rank)
                _, answer = step(
                    lambda: pickle.dumps(_report(call, request, is_final=True)),
                    bytes,
                    lambda said: pickle.dumps(_checked(call, _parsed(said), ranks)),
                    _joined,
                )
                asked = pickle.loads(answer)
            matched, _ = step(watched(partial(match_keys, call, context, request, asked)))
            loaded, _ = step(watched(partial(read_matched, context, matched)))
            loaded = cast(StateDict, shaped_like(call.sharded_state_dict, loaded))
    if ranks.is_coordinator:
        seconds = perf_counter() - started
        log_event(
            logger,
            "load",
            f"{location.url}: loaded, {meter.now.bytes_total} bytes on rank {ranks.rank} "
            f"in {seconds:.3f} s",
            url=location.url,
            bytes=meter.now.bytes_total,
            seconds=seconds,
            world_size=ranks.world_size,
        )
    if StrictHandling.requires_returning_mismatch_keys(call.mode):
        return loaded, matched.missing, matched.unexpected
    return loaded


@contextmanager
def _errors_of(context: LoadContext) -> Iterator[None]:
    """Make errors of a load from DCP's own files DCP's errors too, as Megatron-Core raises them."""
    try:
        yield
    except CheckpointingException as error:
        with suppress(CheckpointingException):
            config = stored_config(context.stored)
            if config is not None and config.sharded_backend == DCP_BACKEND:
                error.__class__ = kind_of_dcp(type(error))  # type: ignore[arg-type]
        raise


def open_checkpoint(
    call: LoadCall, location: Location, offered: Offer, answer: bytes, meter: Meter
) -> tuple[LoadContext, set[str] | None]:
    """Open the checkpoint with the documents that the coordinator read.

    Args:
        call: the arguments of this rank.
        location: the checkpoint.
        offered: this rank's report about its group.
        answer: result of :func:`_agree` on the coordinator.
        meter: counts the read bytes.

    Returns:
        The context of the load, and the result of :func:`_checked`; ``None`` if a rank needs the
        stored keys first.
    """
    (url, documents), asked, apart = pickle.loads(answer)
    shares = offered is not None and offered[2] and offered[0] not in apart
    # A rank with another place than the coordinator's reads its documents itself.
    stored = StoredCheckpoint(location, documents=documents if url == location.url else {})
    context = LoadContext(
        stored=stored,
        cast=call.cast,
        budget_bytes=call.exchange_budget_bytes,
        group=call.replica_group if shares else None,
        meter=meter,
    )
    return context, asked


# -- the request -----------------------------------------------------------------------------------


def _prepare(call: LoadCall, location: Location, ranks: Ranks) -> tuple[Offer, _Request]:
    """Check the arguments, and split the state dict."""
    request = _Request(call.sharded_state_dict, ranks)
    if not request.found:
        kept = torch.Tensor | LocalNonpersistentObject
        values = dict_list_map_outplace(
            lambda v: None if isinstance(v, kept) else v, call.sharded_state_dict
        )
        require_loadable(values, "the value")
    return call.checked_offer(location), request


def _adopt(call: LoadCall, context: LoadContext, request: _Request, ranks: Ranks) -> _Request:
    """Find the stored arrays of plain tensors and DTensors."""
    strategy, _ = find_strategies(context, call.sharded_strategy)
    if not needs_adoption(request.others, request.found):
        return request
    stored = called(strategy.load_tensors_metadata, context)
    return _Request(adopt(call.sharded_state_dict, stored), ranks)


class _Report(NamedTuple):
    """The report of one or more ranks about their requests.

    Attributes:
        shards: report of the shards; no bytes if those of a rank are not known yet, and a report
            without shards if none are compared.
        has_empty: whether a rank's state dict has empty dicts or lists, and keys are known.
        offers: reports about groups that share the reading.
    """

    shards: bytes
    has_empty: bool
    offers: Sequence[Offer] = ()


def _report(
    call: LoadCall, request: _Request, offers: Sequence[Offer] = (), *, is_final: bool = False
) -> _Report:
    """Return this rank's report."""
    compared = call.validate_access_integrity or call.compares_all
    has_empty = compared and any(request.empty)
    if request.needs_stored and not is_final:
        return _Report(b"", has_empty, offers)
    return _Report(report_shards(request.wanted if compared else ()), has_empty, offers)


def _parsed(said: Sequence[bytes]) -> list[_Report]:
    return [pickle.loads(one) for one in said]


def _joined(said: Sequence[bytes]) -> bytes:
    """Join the reports of several ranks into one."""
    reports = _parsed(said)
    shards = [report.shards for report in reports]
    joined = _Report(
        join_reports(shards) if all(shards) else b"",
        any(report.has_empty for report in reports),
        [one for report in reports for one in report.offers],
    )
    return pickle.dumps(joined)


def _agree(call: LoadCall, location: Location, reports: Sequence[_Report], ranks: Ranks) -> bytes:
    """Read the documents for all ranks, and check their requests. The coordinator calls it.

    Returns:
        Pickled: the checkpoint and its documents; the result of :func:`_checked`, ``None`` if the
        shards of a rank are not known yet; the groups that do not share.
    """
    offered = (one for report in reports for one in report.offers)
    apart = agree(dict(zip(ranks.members, offered, strict=True)), location.url)
    if call.verify_integrity:
        check_integrity(location)
    documents = read_documents(location, DOCUMENTS)
    asked: set[str] | None = None
    if all(report.shards for report in reports):
        asked = _checked(call, reports, ranks) if documents[CONFIG_FNAME] is not None else set()
    return pickle.dumps(((location.url, documents), asked, apart))


def _checked(call: LoadCall, reports: Sequence[_Report], ranks: Ranks) -> set[str]:
    """Check that the main replicas of all ranks cover each tensor once.

    Returns:
        The keys of all ranks if a rank compares them with the stored keys, else an empty set.
    """
    shards = [report.shards for report in reports]
    if call.validate_access_integrity:
        check_reports(shards, ranks.members)
    compares = call.compares_all or any(report.has_empty for report in reports)
    return keys_of(shards) if compares else set()


# -- comparison with the checkpoint ----------------------------------------------------------------


def _require_nothing_below(empty: Iterable[StatePath], left: set[str], url: str) -> None:
    """Raise an error if arrays that no rank asks for (``left``) are stored below an empty dict or
    list. Common values there are loaded, but an array needs a layout."""
    for name in map(dotted, filter(None, empty)):
        if found := sorted(key for key in left if key.startswith(f"{name}.")):
            raise MissingKeyError(
                f"the state dict is empty at {name!r}, where {url} has {len(found)} array(s), "
                f"such as {found[0]!r}; an empty dict or list does not say under which layout to "
                "load them. Make the tensors first (an optimizer's by "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict), or leave "
                f"{name!r} out of the state dict",
                key=found[0],
                url=url,
            )


class _Matched(NamedTuple):
    """A request that was compared with the stored entries.

    Attributes:
        request: what is loaded.
        wanted: its tensors and objects by number, with destinations.
        common: the stored common values.
        for_tensors, for_common: the strategies.
        missing, unexpected: the keys that do not match.
    """

    request: _Request
    wanted: ShardedStateDict
    common: StateDict
    for_tensors: LoadShardedStrategy
    for_common: LoadCommonStrategy
    missing: set[str]
    unexpected: set[str]


def match_keys(
    call: LoadCall, context: LoadContext, request: _Request, asked: set[str]
) -> _Matched:
    """Compare the request, and the keys that all ranks ask for, with the stored entries, in the
    mode of ``strict``."""
    for_tensors, for_common = find_strategies(context, call.sharded_strategy, call.common_strategy)
    common = called(for_common.load_common, context)
    stored: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(call.mode):
        found = called(
            lambda place: call.stored_metadata(place, for_tensors, for_common).values(), context
        )
        stored = {item.key for item in found} - {COMMON_OBJECT}
    elif any(request.empty) and (call.validate_access_integrity or call.compares_all):
        held = called(for_tensors.load_tensors_metadata, context)
        _require_nothing_below(request.empty, {*held} - asked, context.stored.location.url)
    everything = {str(number): item for number, item in enumerate(request.wanted)}
    wanted, missing, unexpected = compare_keys(everything, call.mode, asked, stored)
    if wanted is not everything:
        request = request.restricted({item.key for item in wanted.values()})
        wanted = {str(number): item for number, item in enumerate(request.wanted)}
    if call.device is not None:
        wanted = with_destinations(wanted, call.device)
    return _Matched(request, wanted, common, for_tensors, for_common, missing, unexpected)


def read_matched(context: LoadContext, matched: _Matched) -> StateDict:
    """Read sharded objects, then tensors; the ranks of a group may share the tensors' reading.
    Merge them with common values, non-persistent objects and factories."""
    request, tensors, loaded = matched.request, matched.wanted, dict[str, Any]()
    # Objects come first, so that no rank waits in the exchange for a rank that failed to load them.
    with context.together():
        if not matched.for_tensors.can_handle_sharded_objects:
            validate_sharded_objects_handling(matched.for_tensors, matched.for_common)
            objects, tensors = extract_sharded_objects(tensors)
            loaded = called(matched.for_common.load_sharded_objects, objects, context)
    loaded = {**loaded, **called(matched.for_tensors.load, tensors, context)}
    values = {id(item): loaded[str(number)] for number, item in enumerate(request.wanted)}
    sharded = dict_list_map_outplace(lambda item: values[id(item)], request.sharded)
    state = united(united(matched.common, request.local), sharded)
    return apply_factory_merges(state, request.factories)
