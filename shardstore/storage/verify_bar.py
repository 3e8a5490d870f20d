"""A verification's progress as a bar: the one that saves, loads and conversions draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from shardstore import progress as bars
from shardstore.errors import ArgumentError

__all__ = ["callback_of"]

Callback = Callable[[int, int], None]


@contextmanager
def callback_of(progress: Callback | Literal["bar"] | None, url: str) -> Iterator[Callback | None]:
    """The callback that a ``progress`` argument stands for; a bar ends with the context.

    Args:
        progress: a callback, ``"bar"``, or nothing.
        url: the checkpoint.

    Raises:
        ArgumentError: something else.
    """
    if progress != "bar":
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress={progress!r} must be a callable, 'bar' or None")
        yield progress
        return
    drawn = bars.bar()
    done, total = 0, 0

    def draw(bytes_done: int, bytes_total: int) -> None:
        nonlocal done, total
        done, total = bytes_done, bytes_total
        drawn(bars.Progress("verify", "move", url, done, total))

    drawn(bars.Progress("verify", "begin", url))
    phase: bars.Phase = "failed"
    try:
        yield draw
        phase = "done"
    finally:
        drawn(bars.Progress("verify", phase, url, done, total))
