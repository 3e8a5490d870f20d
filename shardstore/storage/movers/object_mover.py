"""The mover for object stores: whole chunks, one PUT each; ranged GETs, verified.

Chunks are the same bytes as in files (the chunk, then its crc32c). A PUT creates: where an object
of that name is there already, it is either our own (the answer to an earlier try was lost), or the
attempt that this save is a part of decides. Each of a number of threads carries out one request
after the other; memory for chunks under way stays within a budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

import xxhash

from shardstore.errors import StorageError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.chunk_bytes import free_scratch
from shardstore.storage.movers.chunks import (
    ChunkPart,
    ChunkWrite,
    ReadDone,
    RegionRead,
    chunk_parts,
)
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.object_chunks import (
    SMALL_BYTES,
    ChunkSink,
    encode,
    held_bytes,
    stored_bytes,
)
from shardstore.storage.movers.verify import MISSING, Expected, chunk_error, receive
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import (
    LARGE_BYTES,
    MAX_OBJECT_BYTES,
    ObjectIO,
    each,
    object_io,
)

__all__ = ["ObjectMover"]

T = TypeVar("T")

REQUEST_BYTES = 16 * 1024
"""What a request weighs beside its data."""
SMALL_UNCOUNTED_FROM = 64 * 1024 * 1024
"""A budget from this on has room in what it keeps back anyway for a small object on each of 64
threads, twice: as it came, and as bytes."""


class ObjectMover:
    """Moves chunks between memory and an object store.

    Args:
        location: root of the checkpoint.
        attempt: the attempt that is written, which says whether it still owns its target.
        budget_bytes: memory for chunks under way; one chunk that is larger goes alone.
    """

    def __init__(
        self,
        location: Location,
        *,
        attempt: Attempt | None = None,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
    ) -> None:
        self.location = location
        self.budget_bytes = budget_bytes
        self._attempt = attempt
        self._done = threading.Lock()

    @property
    def _uncounted_bytes(self) -> int:
        """Chunks up to this size do not wait for room in the budget."""
        return SMALL_BYTES if self.budget_bytes >= SMALL_UNCOUNTED_FROM else 0

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""
        for array in {item.array for item in writes}:
            if not (array.is_plain or array.is_packed):
                raise ValueError(f"chunks of key {array.key!r} have codecs {array.codecs}")
        for item in writes:
            if stored_bytes(item.array) > MAX_OBJECT_BYTES:
                raise self._too_large(item)
        uncounted = self._uncounted_bytes

        def work(io: ObjectIO, budget: _Budget, batch: Sequence[ChunkWrite]) -> None:
            size = number = 0
            try:
                for item in batch:
                    if item.array.chunk_bytes <= uncounted and not callable(item.source):
                        record = self._write(io, item)
                    else:
                        with budget.take(held_bytes(item), item.array.chunk_bytes):
                            record = self._write(io, item)
                    size += record.stored_bytes
                    number += 1
                    with self._done:  # at once: the source of the next may wait for this one
                        done(item, record)
            finally:
                counters.add(bytes_written=size, chunks_written=number)

        self._each(writes, work, lambda item: item.array.chunk_bytes)

    def _write(self, io: ObjectIO, item: ChunkWrite) -> ChunkRecord:
        try:
            parts, record = encode(item)
            if item.array.chunk_bytes >= LARGE_BYTES:
                free_scratch()  # more threads come by here than may send large objects at a time
            if not io.put(_key(item.array, item.index), parts, create=True):
                self._settle(io, item, parts)
        except StorageError as error:
            _say_which(error, item)
            raise
        return record

    def _settle(self, io: ObjectIO, item: ChunkWrite, parts: list[bytes | memoryview]) -> None:
        """There is an object of a chunk's name: ours, a leftover, or a newer attempt's."""
        key = _key(item.array, item.index)
        url = f"{self.location.url}/{key}"
        there = _holds(io, key, parts)
        if there is None and io.put(key, parts, create=True):
            return
        if there is None:
            raise StorageError(
                f"writing {url} failed: the store neither takes it nor has it; save again",
                url=url,
            )
        if there:
            return
        if self._attempt is None:
            raise StorageError(f"{url} exists already, with other content; save elsewhere", url=url)
        self._attempt.check()
        io.put(key, parts, create=False)

    def _too_large(self, item: ChunkWrite) -> StorageError:
        url = f"{self.location.url}/{_key(item.array, item.index)}"
        return StorageError(
            f"chunk {item.index} of key {item.array.key!r} has {stored_bytes(item.array)} bytes, "
            f"and one request takes at most {MAX_OBJECT_BYTES}; save in smaller chunks, as the "
            "default strategy ('zarr', 2) does",
            key=item.array.key,
            chunk=item.index,
            url=url,
        )

    # -- reading -------------------------------------------------------------------------------

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None = None,
    ) -> None:
        """See :meth:`Mover.read`. Whole chunks are also held against the commit, so that what a
        late writer of another save left is found."""
        parts = [part for read in reads for part in chunk_parts(read)]
        uncounted = self._uncounted_bytes

        def one(io: ObjectIO, budget: _Budget, part: ChunkPart) -> int:
            key = f"{part.array.node}/{part.key}"
            expected = Expected.of(part, manifest)
            try:
                if part.is_whole and part.array.chunk_bytes <= uncounted:
                    data = io.get(key)
                    size = None if data is None else len(data)
                    problem = MISSING if data is None else receive(part, expected, data)
                else:
                    sink = ChunkSink(part, expected)
                    with budget.take(sink.held_bytes, sink.size):
                        size = io.fetch(key, *sink.request, sink.take, sink.size)
                        problem = MISSING if size is None else sink.finish()
            except StorageError as error:
                _say_which(error, part)
                raise
            if problem is not None or size is None:
                url = f"{self.location.url}/{key}"
                raise chunk_error(part.array, part.index, url, problem or MISSING, manifest)
            return size

        def work(io: ObjectIO, budget: _Budget, batch: Sequence[ChunkPart]) -> None:
            size = number = taken = 0
            try:
                for part in batch:
                    size += one(io, budget, part)
                    taken += part.out.nbytes
                    number += 1
            finally:
                counters.add(bytes_read=size, chunks_read=number)
            if done is not None:
                done(taken, number)

        self._each(parts, work, lambda part: part.array.chunk_bytes)

    def _each(
        self,
        items: Sequence[T],
        work: Callable[[ObjectIO, _Budget, Sequence[T]], None],
        size: Callable[[T], int],
    ) -> None:
        """Run work on all items."""
        if not items:
            return
        with closing(object_io(self.location)) as io:
            budget = _Budget(self.budget_bytes, io.threads)
            small = any(size(item) < LARGE_BYTES for item in items)
            threads = io.small_threads if small else io.threads

            def watched(batch: Sequence[T]) -> None:
                try:
                    work(io, budget, batch)
                except BaseException as error:
                    budget.stop(error)
                    raise

            try:
                each(items, watched, threads)
            finally:
                free_scratch()


class _Budget:
    """What may be under way at a time.

    Args:
        budget_bytes: memory; what takes more than all of it goes alone.
        large: objects from :data:`LARGE_BYTES` on.
    """

    def __init__(self, budget_bytes: int, large: int) -> None:
        # An eighth for connections, and for what the allocator keeps back.
        self._free = self._all = budget_bytes - budget_bytes // 8
        self._large = large
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def stop(self, error: BaseException) -> None:
        """Let nothing more go: who waits for room raises this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @contextmanager
    def take(self, held: int, size: int) -> Iterator[None]:
        """Wait until an object of ``size`` bytes, which takes ``held`` bytes of memory, may go; it
        is under way within."""
        held = min(held + REQUEST_BYTES, self._all)
        large = int(size >= LARGE_BYTES)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or (self._free >= held and self._large >= large)
            )
            if self._error is not None:
                raise self._error
            self._free -= held
            self._large -= large
        try:
            yield
        finally:
            with self._changed:
                self._free += held
                self._large += large
                self._changed.notify_all()


def _say_which(error: StorageError, what: ChunkWrite | ChunkPart) -> None:
    """Have an error of the store say which chunk it is about."""
    if error.key is None:
        error.key, error.chunk = what.array.key, what.index
        error.message += f" (chunk {what.index} of key {what.array.key!r})"


def _holds(io: ObjectIO, key: str, parts: Sequence[bytes | memoryview]) -> bool | None:
    """Whether an object has this content; ``None``: there is none. Neither is kept in memory."""
    there, ours = xxhash.xxh3_128(), xxhash.xxh3_128()

    def take(position: int, piece: memoryview) -> None:
        if position == 0:
            there.reset()
        there.update(piece)

    size = io.fetch(key, 0, None, take, sum(map(len, parts)))
    if size is None:
        return None
    if size != sum(map(len, parts)):
        return False
    for part in parts:
        ours.update(part)
    return bool(there.digest() == ours.digest())


def _key(array: ArrayMeta, index: Sequence[int]) -> str:
    return f"{array.node}/{array.chunk_key(index)}"
