"""Restores the newest undamaged step; all ranks load the same step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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
    check = partial(_damage_of, callback=callback) if verify_first else None
    damaged: dict[int, str] = {}
    infos: dict[int, StepInfo] = {}  # all steps, on rank 0
    with ExitStack() as used:  # prevents rank 0 from deleting the step during the load

        def decide(_: list[bytes]) -> bytes:
            infos.update(steps.infos())
            chosen, found = _choose(steps, infos, used, wanted, damaged, check)
            return json.dumps([chosen, list(found.items()), bool(discard_later)]).encode()

        while True:
            answer = ranks.together(what=what, error=error, decide=decide)
            chosen, found, discards = json.loads(answer)
            for number, text in found:
                _warn_of_damage(steps, number, text)
            damaged.update(found)
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
                _warn_of_damage(steps, chosen, text)
                damaged[chosen] = text
    if discards:
        _discard_later_steps(ranks, steps, infos, chosen)
    elif ranks.is_coordinator:
        there = {step: info for step, info in infos.items() if step not in damaged}
        _warn_of_later_steps(steps, there, chosen)
    return Restored(chosen, loaded, place.url, tuple(damaged))


def _choose(
    steps: Steps,
    infos: Mapping[int, StepInfo],
    used: ExitStack,
    wanted: int | None,
    damaged: Mapping[int, str],
    check: Callable[[Location], str | None] | None,
) -> tuple[int | None, dict[int, str]]:
    """Return the step to load, and the damaged steps that were skipped. Rank 0 calls it.

    Args:
        steps: the steps of the run.
        infos: descriptions of all steps.
        used: prevents the deletion of the step until it is closed.
        wanted: number of the only step to consider; ``None``: the newest, see
            :func:`~shardstore.manager.steps.branches`.
        damaged: steps that are known to be damaged, with texts.
        check: verifies a step before it is loaded; returns a text of its damage.

    Returns:
        The step, ``None`` if there are no steps; and the damaged steps that this call found.

    Raises:
        NotACheckpointError: the wanted step does not exist.
        DamagedCheckpointError: every step is damaged.
    """
    found: dict[int, str] = {}
    current, abandoned = branches(infos)
    tried = [*reversed(current), *reversed(abandoned)] if wanted is None else [wanted]
    for step in tried:
        used.close()
        if step not in infos or step in damaged:
            continue
        used.enter_context(steps.using([step]))
        if not is_checkpoint(steps.place(step)):  # deleted since it was listed
            continue
        text = None if check is None else check(steps.place(step))
        if text is None:
            return step, found
        found[step] = text
    used.close()
    if known := {**damaged, **found}:
        texts = "; ".join(f"step {step}: {known[step]}" for step in list(known)[:SHOWN])
        raise DamagedCheckpointError(
            f"no restorable checkpoint below {steps.root.url}: every step is damaged ({texts}). "
            "Verify older copies, or pass a different root to start over",
            url=steps.root.url,
        )
    if wanted is not None:
        raise NotACheckpointError(
            f"there is no step {wanted} below {steps.root.url}; existing steps: "
            f"{', '.join(map(str, infos)) or 'none'}",
            url=steps.url(wanted),
        )
    return None, found


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
    kind = "other"
    if isinstance(problem, LookupError | TypeError | ValueError):
        # A flipped bit in a root document without a checksum may change a key, shape or type.
        try:
            StoredCheckpoint(place).check_root()
        except (DamagedCheckpointError, NotACheckpointError) as error:
            problem = error
        except CheckpointingException:
            pass  # the check failed too; the error of the load counts
    if isinstance(problem, DamagedCheckpointError | NotACheckpointError):
        kind = "damaged"
    elif isinstance(problem, RanksError):
        kind = "ranks"
    report = json.dumps([kind, str(problem)]).encode()

    def decide(reports: list[bytes]) -> bytes:
        told = [json.loads(one) for one in reports]
        if any(kind == "other" for kind, _ in told):
            return b"null"
        texts = list(dict.fromkeys(text for kind, text in told if kind == "damaged"))
        return json.dumps("; ".join(texts[:SHOWN]) or None).encode()

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


def _warn_of_damage(steps: Steps, number: int, text: str) -> None:
    """Mark a step as damaged, and log a warning. Every rank calls it."""
    steps.damaged.add(number)
    steps.log(
        "damaged",
        number,
        f"step {number} below {steps.root.url} is damaged and is skipped: {text}",
        logging.WARNING,
    )
