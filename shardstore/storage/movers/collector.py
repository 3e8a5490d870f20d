"""Pauses Python's cyclic garbage collector where very many small objects are made at once.

Planning a checkpoint of thousands of arrays makes no cycles, but sets off collections that walk
every object of the program: four fifths of the time to parse a root document of 4,000 arrays.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

MANY = 2000
"""Objects, more than were freed meanwhile."""

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Within, no automatic collection runs, in any thread. Pauses may nest and overlap."""
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                _grow_old()
                gc.enable()


def _grow_old() -> None:
    """Have what was made meanwhile count as old, at no cost, if it is much.

    A collection would follow at once, and walk all of it for nothing; and the next ones, as it
    grows old. Old objects are looked at by full collections. Objects that the program has frozen
    stay so (Python documentation, ``gc.freeze``).
    """
    if gc.get_count()[0] > MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def _forget() -> None:
    """In a forked child: who paused is not there, and would not end it."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_forget)
