"""A conversion's progress as a bar: the one that saves and loads draw, one line a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from shardstore import progress as bars
from shardstore.errors import ArgumentError

__all__ = ["Progress", "callback_of"]


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
        stage: ``"write"`` or ``"verify"``.
        done_bytes: of the tensors, in this stage; what an earlier run did counts.
        total_bytes: of all tensors.
        key: tensor that was dealt with last.
    """

    stage: str
    done_bytes: int
    total_bytes: int
    key: str


@contextmanager
def callback_of(
    progress: Callable[[Progress], None] | Literal["bar"] | None, url: str
) -> Iterator[Callable[[Progress], None] | None]:
    """The callback that a ``progress`` argument stands for; a bar ends with the context.

    Args:
        progress: a callback, ``"bar"``, or nothing.
        url: the target.

    Raises:
        ArgumentError: something else.
    """
    if progress != "bar":
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress={progress!r} must be a callable, 'bar' or None")
        yield progress
        return
    drawn = bars.bar()
    last: list[bars.Progress] = []

    def draw(event: Progress) -> None:
        operation: bars.Operation = "verify" if event.stage == "verify" else "convert"
        whole = event.done_bytes >= event.total_bytes
        phase: bars.Phase = "done" if whole else "move"
        if last and last[0].finished and last[0].operation == operation:
            return
        last[:] = [bars.Progress(operation, phase, url, event.done_bytes, event.total_bytes)]
        drawn(last[0])

    try:
        yield draw
    finally:
        if last and not last[0].finished:
            was = last[0]
            drawn(bars.Progress(was.operation, "failed", was.url, was.bytes_done, was.bytes_total))
