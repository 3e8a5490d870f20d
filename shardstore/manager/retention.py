"""Which steps of a run are kept, and what rank 0 does in the background after each save.

:class:`Retention` is the policy, a pure function of numbers and metrics. :func:`note_save` logs a
new step, compares it with earlier ones, and deletes what the policy does not keep.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardstore.errors import ArgumentError
from shardstore.manager.steps import StepInfo, Steps, branches, logger, what_is_missing


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Keeps the steps that any of the rules keeps, and always the newest one. It is not asked about
    steps that a run left when it went back (:func:`~shardstore.manager.steps.branches`).

    Attributes:
        keep_last: the newest so many. ``None``: all, unless another rule is given.
        keep_every: each step that is divisible by it.
        best: the best so many by ``metric``. Steps without it, or with one that is not a number,
            are not among them. Of equals the later is better.
        metric: name of a metric.
        mode: whether the least (``"min"``) or the greatest (``"max"``) is best.

    Raises:
        ArgumentError: a number below 1, another mode, ``best`` without ``metric`` or the reverse.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "best"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ArgumentError(f"{name}={value!r} must be a whole number, or None")
            if value is not None and value < 1:
                raise ArgumentError(f"{name}={value} must be at least 1, or None")
        if self.mode not in ("min", "max"):
            raise ArgumentError(f"mode={self.mode!r} must be 'min' or 'max'")
        if (self.best is None) != (self.metric is None):
            raise ArgumentError(
                f"best={self.best} and metric={self.metric!r} belong together: give both, such as "
                "best=2, metric='loss', or none"
            )

    @property
    def deletes(self) -> bool:
        """Whether any rule is given, so that there can be steps which are not kept."""
        return not (self.keep_last is None and self.keep_every is None and self.best is None)

    def kept(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Return the steps to keep.

        Args:
            steps: step -> its metrics.
        """
        if not self.deletes:
            return set(steps)
        newest_first = sorted(steps, reverse=True)
        keep = set(newest_first[: self.keep_last or 1])
        if self.keep_every is not None:
            keep.update(step for step in steps if step % self.keep_every == 0)
        if self.best is not None and self.metric is not None:
            ranked = [s for s in newest_first if math.isfinite(steps[s].get(self.metric, math.nan))]
            # Stable, so that the later of two equals comes first, whichever the mode.
            sign = 1.0 if self.mode == "min" else -1.0
            ranked.sort(key=lambda step: sign * steps[step][self.metric or ""])
            keep.update(ranked[: self.best])
        return keep


def note_save(steps: Steps, policy: Retention, about: StepInfo, record: Mapping[str, Any]) -> None:
    """Log a step that was committed, compare it with earlier ones, and delete what the policy does
    not keep. Called in the background of rank 0.

    Args:
        steps: of the run.
        policy: which of them to keep.
        about: what the save knew of the new step.
        record: of its commit.
    """
    step, size = about.step, record.get("stored_bytes", 0)
    steps.log(
        "step",
        step,
        f"step {step} is saved: {steps.url(step)}",
        bytes=size,
        seconds=record.get("seconds", 0.0),
        metrics=dict(about.metrics),
    )
    content = record.get("content")
    steps.note(replace(about, content=content))
    infos = steps.infos()
    for earlier in sorted((n for n in infos if n < step), reverse=True):
        if content is not None and infos[earlier].content == content:
            steps.log(
                "same_content",
                step,
                f"every tensor of step {step} is the same as in step {earlier} "
                f"({steps.url(earlier)}): was the model trained in between, and is it the live "
                "state that is saved?",
                logging.WARNING,
                earlier=earlier,
            )
            break
    left = [n for n in branches(infos)[1] if n > step and n not in steps.told]
    if left:
        steps.told.update(left)
        steps.log(
            "later_steps",
            step,
            f"step {step} is saved below {steps.root.url}, where there are higher ones that were "
            f"saved before it: {', '.join(map(str, left))}. Did the run go back, or is it another "
            "run? They are not restored from any more, and stay until the run has come past them; "
            "saving one of their numbers needs overwrite=True",
            logging.WARNING,
            later=left,
            url=steps.root.url,
        )
    if policy.deletes:
        _retain(steps, policy, infos)


def _retain(steps: Steps, policy: Retention, infos: Mapping[int, StepInfo]) -> None:
    """Delete what the policy does not keep, and only steps before the newest whole one.

    Those that the run left when it went back stay: they are no part of what it is on, and who went
    back may want them.
    """
    whole = {step: info for step, info in infos.items() if step not in steps.damaged}
    managed = [step for step in branches(whole)[0] if infos[step].managed]
    while managed and (missing := what_is_missing(steps.place(managed[-1]))) is not None:
        step = managed.pop()
        logger.warning("step %d is not whole, and does not count as kept: %s", step, missing)
    keep = policy.kept({step: infos[step].metrics for step in managed})
    for step in managed:
        if step not in keep and steps.delete(step):
            steps.log("delete", step, f"step {step} is deleted: {steps.url(step)}")
