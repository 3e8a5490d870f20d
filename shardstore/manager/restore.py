"""Restores the newest undamaged step; all ranks load the same step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    NotACheckpointError,
    RanksError,
)
from shardstore.inspection.verify import Finding, verify
from shardstore.manager.steps import StepInfo, Steps, branches, logger, number_of
from shardstore.mapping import ShardedStateDict
from shardstore.progress import ProgressArgument, ProgressCallback, callback_of
from shardstore.serialization import load
from shardstore.state_dict_utils import check_state
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.options import require_bool
from shardstore.storage.stores.location import Location

SHOWN = 3
"""Number of findings that a text names."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored step.

    Attributes:
        step: number of the step.
        state: result of :func:`shardstore.load`.
        url: URL of the checkpoint.
        damaged: newer, damaged steps that were skipped, newest first.
    """

    step: int
    state: Any
    url: str
    damaged: tuple[int, ...] = ()


def restore_step(
    steps: Steps,
    state: ShardedStateDict,
    wanted: int | None,
    *,
    verify_first: bool,
    discard_later: bool,
    progress: ProgressArgument,
    options: Mapping[str, Any],
) -> Restored | None:
    """Do what :meth:`CheckpointManager.restore` describes. Every rank calls it."""
    ranks, what = Ranks.current(), f"restoring from {steps.root.url}"
    error: BaseException | None = None
    callback: ProgressCallback | None = None
    try:
        check_state(state)
        require_bool("verify_first", verify_first)
        require_bool("discard_later", discard_later)
        callback = callback_of(progress, shows=ranks.is_coordinator)
        wanted = None if wanted is None else number_of(wanted)
    except (TypeError, ValueError) as problem:
        error = problem
    check = partial(_damage_of, callback=callback) if verify_first else lambda _: None
    damaged: dict[int, str] = {}
    infos: dict[int, StepInfo] = {}  # all steps, on rank 0
    found: dict[int, str] = {}  # damaged steps that rank 0 passed since the last decision
    tried = _candidates(steps, infos, wanted, check, found)

    def decide(_: list[bytes]) -> bytes:
        found.clear()
        chosen = next(tried, None)
        if chosen is None and (known := {**damaged, **found}):
            texts = "; ".join(f"step {step}: {known[step]}" for step in list(known)[:SHOWN])
            raise DamagedCheckpointError(
                f"no restorable checkpoint below {steps.root.url}: every step is damaged "
                f"({texts}). Verify older copies, or pass a different root to start over",
                url=steps.root.url,
            )
        if chosen is None and wanted is not None:
            raise NotACheckpointError(
                f"there is no step {wanted} below {steps.root.url}; existing steps: "
                f"{', '.join(map(str, infos)) or 'none'}",
                url=steps.url(wanted),
            )
        return json.dumps([chosen, list(found.items()), bool(discard_later)]).encode()

    def skip(number: int, text: str) -> None:
        damaged[number] = text
        steps.damaged.add(number)
        text = f"step {number} below {steps.root.url} is damaged and is skipped: {text}"
        steps.log("damaged", number, text, logging.WARNING)

    with closing(tried):
        while True:
            answer = ranks.together(what=what, error=error, decide=decide)
            chosen, passed, discards = json.loads(answer)
            for number, text in passed:
                skip(number, text)
            if chosen is None:
                return None
            place = steps.place(chosen)
            try:
                loaded = load(state, place.place, progress=callback, **options)
                break
            except Exception as problem:
                if wanted is not None or ranks.is_broken:
                    raise
                text = _agree_on_damage(ranks, place, problem, what)
                if text is None:
                    raise
                skip(chosen, text)
    if discards:
        _discard_later_steps(ranks, steps, infos, chosen)
    elif ranks.is_coordinator:
        there = {step: info for step, info in infos.items() if step not in damaged}
        _warn_of_later_steps(steps, there, chosen)
    return Restored(chosen, loaded, place.url, tuple(damaged))


def _candidates(
    steps: Steps,
    infos: dict[int, StepInfo],
    wanted: int | None,
    check: Callable[[Location], str | None],
    found: dict[int, str],
) -> Generator[int, None, None]:
    """Yield the steps to load, on rank 0: only ``wanted``, or all of them, the newest first (see
    :func:`~shardstore.manager.steps.branches`). A step is not deleted until the next is requested.

    Args:
        steps: the steps of the run.
        infos: receives the descriptions of all steps.
        wanted: number of the only step to consider.
        check: verifies a step; returns a text of its damage.
        found: receives the steps that are damaged by ``check``, with texts.
    """
    infos.update(steps.infos())
    current, abandoned = branches(infos)
    for step in [*reversed(current), *reversed(abandoned)] if wanted is None else [wanted]:
        with steps.using([step]):
            if step not in infos or not is_checkpoint(steps.place(step)):
                continue  # deleted since it was listed
            if (text := check(steps.place(step))) is None:
                yield step
            else:
                found[step] = text


def _agree_on_damage(ranks: Ranks, place: Location, problem: Exception, what: str) -> str | None:
    """Return a text of the damage if damage is the only cause of a failed load, else ``None``.

    Every rank calls it with its error of the load, and waits for all others. It returns the same
    text on every rank.

    Args:
        ranks: all ranks.
        place: the checkpoint that they tried to load.
        problem: error of the load on this rank.
        what: the operation, for error texts.
    """
    if isinstance(problem, LookupError | TypeError | ValueError):
        # A flipped bit in a root document without a checksum may change a key, shape or type.
        try:
            StoredCheckpoint(place).check_root()
        except (DamagedCheckpointError, NotACheckpointError) as error:
            problem = error
        except CheckpointingException:
            pass  # the check failed too; the error of the load counts
    text: str | None = None  # the load failed for another reason than damage
    if isinstance(problem, DamagedCheckpointError | NotACheckpointError):
        text = str(problem)
    elif isinstance(problem, RanksError):
        text = ""

    def decide(reports: list[bytes]) -> bytes:
        told = dict.fromkeys(json.loads(report) for report in reports)
        texts = [] if None in told else [text for text in told if text]
        return json.dumps("; ".join(texts[:SHOWN]) or None).encode()

    report = json.dumps(text).encode()
    answer: str | None = json.loads(ranks.together(report, what=what, decide=decide))
    return answer


def _damage_of(place: Location, callback: ProgressCallback | None) -> str | None:
    """Verify a checkpoint and return a text of its damage, ``None`` if there is none."""
    findings: list[Finding] = []
    try:
        verify(StoredCheckpoint(place), findings.append, progress=callback)
    except (DamagedCheckpointError, NotACheckpointError) as error:
        return str(error)
    texts = [finding.message for finding in findings if finding.severity == "damage"]
    if not texts:
        return None
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more


def _warn_of_later_steps(steps: Steps, infos: Mapping[int, StepInfo], chosen: int) -> None:
    """Log a warning about steps with higher numbers than the restored one. Rank 0 calls it."""
    later = [step for step in infos if step > chosen]
    if not later:
        return
    latest = branches(infos)[0][-1]
    resumes = f"Until a step is saved, a restore without a step loads step {latest}. "
    steps.log(
        "later_steps",
        chosen,
        f"restored step {chosen}; later steps exist below {steps.root.url}: "
        f"{', '.join(map(str, later))}. {'' if latest == chosen else resumes}"
        "Saving one of their numbers again needs overwrite=True. "
        f"restore(..., step={chosen}, discard_later=True) deletes them",
        logging.WARNING,
        later=later,
        url=steps.root.url,
    )


def _discard_later_steps(
    ranks: Ranks, steps: Steps, infos: Mapping[int, StepInfo], chosen: int
) -> None:
    """Delete the managed steps with higher numbers, on rank 0. Every rank calls it and waits."""

    def work(_: list[bytes]) -> bytes:
        kept = []
        later = (step for step in infos if step > chosen)
        for step in sorted(later, reverse=True):  # the highest first, so that no gap is left
            if not infos[step].managed or not steps.delete(step):
                kept.append(step)
                continue
            text = f"deleted step {step}, later than the restored step {chosen}: {steps.url(step)}"
            steps.log("delete", step, text, logging.WARNING)
        if kept:
            logger.warning("steps %s stay: no manager saved them, or they are in use", kept)
        return b""

    ranks.together(what=f"deleting the steps after {chosen} below {steps.root.url}", decide=work)
