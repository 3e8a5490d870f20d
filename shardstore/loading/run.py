"""What a load does on each rank, step by step.

Answers for the order of a load: all ranks go by the same documents, what is wrong on one rank is
met by all before tensors are read, and again after. What arguments mean is
:mod:`shardstore.serialization`'s to say; reading is the strategies' business.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch

from shardstore.core import CONFIG_FNAME
from shardstore.coverage.reports import check_reports, report_shards, shards_of_report
from shardstore.dict_utils import extract_matching_values, merge, nested_values
from shardstore.distributed.coordinator import Ranks
from shardstore.distributed.groups import raise_together, require_group
from shardstore.dtensor.adoption import Adopted, adopt_for_load, needs_adoption
from shardstore.dtensor.claims import apply_claims, claims, decide_claims
from shardstore.errors import ArgumentError
from shardstore.loading.casting import budget_of, casting
from shardstore.loading.context import handed_out, watched
from shardstore.loading.documents import digest_of, each_reads, read_documents
from shardstore.loading.metadata import place_of
from shardstore.loading.partial import with_destinations
from shardstore.loading.replicas import (
    DEFAULT_BUDGET_BYTES,
    Offer,
    Sharing,
    agree,
    offer,
    shared_reads,
    sharing_of,
)
from shardstore.mapping import ShardedObject, ShardedStateDict, StateDict, apply_factory_merges
from shardstore.progress import Meter, ProgressCallback, callback_of
from shardstore.state_dict_utils import check_state, load_preprocess
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.stores.location import Location, shown
from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy, LoadStrategyBase
from shardstore.utils import extract_sharded_base
from shardstore.validation import (
    CkptShardedMetadata,
    StrictHandling,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

__all__ = ["LoadCall", "run_load"]

logger = logging.getLogger(__name__)


T = TypeVar("T")

StoredMetadata: TypeAlias = Callable[
    [str | Path, LoadShardedStrategy, LoadCommonStrategy], CkptShardedMetadata
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadCall:
    """What one rank gives to a load.

    Attributes:
        error: what went wrong on this rank before; it is raised on every rank.

    All others are described at :func:`shardstore.load`.
    """

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None
    validate_access_integrity: bool = True
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    storage_options: Mapping[str, Any] | None = None
    map_location: str | torch.device | None = None
    replica_group: Any = None
    share_replicas: str = "auto"
    exchange_budget_bytes: int = DEFAULT_BUDGET_BYTES
    cast: bool = False
    progress: ProgressCallback | Literal["bar"] | None = None
    error: BaseException | None = None


def run_load(
    call: LoadCall, stored_metadata: StoredMetadata
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load. Called by every rank, see :func:`shardstore.load`.

    Args:
        call: what this rank gives.
        stored_metadata: tells what the checkpoint holds, where keys are compared.
    """
    return _Load(call, stored_metadata).run()


@dataclass(kw_only=True, eq=False, repr=False)
class _Matched:
    """What is to be read, held against what is stored."""

    for_tensors: LoadShardedStrategy
    for_common: LoadCommonStrategy
    common_state: StateDict
    wanted: ShardedStateDict
    missing: set[str]
    unexpected: set[str]


