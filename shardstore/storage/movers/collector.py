"""Pauses Python's cyclic garbage collector while very many small objects are made.

Planning a checkpoint of thousands of arrays makes no cycles, but sets off collections that walk all
objects of the program: a load of 20,000 arrays takes twice as long with them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 2000
"""Objects, more than were freed meanwhile."""

_pauses: list[object] = []
"""Those that switched the collector off; where several began at the same time, all of them did."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, no automatic collection runs, in any thread. Pauses may nest; of those of several
    threads that overlap, the first to end may end all."""
    if not gc.isenabled():
        yield
        return
    pause = object()
    _pauses.append(pause)
    gc.disable()
    try:
        yield
    finally:
        # Objects made during the pause are skipped from here on (Python documentation, gc.freeze):
        # a collection of the young would follow at once, and walk all of it for nothing. What the
        # program has frozen stays so.
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
        _pauses.remove(pause)


def _end_all() -> None:
    """End the pauses in a forked child, where the threads that made them do not exist."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_end_all)
