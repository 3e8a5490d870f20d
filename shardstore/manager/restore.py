"""Restores the newest step that is not damaged; all ranks load the same step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    DamagedCheckpointError,
    NotACheckpointError,
    RanksError,
    StorageError,
)
from shardstore.inspection.verify import Finding, verify
from shardstore.manager.background_queue import Claims
from shardstore.manager.steps import Steps, branches, number_of
from shardstore.mapping import ShardedStateDict
from shardstore.progress import ProgressCallback, callback_of
from shardstore.serialization import load
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

__all__ = ["Damage", "Restored", "agree_on_damage", "choose", "damage_of", "restore"]

SHOWN = 3
"""Findings of a damaged checkpoint that a text names."""

Damage = tuple[int, str]
"""A step, and what is damaged in it."""


def choose(
    steps: Steps,
    claims: Claims,
    wanted: int | None,
    passed: Sequence[Damage],
    check: Callable[[Location], str | None] | None,
) -> tuple[int | None, list[Damage]]:
    """The step to load, claimed, and those found damaged on the way to it. Called by rank 0.

    Args:
        steps: where to look.
        claims: what is on its way out is passed over.
        wanted: this one and no other; ``None``: the newest, see
            :func:`~shardstore.manager.steps.branches`.
        passed: steps that are known to be damaged.
        check: what is damaged in a step, if it shall be looked at before it is loaded.

    Returns:
        ``None`` as the step where there is none at all.

    Raises:
        NotACheckpointError: the step that is wanted is not there.
        DamagedCheckpointError: no step is left.
    """
    found: list[Damage] = []
    there = steps.committed()
    known = {step for step, _ in passed}
    tried = there if wanted is not None else branches(steps.times(there)).to_restore
    for step in tried:
        if step in known or wanted not in (None, step) or not claims.take(step):
            continue
        try:
            text = None if check is None else check(steps.place(step))
        except BaseException:
            claims.release(step)
            raise
        if text is None:
            return step, found
        claims.release(step)
        found.append((step, text))
    damaged = [*passed, *found]
    if damaged:
        texts = "; ".join(f"step {step}: {text}" for step, text in damaged[:SHOWN])
        raise DamagedCheckpointError(
            f"no restorable checkpoint below {steps.root.url}: every step is damaged ({texts}). "
            "Verify older copies, or pass a different root to start over",
            url=steps.root.url,
        )
    if wanted is not None:
        raise NotACheckpointError(
            f"there is no step {wanted} below {steps.root.url}; there are these: "
            f"{', '.join(map(str, there)) or 'none'}",
            url=steps.place(wanted).url,
        )
    return None, found


def agree_on_damage(ranks: Ranks, problem: Exception, what: str) -> str | None:
    """What is damaged, if damage is all that went wrong on any rank. Called by every rank, each
    with what a load raised on it; the same answer on every rank.

    Args:
        ranks: all of them.
        problem: what was raised on this rank.
        what: what the ranks are doing, for error texts.
    """
    kind = "other"
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


def damage_of(place: Location, callback: ProgressCallback | None) -> str | None:
    """What is damaged in a checkpoint, by reading all of it; ``None`` if nothing is."""
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


logger = logging.getLogger("shardstore.manager")


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored.

    Attributes:
        step: which step.
        state: what :func:`shardstore.load` returned.
        url: the checkpoint.
        damaged: newer steps that are damaged and were passed over, newest first.
    """

    step: int
    state: Any
    url: str
    damaged: tuple[int, ...] = ()


