"""Peak memory of a process during one operation, from /proc.

Anonymous memory is what counts as memory above the state: pages of mapped files are page cache
and can be dropped at any time. The kernel keeps a peak of all resident memory only, so the peak
of the anonymous part is sampled, from another process, once a millisecond.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.001


@dataclass(frozen=True)
class Resident:
    """Memory of a process at one moment, in bytes."""

    rss_bytes: int
    anonymous_bytes: int
    peak_rss_bytes: int


def resident(pid: int | str = "self") -> Resident:
    """Resident memory of a process now."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "RssAnon", "VmHWM"):
            found[name] = int(rest.split()[0]) * 1024
    return Resident(found["VmRSS"], found["RssAnon"], found["VmHWM"])


def reset_peak() -> Resident:
    """Let the kernel's peak of this process start from here; returns the memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def peak_rss_bytes() -> int:
    """The kernel's peak of all resident memory of this process since `reset_peak`."""
    return resident().peak_rss_bytes


class Sampler:
    """Samples the anonymous memory of processes while the body of a `with` runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes = [0] * len(self._pids)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            for i, pid in enumerate(self._pids):
                try:
                    now = resident(pid).anonymous_bytes
                except (OSError, KeyError):
                    continue
                self.peak_bytes[i] = max(self.peak_bytes[i], now)
