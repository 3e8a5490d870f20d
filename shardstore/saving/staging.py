"""Copy the chunks of a save to host memory, which is reused from save to save.

The state may be changed once every chunk has been copied. If the budget has room for all chunks,
they are all copied first, at full speed, and written afterwards. Otherwise they are copied in
rounds, each round is written to make room for the next one, and the last round is written
afterwards. A separate CUDA stream copies chunks from a device. It waits for work that the caller's
stream has queued.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import getLogger
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.errors import StorageError
from shardstore.saving.sources import DevicePart
from shardstore.storage.format import dtypes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import DeviceCopies, page_lock, page_unlock
from shardstore.storage.movers.parallel import default_threads, in_rounds, run_batched

logger = getLogger(__name__)

ALIGNMENT = 64
COPY_BATCH_BYTES = 4 * 1024 * 1024
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class _Arena:
    """Fresh memory, page-locked if it is for a CUDA device.

    If page-locking fails, the memory stays ordinary memory, and a warning is logged. It uses huge
    pages if possible, because their first access costs less.
    """

    def __init__(self, size: int, device: torch.device | None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
        with suppress(AttributeError, OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        self.device = device
        code = 0 if device is None else page_lock(self.memory, device)
        self._pinned = device is not None and code == 0
        if code:
            logger.warning(
                "page-locking %d bytes of host memory for staging failed with CUDA error %d: "
                "device tensors are copied more slowly, and training may wait for it; lower the "
                "staging budget, or raise the limit of locked memory (ulimit -l)",
                len(self.memory),
                code,
            )

    def unlock(self) -> None:
        """Undo the page-locking, before the memory is freed."""
        if self._pinned and self.device is not None:
            self._pinned = False
            if code := page_unlock(self.memory, self.device):
                raise StorageError(
                    f"unlocking pinned memory failed with CUDA error {code}: the device cannot "
                    "be used"
                )


class HostPool:
    """Host memory that saves reuse, so that its pages are first touched and pinned only once.

    It is thread-safe. Between saves it keeps one arena, the last one that was given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: _Arena | None = None

    def take(self, size: int, *, device: torch.device | None = None) -> _Arena:
        """Return an arena of at least ``size`` bytes, page-locked for CUDA if it is for a CUDA
        device.

        Raises:
            MemoryError, OSError: the system does not have enough memory.
        """
        with self._lock:
            arena, self._free = self._free, None
        if arena is not None:
            serves = device is None or arena.device is not None
            if serves and size <= len(arena.memory) <= max(2 * size, 1 << 20):
                return arena
            arena.unlock()
            del arena  # free its memory before allocating
        return _Arena(size, device)

    def give_back(self, arena: _Arena | None) -> None:
        """Keep an arena for the next save."""
        with self._lock:
            old, self._free = self._free, arena
        if old is not None:
            old.unlock()

    def clear(self) -> None:
        """Free the kept memory."""
        self.give_back(None)

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory kept for the next save."""
        arena = self._free
        return 0 if arena is None else len(arena.memory)


POOL = HostPool()
"""The pool of this process, global because saves share its memory."""


class Staging:
    """The copy of one save's chunks. Call :meth:`close` to give its memory back.

    Args:
        writes: the chunks to write; their sources are the memory of the state.
        budget_bytes: largest host memory to use, at least the size of the largest chunk; ``None``:
            as much as the chunks need.
        threads: number of threads that copy.
        pool: pool of the memory.

    Attributes:
        arena_bytes: host memory used.
        error: error of the copy, if it failed.
    """

    def __init__(
        self,
        writes: Sequence[ChunkWrite],
        *,
        budget_bytes: int | None = None,
        threads: int | None = None,
        pool: HostPool | None = None,
    ) -> None:
        self._pool = pool or POOL
        self._threads = threads or default_threads()
        sizes = [_size(item) for item in writes]
        self.arena_bytes, largest = sum(sizes), max(sizes, default=0)
        if budget_bytes is not None and self.arena_bytes > budget_bytes:
            self.arena_bytes = max(budget_bytes, largest)
            if largest > budget_bytes:
                logger.warning(
                    "a chunk of %d bytes is larger than the staging budget of %d bytes, which is "
                    "raised to it; save with a smaller target_chunk_bytes",
                    largest,
                    budget_bytes,
                )
        self._rounds = deque(in_rounds(writes, _size, self.arena_bytes))
        sources = [item.source for item in writes if isinstance(item.source, DevicePart)]
        devices = {source.tensor.device for source in sources if source.is_cuda}
        self._devices = {device: DeviceCopies(device) for device in devices}
        self._arena: _Arena | None = self._pool.take(
            self.arena_bytes, device=next(iter(devices), None)
        )
        self._last: list[ChunkWrite] = []
        self._complete = threading.Event()
        self.error: BaseException | None = None

    def start(
        self, write: Callable[[Sequence[ChunkWrite]], None] | None = None, *, overlap: bool = False
    ) -> None:
        """Copy all chunks. :meth:`copies` raises an error of the copy.

        Args:
            write: writes copies to make room for others; needed with a budget.
            overlap: copy in a thread, and return at once.
        """
        if overlap:
            name = "shardstore-stage"
            threading.Thread(target=self._run, args=(write,), name=name, daemon=True).start()
        else:
            self._run(write)
            self.wait(host=True)

    def _run(self, write: Callable[[Sequence[ChunkWrite]], None] | None) -> None:
        try:
            while self._rounds:
                if self._last and write is not None:
                    self._wait_for_devices()
                    write(self._last)
                self._last = self._copied(self._rounds.popleft())
        except BaseException as error:
            self.fail(error)
            self._rounds.clear()  # drop references to the caller's memory
        finally:
            self._complete.set()

    def _copied(self, items: Sequence[ChunkWrite]) -> list[ChunkWrite]:
        """Copy chunks to the arena."""
        assert self._arena is not None
        jobs, start = [], 0
        for item in items:
            shape = item.array.grid.box(item.index).shape
            size = math.prod(shape) * dtypes.itemsize(item.array.dtype)
            place = self._arena.memory[start : start + size]
            data = place.view(dtypes.numpy_dtype(item.array.dtype)).reshape(shape)
            jobs.append((item, data))
            start += _size(item)

        def work(batch: Sequence[tuple[ChunkWrite, NDArray[Any]]]) -> None:
            for item, data in batch:
                if self.error is not None:
                    raise self.error
                source = item.source
                if isinstance(source, DevicePart) and source.is_cuda:
                    self._devices[source.tensor.device].copy(source.tensor, data)
                else:
                    _copy_bits(data, item.data())

        run_batched(
            jobs,
            work,
            threads=self._threads,
            weight=lambda job: job[1].nbytes,
            batch_weight=COPY_BATCH_BYTES,
        )
        return [ChunkWrite(item.array, item.index, data) for item, data in jobs]

    def copies(self) -> list[ChunkWrite]:
        """Wait for the copy, and return its chunks that are not yet written.

        Raises:
            BaseException: copying failed, or was stopped.
        """
        self._complete.wait()
        if self.error is not None:
            raise self.error
        self._wait_for_devices()
        return self._last

    def wait(self, timeout: float | None = None, *, host: bool = False) -> bool:
        """Wait until the state may be changed.

        Args:
            timeout: seconds; ``None``: no limit.
            host: block until device copies are complete. Otherwise only work that is queued later
                on the caller's current streams waits for them.

        Returns:
            Whether the state may be changed. After an error it may.
        """
        if not self._complete.wait(timeout):
            return False
        self._wait_for_devices(host=host)
        return True

    def _wait_for_devices(self, *, host: bool = True) -> None:
        for device in self._devices.values():
            device.wait(host=host)

    def fail(self, error: BaseException) -> None:
        """Stop copying. :meth:`copies` raises the error."""
        self.error = self.error or error

    def close(self) -> None:
        """Wait for the copying thread and give the memory back. Call it when no thread reads the
        copy any more."""
        self.wait(host=True)
        arena, self._arena = self._arena, None
        if arena is not None:
            self._pool.give_back(arena)


def _size(item: ChunkWrite) -> int:
    """Return the bytes of the arena that a chunk needs."""
    shape = item.array.grid.box(item.index).shape
    data_bytes = math.prod(shape) * dtypes.itemsize(item.array.dtype)
    return -(-data_bytes // ALIGNMENT) * ALIGNMENT


def _copy_bits(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy bits, because NumPy copies foreign data types element by element, under the GIL."""
    word = _WORDS.get(target.dtype.itemsize)
    if word is not None:
        target, source = target.view(word), source.view(word)
    np.copyto(target, source)
