"""A copy of the chunks to be written, in host memory that is kept from save to save.

Answers for when the state may be changed again: once every chunk has been copied. The copy lies in
one arena: as large as the state where the budget allows (then everything is copied first, at full
speed, and written afterwards), else a ring that chunks pass through in the order of their writing,
so that copying and writing overlap. Device chunks are copied by a stream of their own, which waits
for what the caller's stream had queued and which nobody's stream waits for unless asked to.

It knows chunks and memory; not files, ranks or checkpoints.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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

__all__ = ["HostPool", "StagedChunk", "Staging", "copy_bits", "default_pool", "staged_bytes"]

logger = getLogger(__name__)

ALIGNMENT = 64
COPY_BATCH_BYTES = 4 * 1024 * 1024
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass
class _Arena:
    memory: NDArray[np.uint8]
    device: torch.device | None
    """For copies of what it is page-locked, or was to be."""
    pinned: bool = False


class HostPool:
    """Host memory that is reused: its pages are touched, and pinned, once.

    Safe from any thread. Keeps one arena between saves, the last one given back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: _Arena | None = None

    def take(self, size: int, *, device: torch.device | None = None) -> _Arena:
        """An arena of at least ``size`` bytes, page-locked for CUDA if it is for a CUDA device.
        Where the system refuses that, it is ordinary memory, with a warning.

        Raises:
            MemoryError, OSError: the system has not that much memory.
        """
        with self._lock:
            arena, self._free = self._free, None
        if arena is not None:
            serves = device is None or arena.device is not None
            if serves and size <= len(arena.memory) <= max(2 * size, 1 << 20):
                return arena
            _unpin(arena)
            arena = None  # its memory goes before the new one comes
        arena = _Arena(_map(size), device)
        _pin(arena)
        return arena

    def give_back(self, arena: _Arena) -> None:
        """Keep an arena for the next save."""
        with self._lock:
            old, self._free = self._free, arena
        if old is not None:
            _unpin(old)

    def clear(self) -> None:
        """Give the memory that is kept back to the system."""
        with self._lock:
            arena, self._free = self._free, None
        if arena is not None:
            _unpin(arena)

    @property
    def kept_bytes(self) -> int:
        """Memory kept for the next save."""
        with self._lock:
            return 0 if self._free is None else len(self._free.memory)


def _map(size: int) -> NDArray[np.uint8]:
    """Fresh memory in huge pages, where there are any: a first touch costs a fraction then."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def _pin(arena: _Arena) -> None:
    if arena.device is None:
        return
    size = len(arena.memory)
    code = page_lock(arena.memory, arena.device)
    arena.pinned = code == 0
    if code:
        logger.warning(
            "page-locking %d bytes of host memory for staging failed with CUDA error %d: device "
            "tensors are copied more slowly, and training may wait for it; lower the staging "
            "budget, or raise the limit of locked memory (ulimit -l)",
            size,
            code,
        )


def _unpin(arena: _Arena) -> None:
    if arena.device is not None and arena.pinned:
        arena.pinned = False
        code = page_unlock(arena.memory, arena.device)
        if code:
            raise StorageError(
                f"giving back page-locked memory failed with CUDA error {code}: the device is in "
                "no state to be used"
            )


_pool = HostPool()


def default_pool() -> HostPool:
    """The pool of this process."""
    return _pool


class _Ring:
    """Where in an arena each chunk goes: taken in order, released in any, reused in order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._head = 0
        self._taken: deque[list[int]] = deque()  # start, end, released
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def take(self, size: int) -> list[int]:
        """A place of ``size`` bytes; waits until there is one.

        Raises:
            BaseException: what :meth:`stop` was given.
        """
        return self.take_together((size,))[0]

    def take_together(self, sizes: Sequence[int]) -> list[list[int]]:
        """Places of these sizes, all at once: who filled none of them yet could wait for itself.

        Raises:
            BaseException: what :meth:`stop` was given.
        """
        total = sum(sizes)
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                start = self._fit(total)
                if start is not None:
                    break
                self._changed.wait()
            places = []
            for size in sizes:
                places.append([start, start + size, 0])
                start += size
            self._head = start
            self._taken.extend(places)
            return places

    def _fit(self, size: int) -> int | None:
        if not self._taken:
            return 0
        tail = self._taken[0][0]
        if self._head > tail:
            if self._head + size <= self._size:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    def release(self, place: list[int]) -> None:
        with self._changed:
            place[2] = 1
            while self._taken and self._taken[0][2]:
                self._taken.popleft()
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class StagedChunk:
    """Source of a chunk's data, which waits until the chunk has been copied."""

    __slots__ = ("_number", "_staging")

    def __init__(self, staging: Staging, number: int) -> None:
        self._staging = staging
        self._number = number

    def __call__(self) -> NDArray[Any]:
        return self._staging.copied(self._number)

    def wait(self) -> None:
        """Return once the chunk has been copied; errors as :meth:`Staging.copied`."""
        self._staging.copied(self._number)

    def would_wait(self) -> bool:
        """Whether asking for the data means waiting, perhaps for others to be released."""
        return not self._staging.has_come(self._number)

    def release(self) -> None:
        """The chunk is written: its memory may be used again."""
        self._staging.release(self._number)

    def fail(self, error: BaseException) -> None:
        """The chunk can not be written: who waits for its memory shall not wait for ever."""
        self._staging.fail(error)


