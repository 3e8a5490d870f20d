"""Which steps of a run are kept: a pure policy. It knows numbers and metrics, and deletes
nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardstore.errors import ArgumentError

__all__ = ["Retention"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept is what any of the rules keeps, and the newest step in any case. Steps that a
    run left when it went back are no concern of it (:mod:`branches`).

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
