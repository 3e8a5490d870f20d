"""Restores the newest step that is not damaged; all ranks load the same step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
from shardstore.manager.steps import Steps, branches, number_of
from shardstore.mapping import ShardedStateDict
from shardstore.progress import ProgressCallback, callback_of, log_event
from shardstore.serialization import load
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.inventory import is_checkpoint
from shardstore.storage.stores.location import Location

__all__ = ["Restored", "restore"]

SHOWN = 3
"""Findings of a damaged checkpoint that a text names."""

Damage = tuple[int, str]
"""A step, and what is damaged in it."""


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
        steps: where they are. Rank 0 keeps the one that is being restored from being deleted.
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
    check = partial(_damage_of, callback=callback) if verify_first else None
    passed: list[Damage] = []
    with ExitStack() as used:

        def decide(_: list[bytes]) -> bytes:
            chosen = _choose(steps, used, step, passed, check)
            return json.dumps([*chosen, bool(discard_later)]).encode()

        while True:
            answer = ranks.together(what=what, error=error, decide=decide)
            chosen, found, discards = json.loads(answer)
            passed += _warn_of(found, steps)
            if chosen is None:
                return None
            place = steps.place(chosen)
            try:
                loaded = load(state, place.place, progress=callback, **options)
                break
            except Exception as problem:
                if step is not None or ranks.is_broken:
                    raise
                text = _agree_on_damage(ranks, problem, what)
                if text is None:
                    raise
                passed += _warn_of([(chosen, text)], steps)
    numbers = tuple(number for number, _ in passed)
    if discards:
        _discard_later(ranks, steps, chosen)
    elif ranks.is_coordinator:
        _warn_of_later(steps, chosen, numbers)
    return Restored(chosen, loaded, place.url, numbers)


def _choose(
    steps: Steps,
    used: ExitStack,
    wanted: int | None,
    passed: Sequence[Damage],
    check: Callable[[Location], str | None] | None,
) -> tuple[int | None, list[Damage]]:
    """The step to load, and those found damaged on the way to it. Called by rank 0.

    Args:
        steps: where to look.
        used: holds what keeps the step from being deleted.
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
    there = steps.infos()
    tried = branches(there).to_restore if wanted is None else (wanted,)
    for step in tried:
        used.close()
        if step not in there or any(step == number for number, _ in passed):
            continue
        used.enter_context(steps.using([step]))
        if not is_checkpoint(steps.place(step)):  # it has been deleted meanwhile
            continue
        text = None if check is None else check(steps.place(step))
        if text is None:
            return step, found
        found.append((step, text))
    used.close()
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
            url=steps.url(wanted),
        )
    return None, found


def _agree_on_damage(ranks: Ranks, problem: Exception, what: str) -> str | None:
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


def _damage_of(place: Location, callback: ProgressCallback | None) -> str | None:
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


def _warn_of_later(steps: Steps, chosen: int, damaged: Sequence[int]) -> None:
    try:
        there = {step: info for step, info in steps.infos().items() if step not in damaged}
    except StorageError as error:  # what was asked for is done
        logger.warning("whether there are steps after %d is not known: %s", chosen, error)
        return
    latest = branches(there).latest
    later = [step for step in there if step > chosen]
    if not later:
        return
    resumes = f"until a step is saved, a run that names no step resumes at step {latest}; "
    log_event(
        logger,
        "later_steps",
        f"step {chosen} is restored, and there are later steps below {steps.root.url}: "
        f"{', '.join(map(str, later))}. They stay: {'' if latest == chosen else resumes}"
        "saving one of their numbers again needs overwrite=True. "
        f"restore(..., step={chosen}, discard_later=True) deletes them",
        logging.WARNING,
        step=chosen,
        later=later,
        url=steps.root.url,
    )


def _discard_later(ranks: Ranks, steps: Steps, chosen: int) -> None:
    """Delete the managed steps of higher numbers, on rank 0. Called by every rank, which waits for
    it."""

    def work(_: list[bytes]) -> bytes:
        infos = steps.infos()
        for step in sorted(infos, reverse=True):  # the highest first: what is left is no gap
            if step <= chosen:
                break
            url = steps.url(step)
            if not infos[step].managed or not steps.delete(step):
                logger.warning("step %d stays: no manager saved it, or it is in use: %s", step, url)
                continue
            log_event(
                logger,
                "delete",
                f"step {step}, later than step {chosen} which is restored, is deleted: {url}",
                logging.WARNING,
                step=step,
                url=url,
            )
        return b""

    ranks.together(what=f"deleting the steps after {chosen} below {steps.root.url}", decide=work)


def _warn_of(found: Sequence[Damage], steps: Steps) -> list[Damage]:
    for number, text in found:
        steps.damaged.add(number)
        log_event(
            logger,
            "damaged",
            f"step {number} below {steps.root.url} is damaged and is passed over for the one "
            f"before it: {text}",
            logging.WARNING,
            step=number,
            url=steps.url(number),
        )
    return [(number, text) for number, text in found]
