"""The copy of the state that an asynchronous save writes from.

Chunks are copied to host memory, which is reused from save to save. The state may be changed once
every chunk has been copied. If the budget has room for all chunks, they are all copied first, at
full speed, and written afterwards. Otherwise they are copied in rounds, each round is written to
make room for the next one, and the last round is written afterwards. A separate CUDA stream copies
chunks from a device. It waits for work that the caller's stream has queued.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from logging import getLogger
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.saving.plan import DevicePart
from shardstore.storage.format import dtypes
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.device import DeviceCopies, host_memory
from shardstore.storage.runtime import parallel

logger = getLogger(__name__)

Take: TypeAlias = Callable[[Sequence[ChunkWrite]], None]
"""Writes chunks, or keeps them."""
_Sized: TypeAlias = tuple[ChunkWrite, int]
"""A chunk, and the bytes of the arena that it needs."""

ALIGNMENT = 64
COPY_BATCH_BYTES = 4 * 1024 * 1024


class Arena(NamedTuple):
    """Host memory for the copy of a save, and the device that copies to it, if any."""

    memory: NDArray[np.uint8]
    device: torch.device | None


POOL: deque[Arena] = deque(maxlen=1)
"""Host memory of the last save that gave it back, for the next one, so that its pages are first
touched and pinned only once. A deque is thread-safe."""


def _arena(size: int, device: torch.device | None) -> Arena:
    """Return an arena of at least ``size`` bytes from :data:`POOL`, or a new one, see
    :func:`.host_memory`.

    Raises:
        MemoryError, OSError: the system does not have enough memory.
    """
    arena: Arena | None = None
    with suppress(IndexError):  # there is none
        arena = POOL.pop()
    if arena is not None:
        serves = device is None or arena.device is not None
        if serves and size <= len(arena.memory) <= max(2 * size, 1 << 20):
            return arena
        del arena  # free its memory before allocating
    return Arena(host_memory(size, device), device)


class Staging:
    """The copy of one save's chunks. Call :meth:`close` to give its memory back.

    :meth:`copies` raises an error of the copy.

    Args:
        writes: the chunks to write; their sources are the memory of the state.
        write: writes copies to make room for others; needed with a budget.
        overlap: copy in a thread, and return at once.
        budget_bytes: largest host memory to use, at least the size of the largest chunk; ``None``:
            as much as the chunks need.
        threads: number of threads that copy.

    Attributes:
        arena_bytes: host memory used.
        error: error of the copy, if it failed.
    """

    def __init__(
        self,
        writes: Sequence[ChunkWrite],
        write: Take | None = None,
        *,
        overlap: bool = False,
        budget_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._threads = threads or parallel.default_threads()
        sized = [(item, _size(item)) for item in writes]
        sizes = [size for _, size in sized]
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
        sources = [item.source for item in writes if isinstance(item.source, DevicePart)]
        devices = {source.tensor.device for source in sources if source.stream is not None}
        self._arena: Arena | None = _arena(self.arena_bytes, next(iter(devices), None))
        self._devices = {device: DeviceCopies(device, self._arena.memory) for device in devices}
        self._last: list[ChunkWrite] = []
        self._complete = threading.Event()
        self.error: BaseException | None = None
        rounds = deque(parallel.in_rounds(sized, itemgetter(1), self.arena_bytes))
        run = partial(self._run, rounds, write, waits=not overlap)
        if overlap:
            parallel.start_thread(run, name="shardstore-stage", daemon=True)
        else:
            run()

    def _run(self, rounds: deque[list[_Sized]], write: Take | None, *, waits: bool) -> None:
        try:
            while rounds:
                if self._last and write is not None:
                    self._wait_for_devices()
                    write(self._last)
                self._last = self._copied(rounds.popleft())
            if waits:
                self._wait_for_devices()
        except BaseException as error:
            self.fail(error)
        finally:
            rounds.clear()  # drop references to the caller's memory
            self._complete.set()

    def _copied(self, items: Sequence[_Sized]) -> list[ChunkWrite]:
        """Copy chunks to the arena."""
        assert self._arena is not None
        jobs, start = [], 0
        for item, size in items:
            shape, dtype = item.array.grid.box(item.index).shape, item.array.dtype
            memory = self._arena.memory
            jobs.append((item, np.ndarray(shape, dtypes.numpy_dtype(dtype), memory, start)))
            start += size

        def work(batch: Sequence[tuple[ChunkWrite, NDArray[Any]]]) -> None:
            for item, data in batch:
                if self.error is not None:
                    raise self.error
                source = item.source
                if isinstance(source, DevicePart) and source.stream is not None:
                    self._devices[source.tensor.device].copy(source.tensor, data)
                else:
                    _copy_bits(data, item.data())

        parallel.run_batched(
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
        try:
            self.wait(host=True)
            if self._arena is not None:
                POOL.append(self._arena)
        finally:  # after an error of a device the memory is not used again
            self._arena, self._last, self._devices = None, [], {}


def _size(item: ChunkWrite) -> int:
    """Return the bytes of the arena that a chunk needs."""
    shape = item.array.grid.box(item.index).shape
    data_bytes = math.prod(shape) * dtypes.itemsize(item.array.dtype)
    return -(-data_bytes // ALIGNMENT) * ALIGNMENT


def _copy_bits(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy bits, because NumPy copies foreign data types element by element, under the GIL."""
    if target.dtype.itemsize <= np.dtype(np.uint64).itemsize:
        word = f"u{target.dtype.itemsize}"
        target, source = target.view(word), source.view(word)
    np.copyto(target, source)
