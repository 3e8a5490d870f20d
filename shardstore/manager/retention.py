"""Which steps of a run are kept, and what rank 0 does in the background after each save.

:class:`Retention` is the policy, a pure function of numbers and metrics. :class:`RetentionWorker`
logs a new step, compares it with earlier ones, and deletes what the policy does not keep.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardstore.errors import ArgumentError
from shardstore.manager.background_queue import Claims
from shardstore.manager.steps import StepInfo, Steps, branches, what_is_missing

__all__ = ["Retention", "RetentionWorker"]


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
        """The steps to keep.

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


logger = logging.getLogger("shardstore.manager")


class RetentionWorker:
    """Logs, compares and deletes the steps below one root. One thread at a time calls it.

    Args:
        steps: where they are.
        policy: which of them to keep.
        using: steps that are being written, restored or based upon.
        damaged: steps that are known to be damaged, kept up to date by their owner.
        infos: what is known of steps, kept here.
    """

    def __init__(
        self,
        steps: Steps,
        policy: Retention,
        using: Claims,
        damaged: Collection[int],
        infos: dict[int, StepInfo],
    ) -> None:
        self._steps = steps
        self._policy = policy
        self._using = using
        self._damaged = damaged
        self._infos = infos
        self._told: set[int] = set()

    def saved(self, about: StepInfo, record: Mapping[str, Any]) -> None:
        """A step was committed: log it, compare it with earlier ones, delete what goes.

        Args:
            about: what the save knew of it.
            record: of its commit.
        """
        step = about.step
        self._infos[step] = replace(about, content=record.get("content"))
        _log_step(step, self._url(step), record, about.metrics)
        try:
            self._compare(step)
            self._tell_of_abandoned(step)
        finally:
            self._retain()

    def _url(self, step: int) -> str:
        return self._steps.place(step).url

    def _info(self, step: int) -> StepInfo:
        if step not in self._infos:
            self._infos[step] = self._steps.info(step)
        return self._infos[step]

    def _compare(self, step: int) -> None:
        """Warn if an earlier step has the same arrays."""
        content = self._infos[step].content
        if content is None:
            return
        for earlier in reversed(self._steps.committed()):
            if earlier < step and self._info(earlier).content == content:
                logger.warning(
                    "every tensor of step %d is the same as in step %d (%s): was the model trained "
                    "in between, and is it the live state that is saved?",
                    step,
                    earlier,
                    self._url(earlier),
                    extra={"event": "same_content", "step": step, "earlier": earlier},
                )
                return

    def _tell_of_abandoned(self, step: int) -> None:
        """Warn, once of each, of steps of higher numbers that were saved before this one."""
        there = {number: self._info(number).saved for number in self._steps.committed()}
        left = [n for n in branches(there).abandoned if n > step and n not in self._told]
        if not left:
            return
        self._told.update(left)
        logger.warning(
            "step %d is saved below %s, where there are higher ones that were saved before it: %s. "
            "Did the run go back, or is it another run? They are not restored from any more, "
            "and stay until the run has come past them; saving one of their numbers needs "
            "overwrite=True",
            step,
            self._steps.root.url,
            ", ".join(map(str, left)),
            extra={"event": "later_steps", "step": step, "later": left},
        )

    def _retain(self) -> None:
        """Delete what the policy does not keep, and only steps before the newest whole one.

        Those that the run left when it went back stay: they are no part of what it is on, and who
        went back may want them.
        """
        if not self._policy.deletes:
            return
        there = [step for step in self._steps.committed() if step not in self._damaged]
        current = branches({step: self._info(step).saved for step in there}).current
        managed = [step for step in current if self._info(step).managed]
        newest = self._newest_whole(managed)
        if newest is None:
            return
        metrics = {step: self._info(step).metrics for step in managed if step <= newest}
        keep = self._policy.kept(metrics)
        for step in sorted(set(metrics) - keep - {newest}):
            if not self._using.doom(step):
                continue
            try:
                self._steps.remove(step)
                logger.info(
                    "step %d is deleted: %s",
                    step,
                    self._url(step),
                    extra={"event": "delete", "step": step, "url": self._url(step)},
                )
            finally:
                self._infos.pop(step, None)
                self._using.gone(step)

    def _newest_whole(self, steps: Sequence[int]) -> int | None:
        for step in sorted(steps, reverse=True):
            missing = what_is_missing(self._steps.place(step))
            if missing is None:
                return step
            logger.warning("step %d is not whole, and does not count as kept: %s", step, missing)
        return None


def _log_step(step: int, url: str, record: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    size, seconds = record.get("stored_bytes", 0), record.get("seconds", 0.0)
    logger.info(
        "step %d is saved: %s",
        step,
        url,
        extra={
            "event": "step",
            "step": step,
            "url": url,
            "bytes": size,
            "seconds": seconds,
            "bytes_per_second": round(size / max(seconds, 1e-9)),
            "metrics": dict(metrics),
        },
    )