class _Load:
    """One rank's part in a load. What goes wrong is kept until the ranks meet: all do, each time.

    Where all ranks are of one machine, and the checkpoint on its disk, each reads the documents
    and matches them before the ranks meet for the first time, which settles it all if they found
    the same (and none of them asks what all ask for together, or brings a strategy of its own).
    Else the first meeting hands out what the coordinator read, and they meet once more before
    tensors are read; twice more than that where plain tensors or DTensors are loaded.
    """

    def __init__(self, call: LoadCall, stored_metadata: StoredMetadata) -> None:
        self.call = call
        self.stored_metadata = stored_metadata
        self.ranks = Ranks.current()
        self.error = call.error
        try:
            self.location = Location.given(call.checkpoint_dir, call.storage_options)
        except ArgumentError as problem:
            self.location = Location(shown(call.checkpoint_dir))
            self.error = call.error or problem
        self.checkpoint_dir: str | Path = call.checkpoint_dir
        self.what = f"loading {self.location.url}"
        self.mode = StrictHandling.ASSUME_OK_UNEXPECTED
        self.adopted = Adopted(call.sharded_state_dict)
        self.device: torch.device | None = None
        self.sharing: Sharing | None = None
        self.offer: Offer = None  # what this rank tells of its group
        self.wanted: ShardedStateDict = {}
        self.nonpersistent: StateDict = {}
        self.factories: StateDict = {}
        self.report = b""  # of the shards; empty where it takes the stored keys to know them
        self.matched: _Matched | None = None
        self.callback: ProgressCallback | None = None
        self.result: StateDict = {}

    def run(self) -> StateDict | tuple[StateDict, set[str], set[str]]:
        """All of it, in order."""
        started = perf_counter()
        ranks, location = self.ranks, self.location
        self._try(self._prepare)
        meter = Meter("load", location.url, self.callback)
        with watched(meter), ExitStack() as stack:
            own = self._try(partial(read_documents, location)) if self._is_early else None
            if own is not None:
                stack.enter_context(handed_out(own))
                self._try(self._match)
            said = pickle.dumps((digest_of(own), self.report, self.offer))
            answer = ranks.together(said, what=self.what, error=self.error, decide=self._decide)
            settled, documents, shards_are_known, reports, apart = pickle.loads(answer)
            if self.offer is not None and self.offer[0] in apart:
                self.sharing = None
            if not settled:
                self.matched = None  # and what it took with it
                stack.enter_context(handed_out(documents))
                if not shards_are_known:
                    reports = self._adopt()
                self._try(partial(self._match, reports))
                ranks.together(what=self.what, error=self.error)
            self._try(self._read)
            ranks.together(what=self.what, error=self.error)
        if ranks.is_coordinator:
            _log_load(location.url, meter.bytes_total, perf_counter() - started, ranks.world_size)
        if StrictHandling.requires_returning_mismatch_keys(self.mode):
            assert self.matched is not None
            return self.result, self.matched.missing, self.matched.unexpected
        return self.result

    def _try(self, step: Callable[[], T]) -> T | None:
        """Take a step, unless one has failed."""
        if self.error is None:
            try:
                return step()
            except Exception as problem:
                self.error = problem
        return None

    @property
    def _is_early(self) -> bool:
        """Whether this rank reads and matches the documents before it has heard of the others."""
        call = self.call
        ours = not isinstance(call.sharded_strategy, LoadStrategyBase) and not isinstance(
            call.common_strategy, LoadStrategyBase
        )
        known = self.report and not self._is_compared
        return bool(known and ours and each_reads(self.location, self.ranks.world_size))

    @property
    def _is_compared(self) -> bool:
        """Whether what is stored is held against what all ranks ask for together."""
        return StrictHandling.requires_global_app_metadata(self.mode)

    # -- what is asked for ---------------------------------------------------------------------

    def _prepare(self) -> None:
        call = self.call
        self.callback = callback_of(call.progress, shows=self.ranks.is_coordinator)
        require_group("replica_group", call.replica_group)
        self.checkpoint_dir = place_of(self.location).place
        check_state(call.sharded_state_dict)
        if not isinstance(call.cast, bool):
            raise ArgumentError(
                f"cast={call.cast!r:.100} must be True or False: tensors have the data types that "
                "the state dict asks for"
            )
        self.mode = parse_strict_flag(call.strict)
        self.device = _device_of(call.map_location)
        self.sharing = sharing_of(
            call.replica_group, call.share_replicas, self.location, call.exchange_budget_bytes
        )
        self.offer = offer(call.replica_group, call.share_replicas, self.sharing is not None)
        if not needs_adoption(call.sharded_state_dict):
            self._prepare_shards(call.sharded_state_dict)
            self.report = self._reported()

    def _prepare_shards(self, state_dict: ShardedStateDict) -> None:
        """Split off the non-persistent objects and the factories."""
        wanted, self.nonpersistent, self.factories = load_preprocess(state_dict)
        self.wanted = extract_sharded_base(wanted)[0]

    def _reported(self) -> bytes:
        reported = self.call.validate_access_integrity or self._is_compared
        return report_shards(nested_values(self.wanted) if reported else ())

    def _adopt(self) -> Sequence[bytes] | None:
        """Find what plain tensors and DTensors stand for, which takes the stored keys and who holds
        them. Called by every rank, also by those that hold none. Returns what :meth:`_checked`
        returned on the coordinator."""
        self._try(self._prepare_adopted)
        said = self._try(partial(claims, self.wanted)) or b""
        answer = self.ranks.together(said, what=self.what, error=self.error, decide=decide_claims)
        self._try(partial(apply_claims, self.wanted, answer))
        report = self._try(self._reported) or b""
        checked = self.ranks.together(
            report,
            what=self.what,
            error=self.error,
            decide=lambda reports: pickle.dumps(self._checked(reports)),
        )
        found: Sequence[bytes] | None = pickle.loads(checked)
        return found

    def _prepare_adopted(self) -> None:
        strategy, _ = verify_checkpoint_and_load_strategy(
            self.checkpoint_dir, self.call.sharded_strategy
        )
        self.adopted = adopt_for_load(
            self.call.sharded_state_dict,
            lambda: strategy.load_tensors_metadata(self.checkpoint_dir),
        )
        self._prepare_shards(self.adopted.state)

    # -- on the coordinator --------------------------------------------------------------------

    def _decide(self, said: list[bytes]) -> bytes:
        """Whether all is settled; the documents, if not; whether all shards are known; what
        :meth:`_checked` returned; and the groups that share nothing after all."""
        digests, reports, offers = zip(*map(pickle.loads, said), strict=True)
        apart = agree(offers, self.location.url)
        known = all(reports)
        if digests[0] is not None and known and len(set(digests)) == 1:
            return pickle.dumps((True, {}, True, self._checked(reports), apart))
        documents = read_documents(self.location)
        there = documents[self.location.url, CONFIG_FNAME] is not None
        checked = self._checked(reports) if known and there else None
        return pickle.dumps((False, documents, known, checked, apart))

    def _checked(self, reports: Sequence[bytes]) -> Sequence[bytes] | None:
        """The reports, once they passed; ``None`` where they are not compared with what is
        stored."""
        if self.call.validate_access_integrity:
            with collector_paused():
                check_reports(reports)
        return reports if self._is_compared else None

    # -- against what is stored ----------------------------------------------------------------

    def _match(self, reports: Sequence[bytes] | None = None) -> None:
        call, checkpoint_dir = self.call, self.checkpoint_dir
        for_tensors, for_common = verify_checkpoint_and_load_strategy(
            checkpoint_dir, call.sharded_strategy, call.common_strategy
        )
        common_state = for_common.load_common(checkpoint_dir)
        merge(common_state, self.nonpersistent)
        local = stored = None
        if StrictHandling.requires_explicit_ckpt_mismatch_check(self.mode):
            stored = self.stored_metadata(checkpoint_dir, for_tensors, for_common)
            local = [value.without_data() for value in nested_values(self.wanted)]
        everyone = None if reports is None else [shards_of_report(r) for r in reports]
        wanted, missing, unexpected = validate_integrity_and_strict_load(
            self.wanted, self.mode, False, local, everyone, stored
        )
        if self.device is not None:
            wanted = with_destinations(wanted, self.device)
        self.matched = _Matched(
            for_tensors=for_tensors,
            for_common=for_common,
            common_state=common_state,
            wanted=wanted,
            missing=missing,
            unexpected=unexpected,
        )

    # -- bytes ---------------------------------------------------------------------------------

    def _read(self) -> None:
        matched = self.matched
        assert matched is not None
        with casting(self.call.cast, budget_of(self.call.exchange_budget_bytes, self.location)):
            loaded = _read(
                matched.wanted,
                self.checkpoint_dir,
                matched.for_tensors,
                matched.for_common,
                self.sharing,
            )
        state = merge(matched.common_state, loaded)
        self.result = self.adopted.restore(apply_factory_merges(state, self.factories))


def _device_of(map_location: str | torch.device | None) -> torch.device | None:
    try:
        device = None if map_location is None else torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"map_location={map_location!r:.100} must be a device, as in 'cpu' or 'cuda:0', or "
            "None; without one, what is not given lies in host memory"
        ) from error
    if device is not None and device.type == "meta":
        raise ArgumentError(
            f"map_location={map_location!r} is a device without memory, where nothing can be "
            "loaded; load_tensors_metadata() tells keys, shapes and data types without it"
        )
    return device


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
