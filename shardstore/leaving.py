"""What is to be done when the interpreter is about to end, while everything still works.

The functions of :mod:`atexit` come too late for work that goes over the network: by then the pools
of :mod:`concurrent.futures` take no more jobs, and asyncio looks up the addresses of hosts in such
a pool. So these run where ``threading`` calls what it was asked to, before those pools close, and
as exit functions where it does not. They run the newest first, as those do. A process that was
forked off has none of them: what they would wait for, or undo, is its parent's. Knows nothing of
saves.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress

__all__ = ["register", "unregister"]

_lock = threading.Lock()
_functions: list[Callable[[], None]] = []


def register(function: Callable[[], None]) -> None:
    """Have a function called when the interpreter ends, once."""
    with _lock:
        _functions.append(function)


def unregister(function: Callable[[], None]) -> None:
    """Do not, if it has not been called yet."""
    with _lock, suppress(ValueError):
        _functions.remove(function)


def _run() -> None:
    while True:
        with _lock:
            if not _functions:
                return
            function = _functions.pop()
        function()


def _forget() -> None:
    """In a process that was forked off, where neither who holds the lock nor other threads are."""
    global _lock
    _lock = threading.Lock()
    _functions.clear()


os.register_at_fork(after_in_child=_forget)
# Its module is imported before: what was registered last is called first.
assert issubclass(ThreadPoolExecutor, Executor)
atexit.register(_run)
with suppress(AttributeError, RuntimeError):  # it is no part of the documented interface
    threading._register_atexit(_run)  # type: ignore[attr-defined]
