"""The limit: the same bytes in plain preallocated files, one a tensor, no checksum, no format.

Writes are `posix_fallocate` and `pwrite` of 8 MiB, reads are `preadv` into the given tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from bench.clients.base import Share, raw_bytes, sync_once

BLOCK_BYTES = 8 * 2**20

Part = tuple[str, bool, memoryview]
"""File name, whether this rank writes it, and the memory."""


def write_file(path: Path, parts: list[memoryview], *, sync: bool = False) -> None:
    """A new file of the parts, one after the other."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        if size := sum(part.nbytes for part in parts):
            os.posix_fallocate(handle, 0, size)
        start = 0
        for part in parts:
            at = 0
            while at < part.nbytes:
                at += os.pwrite(handle, part[at : at + BLOCK_BYTES], start + at)
            start += part.nbytes
        if sync:
            os.fsync(handle)
    finally:
        os.close(handle)


def read_file(path: Path, memory: memoryview) -> None:
    """Fill the memory from the start of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < memory.nbytes:
            count = os.preadv(handle, [memory[at : at + BLOCK_BYTES]], at)
            if count == 0:
                raise OSError(f"{path.name} ends after {at} of {memory.nbytes} bytes")
            at += count
    finally:
        os.close(handle)


class Raw:
    """Plain files with a number of threads a rank; the large ones are handed out first."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self.settings = f"{threads} thread(s) a rank, fallocate, 8 MiB blocks, no checksum"

    def prepare(self, share: Share) -> list[Part]:
        """What is read, and which of it is written."""
        parts = []
        for entry in share.entries:
            name = f"{entry.key}.{0 if entry.replicated else share.rank}"
            parts.append((name, share.writes(entry), raw_bytes(share.tensors[entry.key])))
        return sorted(parts, key=lambda part: -part[2].nbytes)

    def save(self, prepared: list[Part], path: Path, sync: bool) -> None:
        """Write one file a tensor."""
        path.mkdir(parents=True, exist_ok=True)
        self._each(
            lambda part: write_file(path / part[0], [part[2]]), [p for p in prepared if p[1]]
        )
        if sync:
            sync_once(path)

    def load(self, prepared: list[Part], path: Path) -> None:
        """Read every file into its tensor."""
        self._each(lambda part: read_file(path / part[0], part[2]), prepared)

    def _each(self, action: Callable[[Part], None], parts: list[Part]) -> None:
        list((self._pool.map if self._pool else map)(action, parts))


class Copy:
    """One copy into kept host buffers, pinned for a device; with `write` one file, synced."""

    def __init__(self, *, write: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if write else None
        self._buffers: dict[str, torch.Tensor] = {}
        self.settings = "copy_ into buffers that are kept" + (", one file, fsync" if write else "")

    def prepare(self, share: Share) -> dict[str, torch.Tensor]:
        """The tensors; makes the buffers."""
        for key, tensor in share.tensors.items():
            if key not in self._buffers:
                pinned = tensor.is_cuda
                self._buffers[key] = torch.zeros(
                    tensor.shape, dtype=tensor.dtype, pin_memory=pinned
                )
        return share.tensors

    def start(self, prepared: dict[str, torch.Tensor], path: Path) -> Future[None]:
        """Copy, then write in a thread."""
        for key, tensor in prepared.items():
            self._buffers[key].copy_(tensor, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._pool is not None:
            parts = [raw_bytes(buffer) for buffer in self._buffers.values()]
            return self._pool.submit(write_file, path, parts, sync=True)
        done: Future[None] = Future()
        done.set_result(None)
        return done
