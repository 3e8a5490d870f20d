"""A copy of the chunks to be written, in host memory that is kept from save to save.

Once every chunk has been copied the state may be changed. The copy lies in one arena: as large as
the state where the budget allows (then everything is copied first, at full speed, and written
afterwards), else a ring that chunks pass through in the order of their writing, so that copying and
writing overlap. Device chunks are copied by a stream of their own, which waits for what the
caller's stream had queued. No stream waits for it unless asked to.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Sequence
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
from shardstore.storage.movers.device import (
    DeviceCopies,
    DeviceEvent,
    page_lock,
    page_unlock,
)
from shardstore.storage.movers.parallel import default_threads, run_batched

__all__ = ["POOL", "HostPool", "StagedChunk", "Staging", "copy_bits"]

logger = getLogger(__name__)

ALIGNMENT = 64
COPY_BATCH_BYTES = 4 * 1024 * 1024
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class _Arena:
    """Fresh memory, page-locked if it is for a CUDA device.

    Where the system refuses to page-lock it, it is ordinary memory, with a warning. Huge pages,
    where there are any, cost a fraction at the first touch.
    """

    def __init__(self, size: int, device: torch.device | None) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapped = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
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
        """Undo the page-locking, before the memory goes."""
        if self._pinned and self.device is not None:
            self._pinned = False
            code = page_unlock(self.memory, self.device)
            if code:
                raise StorageError(
                    f"giving back page-locked memory failed with CUDA error {code}: the device is "
                    "in no state to be used"
                )


class HostPool:
    """Host memory that is reused: its pages are touched, and pinned, once.

    Safe from any thread. Keeps one arena between saves, the last one given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: _Arena | None = None

    def take(self, size: int, *, device: torch.device | None = None) -> _Arena:
        """An arena of at least ``size`` bytes, page-locked for CUDA if it is for a CUDA device.

        Raises:
            MemoryError, OSError: the system has not that much memory.
        """
        arena = self._swap(None)
        if arena is not None:
            serves = device is None or arena.device is not None
            if serves and size <= len(arena.memory) <= max(2 * size, 1 << 20):
                return arena
            arena.unlock()
            del arena  # its memory goes before the new one comes
        return _Arena(size, device)

    def give_back(self, arena: _Arena | None) -> None:
        """Keep an arena for the next save."""
        old = self._swap(arena)
        if old is not None:
            old.unlock()

    def clear(self) -> None:
        """Give the memory that is kept back to the system."""
        self.give_back(None)

    def _swap(self, arena: _Arena | None) -> _Arena | None:
        with self._lock:
            old, self._free = self._free, arena
        return old

    @property
    def kept_bytes(self) -> int:
        """Memory kept for the next save."""
        with self._lock:
            return 0 if self._free is None else len(self._free.memory)


POOL = HostPool()
"""The pool of this process: its memory is kept from save to save."""


