"""The machine in words: what a reader needs to judge the figures, and nothing that names it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from bench.disk_state import DIRTY_BYTES, may_set_limits


def describe(folder: Path) -> dict[str, str | float]:
    """Processor, memory, kernel, and the file system that holds `folder`."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.machine()
    memory_kib = int((_field("/proc/meminfo", "MemTotal") or "0").split()[0])
    kind, options = _file_system(folder)
    return {
        "processor": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / 2**20, 1),
        "file_system": f"{kind} ({options})",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "dirty_pages_without_a_sync": (
            f"up to {DIRTY_BYTES >> 30} GiB" if may_set_limits() else "up to the kernel's limits"
        ),
    }


def _field(file: str, name: str) -> str | None:
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _told(options: str) -> str:
    """Mount options without those that name users."""
    return ",".join(o for o in options.split(",") if not o.startswith(("resuid", "resgid")))


def _file_system(folder: Path) -> tuple[str, str]:
    """Type and mount options of the mount with the longest prefix of `folder`."""
    target = folder.resolve()
    best, found = -1, ("unknown", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        at = Path(point.replace("\\040", " "))
        if target.is_relative_to(at) and len(at.parts) >= best:
            best, found = len(at.parts), (kind, _told(options))
    return found
