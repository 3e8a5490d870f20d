"""Which step to restore, and when to go back to the one before: decided once, for all ranks.

Answers for what counts as damage, and for the one decision that all ranks follow. It loads nothing
itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from shardstore.distributed.coordinator import Ranks
from shardstore.errors import (
    CheckpointingException,
    DamagedCheckpointError,
    NotACheckpointError,
    RanksError,
)
from shardstore.inspection.verify import Finding, verify
from shardstore.manager.background_queue import Claims
from shardstore.manager.lineage import branches
from shardstore.manager.steps import Steps
from shardstore.progress import Meter, ProgressCallback
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

__all__ = ["Damage", "agree_on_damage", "choose", "damage_of"]

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
        wanted: this one and no other; ``None``: the newest, see :mod:`branches`.
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
            f"no step below {steps.root.url} that could be restored is whole ({texts}); verify "
            "older copies, or begin anew below another root",
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
    meter = Meter("verify", place.url, callback)
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        if not meter.bytes_total:
            meter.expect(total)
        if meter.add is not None:
            meter.add(done - seen, 0)
        seen = done

    try:
        result = verify(StoredCheckpoint(place), findings.append, progress=progress)
    except (DamagedCheckpointError, NotACheckpointError) as error:
        meter.enter("failed")
        return str(error)
    except CheckpointingException:
        meter.enter("failed")
        raise
    meter.enter("done" if result.ok else "failed")
    texts = [finding.message for finding in findings if finding.severity == "damage"]
    if not texts:
        return None
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return "; ".join(texts[:SHOWN]) + more