class StagedChunk:
    """A chunk in the copy: a source of its data that waits until it has been copied."""

    __slots__ = (
        "_staging",
        "data",
        "data_bytes",
        "dtype",
        "event",
        "item",
        "released",
        "shape",
        "size",
        "start",
    )

    def __init__(self, staging: Staging, item: ChunkWrite) -> None:
        self._staging = staging
        self.item: ChunkWrite | None = item  # until it is copied
        self.dtype = dtypes.numpy_dtype(item.array.dtype)
        self.shape = item.array.grid.box(item.index).shape
        self.data_bytes = math.prod(self.shape) * self.dtype.itemsize
        self.size = -(-self.data_bytes // ALIGNMENT) * ALIGNMENT
        self.start = 0
        self.data: NDArray[Any] | None = None
        self.event: DeviceEvent | None = None
        self.released = False

    def __call__(self) -> NDArray[Any]:
        """The copy; waits for it.

        Raises:
            BaseException: copying failed, or was stopped.
        """
        return self._staging.copied(self)

    def wait(self) -> None:
        """Return once the chunk has been copied; errors as those of a call."""
        self._staging.copied(self)

    def release(self) -> None:
        """The chunk is written: its memory may be used again."""
        self._staging.release(self)

    def fail(self, error: BaseException) -> None:
        """The chunk cannot be written: nobody shall wait for its memory for ever."""
        self._staging.fail(error)


class Staging:
    """The copy of one save's chunks.

    Created and, unless copying shall overlap with what comes next, run by the caller's thread;
    another thread writes :attr:`writes`. Whatever happens, :meth:`close` gives the memory back.

    Chunks take their memory in order, release it in any order, and it is used again in order.

    Args:
        writes: what is to be written, out of the state's own memory.
        pool: where memory comes from.
        budget_bytes: most host memory to use; ``None``: as much as the chunks need. A chunk larger
            than that raises it to its own size.
        threads: threads that copy.
        brought: number of chunks, the first ones, that are not copied here: the caller brings them,
            before :meth:`run`, to the memory that :meth:`room` gives.

    Attributes:
        writes: the same chunks, to be written from the copy, in this order.
        arena_bytes: host memory used.
        largest_bytes: memory of the largest chunk.
        all_at_once: whether everything has room, so that nobody need write before all is copied.
        error: why the copy failed, if it did.
    """

    def __init__(
        self,
        writes: Sequence[ChunkWrite],
        *,
        pool: HostPool | None = None,
        budget_bytes: int | None = None,
        threads: int | None = None,
        brought: int = 0,
    ) -> None:
        self._pool = pool or POOL
        self._threads = threads or default_threads()
        chunks = [StagedChunk(self, item) for item in writes]
        self._brought, self._rest = deque(chunks[:brought]), chunks[brought:]
        sizes = [chunk.size for chunk in chunks]
        self.arena_bytes, self.largest_bytes = sum(sizes), max(sizes, default=0)
        self.all_at_once = budget_bytes is None or self.arena_bytes <= budget_bytes
        if budget_bytes is not None and not self.all_at_once:
            self.arena_bytes = max(budget_bytes, self.largest_bytes)
            if self.arena_bytes > budget_bytes:
                logger.warning(
                    "a chunk of %d bytes does not fit the staging budget of %d bytes, which is "
                    "raised for it; save with a smaller target_chunk_bytes",
                    self.largest_bytes,
                    budget_bytes,
                )
        self._head = 0
        self._taken: deque[StagedChunk] = deque()
        self._changed = threading.Condition()
        self._complete = False
        self.error: BaseException | None = None
        devices = {d for item in writes if (d := _device(item)) is not None}
        self._devices = {device: DeviceCopies(device) for device in devices}
        first = next(iter(devices), None)
        self._arena: _Arena | None = self._pool.take(self.arena_bytes, device=first)
        self.writes = [
            ChunkWrite(item.array, item.index, chunk)
            for item, chunk in zip(writes, chunks, strict=True)
        ]

    # -- the side that copies ------------------------------------------------------------------

    def room(self, count: int) -> list[NDArray[np.uint8]]:
        """Memory for the next ``count`` chunks that are brought; waits until there is room for all
        of them, which together must fit :attr:`arena_bytes`.

        Raises:
            BaseException: what :meth:`fail` was given.
        """
        chunks = [self._brought[number] for number in range(count)]
        self._take(chunks)
        return [self._memory(chunk) for chunk in chunks]

    def filled(self, writes: Sequence[object]) -> None:
        """The memory that :meth:`room` gave holds these chunks now."""
        with self._changed:
            for _ in writes:
                chunk = self._brought.popleft()
                chunk.data, chunk.item = self._array(chunk), None
            self._changed.notify_all()

    def run(self) -> None:
        """Copy everything, or as much at a time as there is room for. Called once.

        An error is kept for the other side and for :meth:`wait`, and not raised.
        """
        chunks, self._rest = self._rest, []
        try:
            if self.all_at_once:
                self._take(chunks)
                run_batched(
                    chunks,
                    self._copy,
                    threads=self._threads,
                    weight=lambda chunk: chunk.size,
                    batch_weight=COPY_BATCH_BYTES,
                )
            else:
                for chunk in chunks:
                    self._take((chunk,))
                    self._copy((chunk,))
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def _copy(self, chunks: Sequence[StagedChunk]) -> None:
        for chunk in chunks:
            if self.error is not None:
                raise self.error
            item, data, event = chunk.item, self._array(chunk), None
            assert item is not None
            if isinstance(item.source, DevicePart) and item.source.tensor.device in self._devices:
                event = self._devices[item.source.tensor.device].copy(item.source.tensor, data)
            else:
                copy_bits(data, item.data())
            chunk.item = None  # the state's memory is the caller's again
            with self._changed:
                chunk.data, chunk.event = data, event
                if not self.all_at_once:
                    self._changed.notify_all()

    def _take(self, chunks: Sequence[StagedChunk]) -> None:
        """Give chunks their places, all at once: with some of them a rank could wait for itself."""
        total = sum(chunk.size for chunk in chunks)
        with self._changed:
            while (start := self._fit(total)) is None and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise self.error
            assert start is not None
            for chunk in chunks:
                chunk.start = start
                start += chunk.size
            self._head = start
            self._taken.extend(chunks)

    def _fit(self, size: int) -> int | None:
        if not self._taken:
            return 0
        tail = self._taken[0].start
        if self._head > tail:
            if self._head + size <= self.arena_bytes:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    def _memory(self, chunk: StagedChunk) -> NDArray[np.uint8]:
        assert self._arena is not None
        return self._arena.memory[chunk.start : chunk.start + chunk.data_bytes]

    def _array(self, chunk: StagedChunk) -> NDArray[Any]:
        return self._memory(chunk).view(chunk.dtype).reshape(chunk.shape)

    # -- the side that writes ------------------------------------------------------------------

    def copied(self, chunk: StagedChunk) -> NDArray[Any]:
        """See :class:`StagedChunk`."""
        with self._changed:
            while chunk.data is None and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise self.error
            data, event = chunk.data, chunk.event
        assert data is not None
        if event is not None:
            event.wait()
        return data

    def release(self, chunk: StagedChunk) -> None:
        """A chunk's memory may be used again."""
        if self.all_at_once:
            return
        with self._changed:
            chunk.data = chunk.event = None
            chunk.released = True
            while self._taken and self._taken[0].released:
                self._taken.popleft()
            self._changed.notify_all()

    # -- both ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, *, host: bool = False) -> bool:
        """Wait until the state may be changed.

        Args:
            timeout: seconds; ``None``: as long as it takes.
            host: wait for device copies too; else only what is queued on the caller's current
                streams from here on waits for them, which costs the caller no time.

        Returns:
            Whether the copy is complete. After an error it is as good as complete: nothing reads
            the state any more.
        """
        if not self.wait_queued(timeout):
            return False
        for device in self._devices.values():
            device.wait(host=host)
        return True

    def wait_queued(self, timeout: float | None = None) -> bool:
        """Wait until host chunks are copied and device copies queued; no stream waits for any."""
        with self._changed:
            return self._changed.wait_for(lambda: self._complete, timeout)

    def fail(self, error: BaseException) -> None:
        """Stop: the copier, and every thread that waits for the copy or for room, raises this."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back. Called once nothing reads the copy; waits for the copier."""
        self.wait(host=True)
        arena, self._arena = self._arena, None
        if arena is not None:
            self._pool.give_back(arena)


def _device(item: ChunkWrite) -> torch.device | None:
    source = item.source
    if isinstance(source, DevicePart) and source.tensor.device.type == "cuda":
        return source.tensor.device
    return None


def copy_bits(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy bits: foreign data types would be copied element by element, under the GIL."""
    word = _WORDS.get(target.dtype.itemsize)
    if word is not None:
        target, source = target.view(word), source.view(word)
    np.copyto(target, source)
