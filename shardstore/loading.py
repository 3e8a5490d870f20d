"""What a load does on each rank, step by step.

Answers for the order of a load: one rank reads the documents for all, what is wrong on one rank is
met by all before tensors are read, and again after. What arguments mean is
:mod:`shardstore.serialization`'s to say; reading is the strategies' business.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeAlias, cast

import torch

from shardstore.claims import apply_claims, claims, decide_claims
from shardstore.core import CONFIG_FNAME
from shardstore.dict_utils import extract_matching_values, merge, nested_values
from shardstore.dtensor import Adopted, adopt_for_load, needs_adoption
from shardstore.errors import ArgumentError
from shardstore.mapping import ShardedObject, ShardedStateDict, StateDict, apply_factory_merges
from shardstore.one_rank import place_of
from shardstore.process_groups import raise_together, require_group
from shardstore.progress import Meter, ProgressCallback, callback_of
from shardstore.ranks import Ranks
from shardstore.shard_reports import check_reports, report_shards, shards_of_report
from shardstore.state_dict_utils import check_state, load_preprocess
from shardstore.storage.collector import collector_paused
from shardstore.storage.location import Location
from shardstore.storage.parallel import run_together
from shardstore.storage.places import shown
from shardstore.strategies.base import LoadCommonStrategy, LoadShardedStrategy
from shardstore.strategies.casting import budget_of, casting
from shardstore.strategies.common import COMMON_STATE_FNAME
from shardstore.strategies.opened import ROOT_DOCUMENT, handed_out
from shardstore.strategies.partial import with_destinations
from shardstore.strategies.shared_reads import Sharing, shared_reads, sharing_of
from shardstore.strategies.watched import watched
from shardstore.strictness import CkptShardedMetadata, StrictHandling, parse_strict_flag
from shardstore.utils import extract_sharded_base
from shardstore.validation import (
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)

__all__ = ["LoadCall", "run_load"]

logger = logging.getLogger(__name__)


StoredMetadata: TypeAlias = Callable[
    [str | Path, LoadShardedStrategy, LoadCommonStrategy], CkptShardedMetadata
]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadCall:
    """What one rank gives to a load, as described at :func:`shardstore.load`."""

    sharded_state_dict: ShardedStateDict
    checkpoint_dir: str | Path
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None
    common_strategy: LoadCommonStrategy | tuple[str, int] | None
    validate_access_integrity: bool
    strict: str | StrictHandling
    storage_options: Mapping[str, Any] | None
    map_location: str | torch.device | None
    replica_group: Any
    share_replicas: str
    exchange_budget_bytes: int
    cast: bool
    progress: ProgressCallback | Literal["bar"] | None


def run_load(
    call: LoadCall, stored_metadata: StoredMetadata
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load. Called by every rank, see :func:`shardstore.load`.

    Args:
        call: what this rank gives.
        stored_metadata: tells what the checkpoint holds, where keys are compared.
    """
    ranks = Ranks.current()
    error: BaseException | None = None
    try:
        location = Location.given(call.checkpoint_dir, call.storage_options)
    except ArgumentError as problem:
        location, error = Location(shown(call.checkpoint_dir)), problem
    what = f"loading {location.url}"
    report = b""
    mode = StrictHandling.ASSUME_OK_UNEXPECTED
    wanted: ShardedStateDict = {}
    checkpoint_dir: str | Path = call.checkpoint_dir
    adopted = Adopted(call.sharded_state_dict)
    reported = compared = False
    started = perf_counter()
    callback: ProgressCallback | None = None
    try:
        callback = callback_of(call.progress, shows=ranks.is_coordinator)
        require_group("replica_group", call.replica_group)
        if error is None:
            checkpoint_dir = place_of(location).place
        check_state(call.sharded_state_dict)
        if not isinstance(call.cast, bool):
            raise ArgumentError(
                f"cast={call.cast!r:.100} must be True or False: tensors have the data types that "
                "the state dict asks for"
            )
        mode = parse_strict_flag(call.strict)
        compared = StrictHandling.requires_global_app_metadata(mode)
        reported = call.validate_access_integrity or compared
        if not needs_adoption(call.sharded_state_dict):
            wanted, nonpersistent, factories = _prepared(call.sharded_state_dict)
            report = report_shards(nested_values(wanted) if reported else ())
    except Exception as problem:
        error = error or problem

    unchecked: list[list[bytes]] = []

    def check(reports: list[bytes]) -> bytes:
        if call.validate_access_integrity:
            with collector_paused():
                check_reports(reports)
        return pickle.dumps(reports if compared else None)

    def decide(reports: list[bytes]) -> bytes:
        documents = _documents_for_all(location)
        if documents[location.url, CONFIG_FNAME] is None or not all(reports):
            return pickle.dumps((documents, None))
        if compared or ranks.world_size == 1:
            return pickle.dumps((documents, check(reports)))
        unchecked.append(reports)  # the others have documents to parse meanwhile
        return pickle.dumps((documents, pickle.dumps(None)))

    answer = ranks.together(report, what=what, error=error, decide=decide)
    verdict = [_outcome(partial(check, reports)) for reports in unchecked]
    documents, checked = pickle.loads(answer)
    meter = Meter("load", location.url, callback)
    with handed_out(documents), watched(meter):
        if checked is None:
            # What plain tensors and DTensors stand for takes the stored keys, and who holds them.
            try:
                adopted = _adopted(call.sharded_state_dict, checkpoint_dir, call.sharded_strategy)
                wanted, nonpersistent, factories = _prepared(adopted.state)
                report = claims(wanted)
            except Exception as problem:
                error = problem
            answer = ranks.together(report, what=what, error=error, decide=decide_claims)
            try:
                apply_claims(wanted, answer)
                report = report_shards(nested_values(wanted) if reported else ())
            except Exception as problem:
                error = problem
            checked = ranks.together(report, what=what, error=error, decide=check)
        try:
            for_tensors, for_common = verify_checkpoint_and_load_strategy(
                checkpoint_dir, call.sharded_strategy, call.common_strategy
            )
            common_state = for_common.load_common(checkpoint_dir)
            merge(common_state, nonpersistent)
            local = stored = None
            if StrictHandling.requires_explicit_ckpt_mismatch_check(mode):
                stored = stored_metadata(checkpoint_dir, for_tensors, for_common)
                local = [v.without_data() for v in nested_values(wanted)]
            reports = pickle.loads(checked)
            everyone = None if reports is None else [shards_of_report(r) for r in reports]
            wanted, missing, unexpected = validate_integrity_and_strict_load(
                wanted, mode, False, local, everyone, stored
            )
            sharing = sharing_of(
                call.replica_group, call.share_replicas, location, call.exchange_budget_bytes
            )
            if call.map_location is not None:
                wanted = with_destinations(wanted, torch.device(call.map_location))
        except Exception as problem:
            error = problem
        ranks.together(what=what, error=error, decide=lambda _: _raised(verdict))

        try:
            with casting(call.cast, budget_of(call.exchange_budget_bytes, location)):
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


def _outcome(step: Callable[[], object]) -> Exception | None:
    """What a step raised, to be raised later."""
    try:
        step()
    except Exception as problem:
        return problem
    return None


def _raised(outcomes: Sequence[Exception | None]) -> bytes:
    """Nothing, unless one of the steps failed."""
    for problem in filter(None, outcomes):
        raise problem
    return b""


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
