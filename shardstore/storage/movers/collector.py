"""Pauses Python's cyclic garbage collector while very many small objects are made.

Planning a checkpoint of thousands of arrays makes no cycles, but sets off collections that walk all
objects of the program: a load of 20,000 arrays takes twice as long with them.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]

_lock = threading.Lock()  # the collector is one for the process, so the pauses are counted for it
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
                gc.enable()


def _end_all() -> None:
    """End the pauses in a forked child, where the threads that made them do not exist."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_end_all)
