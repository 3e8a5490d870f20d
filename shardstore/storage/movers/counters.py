"""Counts the bytes, chunks and documents that this process reads and writes, for benchmarks and
tests."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

_lock = threading.Lock()  # one for the process, as are the counters


@dataclass
class Counters:
    """Totals since the process started or :meth:`reset`.

    Attributes:
        bytes_read: bytes of chunks read from the store (documents not included).
        bytes_written: bytes of chunks written to the store.
        chunks_read: chunk objects opened for reading.
        chunks_written: chunk objects written.
        documents_read: small documents read (zarr.json, manifest, common state).
        bytes_reused: bytes of chunks that were hard-linked, or copied by the store, and not
            written.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    chunks_read: int = 0
    chunks_written: int = 0
    documents_read: int = 0
    bytes_reused: int = 0

    def add(self, **amounts: int) -> None:
        """Add amounts to the totals of the same names. Any thread may call it."""
        with _lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def snapshot(self) -> dict[str, int]:
        """Return the totals as a dictionary."""
        return asdict(self)

    def reset(self) -> None:
        """Set every total to 0."""
        vars(self).update(asdict(Counters()))


counters = Counters()
"""The counters of this process."""
