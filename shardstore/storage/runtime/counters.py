"""Counts the bytes and chunks that this process reads and writes, for benchmarks and tests."""

from __future__ import annotations

import threading
from collections import Counter

_lock = threading.Lock()


class Counters(Counter[str]):
    """Totals of this process by name.

    ``bytes_read`` and ``bytes_written`` are bytes of chunks read from and written to the store,
    ``chunks_read`` and ``chunks_written`` their numbers. ``bytes_reused`` are bytes of chunks that
    were hard-linked, or copied by the store, and not written.
    """

    def add(self, **amounts: int) -> None:
        """Add amounts to the totals of the same names. Any thread may call it."""
        with _lock:
            self.update(amounts)


counters = Counters()
"""The counters of this process."""