def restore(
    state: ShardedStateDict,
    steps: Steps,
    using: Claims,
    damaged: set[int],
    *,
    step: int | None,
    verify_first: bool,
    discard_later: bool,
    progress: ProgressCallback | Literal["bar"] | None,
    options: Mapping[str, Any],
) -> Restored | None:
    """See :meth:`CheckpointManager.restore`. Called by every rank.

    Args:
        state: see there; so for all arguments not described here.
        steps: where they are.
        using: what is being restored, or deleted, is claimed here, by rank 0.
        damaged: steps that are found damaged are added.
        options: for :func:`shardstore.load`.
    """
    ranks = Ranks.current()
    what = f"restoring from {steps.root.url}"
    error: BaseException | None = None
    callback: ProgressCallback | None = None
    try:
        callback = callback_of(progress, shows=ranks.is_coordinator)
        step = None if step is None else number_of(step)
    except (TypeError, ValueError) as problem:
        error = problem
    check = partial(damage_of, callback=callback) if verify_first else None
    passed: list[Damage] = []

    def decide(_: list[bytes]) -> bytes:
        chosen = choose(steps, using, step, passed, check)
        return json.dumps([*chosen, bool(discard_later)]).encode()

    while True:
        answer = ranks.together(what=what, error=error, decide=decide)
        chosen, found, discards = json.loads(answer)
        passed += _warn_of(found, steps, damaged)
        if chosen is None:
            return None
        place = steps.place(chosen)
        try:
            loaded = load(state, place.place, progress=callback, **options)
        except Exception as problem:
            if step is not None or ranks.is_broken:
                raise
            text = agree_on_damage(ranks, problem, what)
            if text is None:
                raise
            passed += _warn_of([(chosen, text)], steps, damaged)
            continue
        finally:
            if ranks.is_coordinator:
                using.release(chosen)
        numbers = tuple(number for number, _ in passed)
        if discards:
            _discard_later(ranks, steps, using, chosen)
        elif ranks.is_coordinator:
            _warn_of_later(steps, chosen, numbers)
        return Restored(chosen, loaded, place.url, numbers)


def _warn_of_later(steps: Steps, chosen: int, damaged: Sequence[int]) -> None:
    try:
        there = [step for step in steps.committed() if step not in damaged]
        latest = branches(steps.times(there)).latest
    except StorageError as error:  # what was asked for is done
        logger.warning("whether there are steps after %d is not known: %s", chosen, error)
        return
    later = [step for step in there if step > chosen]
    if not later:
        return
    resumes = f"until a step is saved, a run that names no step resumes at step {latest}; "
    logger.warning(
        "step %d is restored, and there are later steps below %s: %s. They stay: %ssaving one of "
        "their numbers again needs overwrite=True. restore(..., step=%d, discard_later=True) "
        "deletes them",
        chosen,
        steps.root.url,
        ", ".join(map(str, later)),
        "" if latest == chosen else resumes,
        chosen,
        extra={"event": "later_steps", "step": chosen, "later": later, "url": steps.root.url},
    )


def _discard_later(ranks: Ranks, steps: Steps, using: Claims, chosen: int) -> None:
    """Delete the managed steps of higher numbers, on rank 0. Called by every rank, which waits for
    it."""

    def work(_: list[bytes]) -> bytes:
        for step in reversed(steps.committed()):  # the highest first: what is left is no gap
            if step <= chosen:
                continue
            url = steps.place(step).url
            if not steps.info(step).managed or not using.doom(step):
                logger.warning("step %d stays: no manager saved it, or it is in use: %s", step, url)
                continue
            try:
                with suppress(NotACheckpointError):  # the background was faster
                    steps.remove(step)
            finally:
                using.gone(step)
            logger.warning(
                "step %d, later than step %d which is restored, is deleted: %s",
                step,
                chosen,
                url,
                extra={"event": "delete", "step": step, "url": url},
            )
        return b""

    ranks.together(what=f"deleting the steps after {chosen} below {steps.root.url}", decide=work)


def _warn_of(found: Sequence[Damage], steps: Steps, damaged: set[int]) -> list[Damage]:
    for number, text in found:
        damaged.add(number)
        logger.warning(
            "step %d below %s is damaged and is passed over for the one before it: %s",
            number,
            steps.root.url,
            text,
            extra={"event": "damaged", "step": number, "url": steps.place(number).url},
        )
    return [(number, text) for number, text in found]
