"""What the storage layer of this process has moved so far: plain counters, for benchmarks and
tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Counters", "counters"]


@dataclass
class Counters:
    """Totals since the process started or :meth:`reset`.

    Attributes:
        bytes_read: bytes of chunks read from the store (documents not included).
        bytes_written: bytes of chunks written to the store.
        chunks_read: chunk objects opened for reading.
        chunks_written: chunk objects written.
        documents_read: small documents read (zarr.json, manifest, common state).
        bytes_reused: bytes of chunks that were linked or copied by the store, not written.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    chunks_read: int = 0
    chunks_written: int = 0
    documents_read: int = 0
    bytes_reused: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self,
        *,
        bytes_read: int = 0,
        bytes_written: int = 0,
        chunks_read: int = 0,
        chunks_written: int = 0,
        documents_read: int = 0,
        bytes_reused: int = 0,
    ) -> None:
        """Add to the totals; safe from any thread."""
        with self._lock:
            self.bytes_read += bytes_read
            self.bytes_written += bytes_written
            self.chunks_read += chunks_read
            self.chunks_written += chunks_written
            self.documents_read += documents_read
            self.bytes_reused += bytes_reused

    def snapshot(self) -> dict[str, int]:
        """The totals as a dictionary."""
        with self._lock:
            return {
                "bytes_read": self.bytes_read,
                "bytes_written": self.bytes_written,
                "chunks_read": self.chunks_read,
                "chunks_written": self.chunks_written,
                "documents_read": self.documents_read,
                "bytes_reused": self.bytes_reused,
            }

    def reset(self) -> None:
        """Set every total to 0."""
        with self._lock:
            self.bytes_read = self.bytes_written = 0
            self.chunks_read = self.chunks_written = self.documents_read = 0
            self.bytes_reused = 0


counters = Counters()
"""The counters of this process."""