class Staging:
    """The copy of one save's chunks.

    Created and, unless copying shall overlap with what comes next, run by the caller's thread;
    another thread writes :attr:`writes`. Whatever happens, :meth:`close` gives the memory back.

    Args:
        writes: what is to be written, out of the state's own memory.
        pool: where memory comes from.
        budget_bytes: most host memory to use; ``None``: as much as the chunks need. A chunk larger
            than that raises it to its own size.
        threads: threads that copy.
        brought: so many of the chunks, the first ones, are not copied here: the caller brings them,
            before :meth:`run`, to the memory that :meth:`room` gives.

    Attributes:
        writes: the same chunks, to be written from the copy, in this order.
        arena_bytes: host memory used.
        all_at_once: whether everything has room, so that nobody need write before all is copied.
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
        self._pool = pool or _pool
        self._threads = threads or default_threads()
        self._brought, self._roomy = brought, 0
        self._sources: list[ChunkWrite | None] = list(writes)
        self._sizes = [staged_bytes(item) for item in writes]
        total, self.largest_bytes = sum(self._sizes), max(self._sizes, default=0)
        self.all_at_once = not brought and (budget_bytes is None or total <= budget_bytes)
        self.arena_bytes = total
        if budget_bytes is not None and total > budget_bytes:
            self.arena_bytes = max(budget_bytes, self.largest_bytes)
            if self.arena_bytes > budget_bytes:
                logger.warning(
                    "a chunk of %d bytes does not fit the staging budget of %d bytes, which is "
                    "raised for it; save with a smaller target_chunk_bytes",
                    self.largest_bytes,
                    budget_bytes,
                )
        self._ring = _Ring(self.arena_bytes)
        self._places: list[list[int] | None] = [None] * len(writes)
        self._views: list[NDArray[Any] | None] = [None] * len(writes)
        self._events: list[DeviceEvent | None] = [None] * len(writes)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._complete = False
        devices = {d for item in writes if (d := _device(item)) is not None}
        self._devices = {device: DeviceCopies(device) for device in devices}
        first = next(iter(devices), None)
        self._arena: _Arena | None = self._pool.take(self.arena_bytes, device=first)
        self.writes = [
            ChunkWrite(item.array, item.index, StagedChunk(self, number))
            for number, item in enumerate(writes)
        ]

    # -- the side that copies ------------------------------------------------------------------

    def room(self, count: int) -> list[NDArray[np.uint8]]:
        """Memory for the next ``count`` chunks that are brought; waits until there is room for all
        of them, which together must fit :attr:`arena_bytes`.

        Raises:
            BaseException: what :meth:`fail` was given.
        """
        numbers = range(self._roomy, self._roomy + count)
        places = self._ring.take_together([self._sizes[number] for number in numbers])
        assert self._arena is not None
        found = []
        for number, place in zip(numbers, places, strict=True):
            self._places[number] = place
            size = _data_bytes(self.writes[number])
            found.append(self._arena.memory[place[0] : place[0] + size])
        return found

    def filled(self, memory: Sequence[NDArray[np.uint8]]) -> None:
        """What :meth:`room` gave holds its chunks now."""
        for data in memory:
            item = self.writes[self._roomy]
            dtype = dtypes.numpy_dtype(item.array.dtype)
            view = data.view(dtype).reshape(item.array.grid.box(item.index).shape)
            with self._changed:
                self._views[self._roomy] = view
                self._roomy += 1
                self._changed.notify_all()

    def run(self) -> None:
        """Copy everything, or as much at a time as there is room for. Called once.

        An error is kept for the other side and for :meth:`wait`, and not raised.
        """
        try:
            numbers = range(self._brought, len(self._sources))
            if self.all_at_once:
                for number in numbers:
                    self._places[number] = self._ring.take(self._sizes[number])
                run_batched(
                    numbers,
                    self._copy_batch,
                    threads=self._threads,
                    weight=self._sizes.__getitem__,
                    batch_weight=COPY_BATCH_BYTES,
                )
            else:
                for number in numbers:
                    self._places[number] = self._ring.take(self._sizes[number])
                    self._copy_batch((number,))
        except BaseException as error:
            self.fail(error)
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def _copy_batch(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            item, place, arena = self._sources[number], self._places[number], self._arena
            assert item is not None
            assert place is not None
            assert arena is not None
            shape = item.array.grid.box(item.index).shape
            dtype = dtypes.numpy_dtype(item.array.dtype)
            stop = place[0] + _data_bytes(item)
            view = arena.memory[place[0] : stop].view(dtype).reshape(shape)
            event = None
            if self._error is not None:
                raise self._error
            if isinstance(item.source, DevicePart) and item.source.tensor.device in self._devices:
                copies = self._devices[item.source.tensor.device]
                event = copies.copy(item.source.tensor, view)
            else:
                copy_bits(view, item.data())
            self._sources[number] = None  # the state's memory is the caller's again
            with self._changed:
                self._views[number], self._events[number] = view, event
                if not self.all_at_once:
                    self._changed.notify_all()

    # -- the side that writes ------------------------------------------------------------------

    def copied(self, number: int) -> NDArray[Any]:
        """A chunk's copy; waits for it.

        Raises:
            BaseException: copying failed, or was stopped.
        """
        with self._changed:
            while self._views[number] is None and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            view, event = self._views[number], self._events[number]
        assert view is not None
        if event is not None:
            event.wait()
        return view

    def has_come(self, number: int) -> bool:
        """Whether :meth:`copied` would not wait, but for a device."""
        with self._changed:
            return self._views[number] is not None or self._error is not None

    def release(self, number: int) -> None:
        """A chunk's memory may be used again."""
        place = self._places[number]
        assert place is not None
        if not self.all_at_once:
            with self._changed:
                self._views[number] = self._events[number] = None
        self._ring.release(place)

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

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, if it did."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Stop: whoever copies or waits for a copy raises this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._ring.stop(error)

    def close(self) -> None:
        """Give the memory back. Called once nothing reads the copy; waits for who still copies."""
        self.wait(host=True)
        arena, self._arena = self._arena, None
        self._views = []
        self._sources = []
        if arena is not None:
            self._pool.give_back(arena)


def _data_bytes(item: ChunkWrite) -> int:
    return item.array.grid.box(item.index).size * dtypes.itemsize(item.array.dtype)


def staged_bytes(item: ChunkWrite) -> int:
    """Memory that a chunk takes in the copy."""
    return -(-_data_bytes(item) // ALIGNMENT) * ALIGNMENT


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
