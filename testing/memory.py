"""What one process takes and moves, from /proc: memory, its peak, and bytes read.

Anonymous memory is what counts as memory above the state: the kernel can drop pages of mapped files
at any time. The kernel keeps a peak of all resident memory only, so the peak of the anonymous part
is sampled, once a millisecond.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

INTERVAL_S = 0.001


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous memory of a process now."""
    return _fields(f"/proc/{pid}/status", "RssAnon")[0] * 1024


def reset_peak() -> int:
    """Let the kernel's peak of this process start from here; returns the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _fields("/proc/self/status", "VmRSS")[0] * 1024


def peak_rss_bytes() -> int:
    """The kernel's peak of all resident memory of this process since `reset_peak`."""
    return _fields("/proc/self/status", "VmHWM")[0] * 1024


class Sampler:
    """Samples the anonymous memory of processes while the body of a `with` runs."""

    def __init__(self, pids: Sequence[int | str] = ("self",)) -> None:
        self._pids = list(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before = [anonymous_bytes(pid) for pid in pids]
        self._peaks = list(self._before)

    @property
    def grown_bytes(self) -> list[int]:
        """Growth of each process at its peak."""
        return [peak - low for peak, low in zip(self._peaks, self._before, strict=True)]

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            for i, pid in enumerate(self._pids):
                with suppress(OSError, KeyError):
                    self._peaks[i] = max(self._peaks[i], anonymous_bytes(pid))


class BytesRead:
    """Bytes that this process reads from here on.

    The kernel's count misses what is read through a mapping, shardstore's own misses what it does
    not ask the storage for. `so_far` is the larger one.
    """

    def __init__(self) -> None:
        self._before = self._counts()

    def so_far(self) -> int:
        """Bytes since the object was made."""
        return max(now - was for now, was in zip(self._counts(), self._before, strict=True))

    def _counts(self) -> tuple[int, int]:
        ours = 0
        if "shardstore" in sys.modules:
            from shardstore.storage.runtime.counters import counters

            ours = counters["bytes_read"]
        return _fields("/proc/self/io", "rchar")[0], ours


def _fields(file: str, *names: str) -> list[int]:
    found = dict(line.split(":", 1) for line in Path(file).read_text().splitlines())
    return [int(found[name].split()[0]) for name in names]
