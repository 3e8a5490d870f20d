"""The limit: the same bytes in plain preallocated files, one a tensor, no checksum, no format.

Writes are `posix_fallocate` and `pwrite` of 8 MiB, reads are `preadv` into the given tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.clients.base import Share, sync_once

BLOCK_BYTES = 8 * 2**20


def _write(path: Path, memory: memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        if memory.nbytes:
            os.posix_fallocate(handle, 0, memory.nbytes)
        at = 0
        while at < memory.nbytes:
            at += os.pwrite(handle, memory[at : at + BLOCK_BYTES], at)
    finally:
        os.close(handle)


def _read(path: Path, memory: memoryview) -> None:
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


def _file_name(share: Share, key: str, replicated: bool) -> str:
    return f"{key}.{0 if replicated else share.rank}"


class Raw:
    """Plain files with a number of threads a rank; the large ones are handed out first."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.settings = f"{threads} thread(s) a rank, fallocate, 8 MiB blocks, no checksum"

    def prepare(self, share: Share) -> list[tuple[str, bool, memoryview]]:
        """File name, whether this rank writes it, and the memory of each tensor."""
        parts = []
        for entry in share.entries:
            replicated = entry.axis is None and entry.flat is None
            tensor = share.tensors[entry.key].reshape(-1).view(torch.uint8)
            writes = share.rank == 0 or not replicated
            name = _file_name(share, entry.key, replicated)
            parts.append((name, writes, tensor.numpy().data))
        parts.sort(key=lambda part: -part[2].nbytes)
        return parts

    def save(self, prepared: list[tuple[str, bool, memoryview]], path: Path, sync: bool) -> None:
        """Write one file a tensor."""
        path.mkdir(parents=True, exist_ok=True)
        self._each(lambda part: _write(path / part[0], part[2]), [p for p in prepared if p[1]])
        if sync:
            sync_once(path)

    def load(self, prepared: list[tuple[str, bool, memoryview]], path: Path) -> None:
        """Read every file into its tensor."""
        self._each(lambda part: _read(path / part[0], part[2]), prepared)

    def _each(
        self,
        action: Callable[[tuple[str, bool, memoryview]], None],
        parts: list[tuple[str, bool, memoryview]],
    ) -> None:
        if self._threads == 1:
            for part in parts:
                action(part)
            return
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(action, parts))
