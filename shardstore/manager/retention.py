"""The retention policy, and the work of rank 0 in the background after each save.

:class:`Retention` is the policy, a pure function of numbers and metrics. :func:`note_save` logs a
new step, compares it with earlier ones, and deletes the steps that the policy does not keep.
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
    """The retention policy. A step is kept if any rule keeps it, or if it is the newest step.

    Callers leave out the steps of abandoned branches (:func:`~shardstore.manager.steps.branches`).

    Attributes:
        keep_last: number of newest steps to keep. ``None``: all, unless another rule is given.
        keep_every: keep each step that is divisible by this number.
        best: number of best steps by ``metric`` to keep. Steps whose metric is missing or NaN are
            not counted. Of steps with equal metrics, the later one is better.
        metric: name of a metric.
        mode: ``"min"`` if the smallest value is best, ``"max"`` if the greatest is.

    Raises:
        ArgumentError: a number is below 1, the mode is unknown, or only one of ``best`` and
            ``metric`` is given.
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
                f"best={self.best} and metric={self.metric!r} must be given together, such as "
                "best=2, metric='loss'"
            )

    @property
    def deletes(self) -> bool:
        """Whether any rule is given."""
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
            # The sort is stable, so the later of two equal steps comes first in both modes.
            sign = 1.0 if self.mode == "min" else -1.0
            ranked.sort(key=lambda step: sign * steps[step][self.metric or ""])
            keep.update(ranked[: self.best])
        return keep


def note_save(steps: Steps, policy: Retention, about: StepInfo, record: Mapping[str, Any]) -> None:
    """Log a committed step, compare it with earlier ones, and delete the steps that the policy does
    not keep. Rank 0 calls it in the background.

    Args:
        steps: steps of the run.
        policy: the retention policy.
        about: the new step.
        record: its commit record.
    """
    step, size = about.step, record.get("stored_bytes", 0)
    steps.log(
        "step",
        step,
        f"saved step {step}: {steps.url(step)}",
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
                f"all tensors of step {step} are equal to those of step {earlier} "
                f"({steps.url(earlier)}). Check that the model was trained in between, and that "
                "its current state is saved",
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
            f"saved step {step} below {steps.root.url}, but steps with higher numbers were saved "
            f"before it: {', '.join(map(str, left))}. Check whether another run saves there. These "
            "steps are no longer restored, and stay until the run has passed them; saving one of "
            "their numbers needs overwrite=True",
            logging.WARNING,
            later=left,
            url=steps.root.url,
        )
    if policy.deletes:
        _retain(steps, policy, infos)


def _retain(steps: Steps, policy: Retention, infos: Mapping[int, StepInfo]) -> None:
    """Delete the steps before the newest complete one that the policy does not keep.

    Steps of branches that the run left stay, because the user may want them.
    """
    whole = {step: info for step, info in infos.items() if step not in steps.damaged}
    managed = [step for step in branches(whole)[0] if infos[step].managed]
    incomplete: dict[int, str] = {}
    while managed and (missing := what_is_missing(steps.place(managed[-1]))) is not None:
        incomplete[managed.pop()] = missing
    if incomplete.keys() - steps.incomplete:
        named = "; ".join(f"step {n}: {text}" for n, text in list(incomplete.items())[:3])
        logger.warning("%d incomplete step(s) not counted as kept: %s", len(incomplete), named)
    steps.incomplete = set(incomplete)
    keep = policy.kept({step: infos[step].metrics for step in managed})
    for step in managed:
        if step not in keep and steps.delete(step):
            steps.log("delete", step, f"deleted step {step}: {steps.url(step)}")
