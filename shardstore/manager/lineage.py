"""Which steps a run is on, and which it left when it went back to an earlier one.

Pure: it knows numbers and times, not where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Branches", "branches"]


@dataclass(frozen=True, slots=True)
class Branches:
    """The steps of a run.

    Attributes:
        current: those that the run is on, ascending; the last of them is the last that was saved.
        abandoned: those that it left, ascending: a lower number was saved after them.
    """

    current: tuple[int, ...]
    abandoned: tuple[int, ...]

    @property
    def latest(self) -> int | None:
        """The step that the run is at; ``None``: there is none."""
        return self.current[-1] if self.current else None

    @property
    def to_restore(self) -> tuple[int, ...]:
        """All steps in the order in which a run that lost its state tries them: what it had left
        comes last."""
        return (*reversed(self.current), *reversed(self.abandoned))


def branches(saved: Mapping[int, int | None]) -> Branches:
    """Tell the steps that a run is on from those that it left.

    Args:
        saved: step -> when it was saved, in any unit; ``None``: nobody knows, and it counts as
            saved right after the step before it.
    """
    current, abandoned = [], []
    newest: int | None = None
    for step in sorted(saved):
        when = saved[step]
        if when is not None and newest is not None and when < newest:
            abandoned.append(step)
            continue
        current.append(step)
        newest = newest if when is None else when
    return Branches(tuple(current), tuple(abandoned))
