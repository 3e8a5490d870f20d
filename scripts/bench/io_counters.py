"""Bytes that a process read and wrote, as the kernel and as shardstore's storage count them.

The kernel's `rchar` misses what is read through a mapping; shardstore's own counters see every
byte that it asked the storage for. Both are kept where both exist.
"""

from __future__ import annotations

import sys
from pathlib import Path


def _ours() -> dict[str, int]:
    """shardstore's counters, where this process uses shardstore."""
    if "shardstore" not in sys.modules:
        return {}
    from shardstore.storage.movers.counters import counters

    return counters.snapshot()


def snapshot() -> dict[str, int]:
    """All counters of this process now."""
    taken = _ours()
    for line in Path("/proc/self/io").read_text().splitlines():
        name, value = line.split(":")
        if name in ("rchar", "wchar"):
            taken[name] = int(value)
    return taken


def since(before: dict[str, int]) -> dict[str, int]:
    """What each counter gained; one that did not exist before counts from zero."""
    return {name: value - before.get(name, 0) for name, value in snapshot().items()}
