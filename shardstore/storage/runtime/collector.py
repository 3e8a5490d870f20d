"""Pauses Python's cyclic garbage collector during the creation of many small objects.

Planning a checkpoint of thousands of arrays creates no cycles, but it triggers collections that
walk all objects of the program. They double the duration of a load of 20,000 arrays.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 2000
"""Objects created minus objects freed during a pause, above which the pause freezes the rest."""

_pauses: list[None] = []
"""The pauses that disabled the collector; several, if several threads began one at once."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable automatic collections in all threads for the duration of the context. Pauses may
    nest. If pauses of several threads overlap, the first one that ends may end all of them."""
    if not gc.isenabled():
        yield
        return
    _pauses.append(None)
    gc.disable()
    try:
        yield
    finally:
        # Move the objects of the pause to the oldest generation (Python documentation, gc.freeze):
        # otherwise a collection of the youngest generation follows at once and walks all of them
        # for nothing. Objects that the program froze stay frozen.
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
        _pauses.pop()


def _end_all() -> None:
    """End all pauses in a forked child, because the threads that began them do not exist there."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_end_all)
