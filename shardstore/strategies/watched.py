"""The load that is going on: where its strategies tell how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shardstore.progress import Meter

__all__ = ["current_meter", "watched"]

_meter: ContextVar[Meter | None] = ContextVar("meter", default=None)


@contextmanager
def watched(meter: Meter) -> Iterator[None]:
    """Within, :func:`current_meter` is this one; at the end it is told how the operation ended."""
    token = _meter.set(meter)
    try:
        yield
    except BaseException:
        meter.enter("failed")
        raise
    finally:
        _meter.reset(token)
    meter.enter("done")


def current_meter() -> Meter | None:
    """Of the load that is going on; ``None`` where a strategy is called by itself."""
    return _meter.get()
