"""The machine in words, and the state of its disk and memory around a sample: one sync, a cold
cache, no space left behind, memory that the machine really has.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ATTIC = ".retired"
CLAIM = ".claimed"
SPARE_BYTES = 512 * 2**20
REST_S = 6.0
BLOCK_BYTES = 8 * 2**20

DIRTY_BYTES = 16 * 2**30
_LIMITS = Path("/proc/sys/vm")

_LIBC = ctypes.CDLL(None, use_errno=True)


def describe(folder: Path) -> dict[str, str | float]:
    """Processor, memory, kernel, and the file system that holds `folder`."""
    cpu = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kind, options = _file_system(folder)
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "file_system": f"{kind} ({options})",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "dirty_pages_without_a_sync": (
            f"up to {DIRTY_BYTES >> 30} GiB" if may_set_limits() else "up to the kernel's limits"
        ),
    }


def _file_system(folder: Path) -> tuple[str, str]:
    """Type and mount options of the mount that holds a folder, without those that name users."""
    mounts = [line.split()[1:4] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [m for m in mounts if folder.resolve().is_relative_to(m[0].replace("\\040", " "))]
    _, kind, options = max(above, key=lambda mount: len(mount[0]))
    told = [o for o in options.split(",") if not o.startswith(("resuid", "resgid"))]
    return kind, ",".join(told)


def sync_file_system(path: Path) -> None:
    """Write every dirty page of the file system that holds `path` (Linux `syncfs`)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.syncfs(handle) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(handle)


def files_under(path: Path) -> Iterator[Path]:
    """Every plain file at or below `path`."""
    if path.is_file():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder, name)


def drop_from_cache(path: Path) -> None:
    """Take all files below `path` out of the page cache, after a sync made their pages clean."""
    sync_file_system(path)
    for file in files_under(path):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def claim_memory(root: Path, size: int, *, rest: bool = False) -> None:
    """Have the machine own the memory that the page cache is going to take for `size` bytes.

    A virtual machine may give memory that was free for two seconds back to its host (Linux free
    page reporting), and each page then costs a fault in the host when it is used again: 2 GiB were
    seen to take 0.2 s to write into the page cache, or 2.5 s, depending on what had run before. A
    hole is read through the page cache, with no byte from or to the disk, and its file removed.

    Args:
        root: a folder on the file system in question.
        size: bytes; a little more is claimed.
        rest: wait first until what was freed before has been given back, which goes on in steps of
            two seconds: what is freed here then stays for the next two. For samples that are
            shorter, and wait for no disk. Not for sizes that the spare bytes cover.
    """
    if rest and size > SPARE_BYTES:
        time.sleep(REST_S)
    place = root / CLAIM
    handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        place.unlink()
        os.truncate(handle, size + SPARE_BYTES)
        block = bytearray(BLOCK_BYTES)
        while os.readv(handle, [block]):
            pass
    finally:
        os.close(handle)


def may_set_limits() -> bool:
    """Whether :func:`no_throttling` has an effect here."""
    return os.access(_LIMITS / "dirty_bytes", os.W_OK)


@contextmanager
def no_throttling() -> Iterator[None]:
    """Let the page cache hold what is written within, where this process may say so (root).

    Linux makes writers wait for the disk once a fifth of the available memory is dirty
    (Documentation/admin-guide/sysctl/vm.rst). The states of all clients are in memory here, so that
    a save of 2 GiB reaches that limit on a machine of 24 GiB, or just does not, and would be
    measured now with the disk and now without. The limits are put back at the end.
    """
    # Bytes or a share of memory: setting one makes the other 0, and 0 cannot be set.
    before = {}
    for name in ("dirty_bytes", "dirty_ratio", "dirty_background_bytes", "dirty_background_ratio"):
        with suppress(OSError):
            before[name] = (_LIMITS / name).read_text().strip()
    with suppress(OSError):
        (_LIMITS / "dirty_bytes").write_text(str(DIRTY_BYTES))
        (_LIMITS / "dirty_background_bytes").write_text(str(DIRTY_BYTES // 2))
    try:
        yield
    finally:
        for name, value in before.items():
            if value != "0":
                with suppress(OSError):
                    (_LIMITS / name).write_text(value)


class Disk:
    """Folders of a run; see `bench.runs.Store`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def new(self, name: str) -> Path:
        """A path where nothing is yet."""
        return self._root / name.replace(" ", "-").replace(",", "")

    def done(self, place: Path | str) -> None:
        """Give the space back, but keep the empty files until the benchmark ends.

        An ext4 without a journal steps over each inode that was freed in the last minutes before it
        takes a new one: creating files soon after deleting many took ten to thirty times as long.
        Deleting one client's files would be paid for by the next client. The sync keeps the
        discards of the freed space out of the next sample.
        """
        path = Path(place)
        if not os.path.lexists(path):
            return
        attic = self._root / ATTIC
        attic.mkdir(exist_ok=True)
        kept = attic / f"{path.name}-{len(os.listdir(attic))}"
        path.rename(kept)
        for file in files_under(kept):
            if file.stat().st_size:
                os.truncate(file, 0)
        sync_file_system(self._root)

    def clear(self) -> None:
        """Retire whatever is left."""
        for path in list(self._root.iterdir()):
            if path.name != ATTIC:
                self.done(path)
