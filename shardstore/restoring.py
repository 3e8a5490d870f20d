"""Restoring the newest step that is not damaged: all ranks load, or go back to the step before
together.

Answers for the loop and its warnings; which step comes next, and what counts as damage, is
:mod:`fallback`'s, and loading :mod:`serialization`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardstore.fallback import Damage, agree_on_damage, choose, damage_of
from shardstore.housekeeping import Claims
from shardstore.mapping import ShardedStateDict
from shardstore.progress import ProgressCallback, callback_of
from shardstore.ranks import Ranks
from shardstore.serialization import load
from shardstore.step_arguments import number_of
from shardstore.storage.steps import Steps

__all__ = ["Restored", "restore"]

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
    progress: ProgressCallback | Literal["bar"] | None,
    options: Mapping[str, Any],
) -> Restored | None:
    """See :meth:`CheckpointManager.restore`. Called by every rank.

    Args:
        state: see there; so for all arguments not described here.
        steps: where they are.
        using: what is being restored is claimed here, by rank 0.
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
        return json.dumps(choose(steps, using, step, passed, check)).encode()

    while True:
        answer = ranks.together(what=what, error=error, decide=decide)
        chosen, found = json.loads(answer)
        passed += _warn_of(found, steps, damaged)
        if chosen is None:
            return None
        place = steps.place(chosen)
        try:
            loaded = load(state, place.place, progress=callback, **options)
            return Restored(chosen, loaded, place.url, tuple(number for number, _ in passed))
        except Exception as problem:
            if step is not None or ranks.is_broken:
                raise
            text = agree_on_damage(ranks, problem, what)
            if text is None:
                raise
        finally:
            if ranks.is_coordinator:
                using.release(chosen)
        passed += _warn_of([(chosen, text)], steps, damaged)


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
