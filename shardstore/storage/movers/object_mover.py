"""The mover for object stores: whole chunks, one PUT each; whole or ranged GETs, verified.

Chunks are the same bytes as in files (the chunk, then its crc32c). A PUT creates: where an object
of that name is there already, it is either our own (the answer to an earlier try was lost), or the
attempt that this save is a part of decides. Memory for chunks under way stays within a budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from shardstore.errors import StorageError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.chunk_bytes import lies_as_chunk
from shardstore.storage.movers.chunks import (
    ChunkPart,
    ChunkWrite,
    ReadDone,
    RegionRead,
    chunk_parts,
)
from shardstore.storage.movers.codecs import CRC_BYTES, EncodedChunk
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.verify import MISSING, Expected, chunk_error, receive
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import (
    LARGE_BYTES,
    MAX_OBJECT_BYTES,
    ObjectIO,
    object_io,
    run_requests,
)

T = TypeVar("T", ChunkWrite, ChunkPart)

_Request = Iterator[tuple[int, int] | None]
"""A request in three steps: yields the memory and the size of its object, then begins and yields
``None``, then waits for its end."""

CONNECTION_BYTES = 512 * 1024
"""The buffer of a connection of TensorStore's; small objects fill a part of it."""


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

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""
        for array in {item.array for item in writes}:
            if not (array.is_plain or array.is_packed):
                raise ValueError(f"chunks of key {array.key!r} have codecs {array.codecs}")
        for item in writes:
            if _stored_bytes(item.array) > MAX_OBJECT_BYTES:
                raise self._too_large(item)

        def request(io: ObjectIO, item: ChunkWrite) -> _Request:
            yield _held_bytes(item), item.array.chunk_bytes
            chunk = EncodedChunk(item.array, item.data())
            (parts,) = chunk
            key = f"{item.array.node}/{item.array.chunk_key(item.index)}"
            is_new = io.begin_put(key, parts, create=True)
            yield None
            if not is_new():
                self._settle(io, key, parts)
            counters.add(bytes_written=chunk.record.stored_bytes, chunks_written=1)
            with self._done:
                done(item, chunk.record)

        self._each(writes, request)

    def _settle(self, io: ObjectIO, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """There is an object of a chunk's name: ours, a leftover, or a newer attempt's."""
        url = f"{self.location.url}/{key}"
        there = io.get(key, size=sum(map(len, parts)))
        if there is None and io.put(key, parts, create=True):
            return
        if there is None:
            raise StorageError(
                f"writing {url} failed: the store neither takes it nor has it; save again",
                url=url,
            )
        if there == b"".join(parts):
            return
        if self._attempt is None:
            raise StorageError(f"{url} exists already, with other content; save elsewhere", url=url)
        self._attempt.check()
        io.put(key, parts, create=False)

    def _too_large(self, item: ChunkWrite) -> StorageError:
        array = item.array
        url = f"{self.location.url}/{array.node}/{array.chunk_key(item.index)}"
        return StorageError(
            f"chunk {item.index} of key {array.key!r} has {_stored_bytes(array)} bytes, "
            f"and one request takes at most {MAX_OBJECT_BYTES}; save in smaller chunks, as the "
            "default strategy ('zarr', 2) does",
            key=array.key,
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

        def request(io: ObjectIO, part: ChunkPart) -> _Request:
            array, key = part.array, f"{part.array.node}/{part.key}"
            expected = Expected.of(part, manifest)
            size = expected.last - expected.first
            is_whole = expected.sums is None and size == array.chunk_bytes
            # A packed one is there as it came, twice, and unpacked.
            yield 3 * size if array.is_packed else size, size
            stop = None if is_whole else expected.last
            get = io.begin_get(key, expected.first, stop, size=size)
            yield None
            data = get()
            del get  # and TensorStore's copy
            problem = MISSING if data is None else receive(part, expected, data)
            if problem is not None:
                url = f"{self.location.url}/{key}"
                raise chunk_error(array, part.index, url, problem, manifest)
            counters.add(bytes_read=len(data or b""), chunks_read=1)
            del data
            if done is not None:
                done(part.out.nbytes, 1)

        self._each([part for read in reads for part in chunk_parts(read)], request)

    def _each(self, items: Sequence[T], request: Callable[[ObjectIO, T], _Request]) -> None:
        """Carry out one request an item; errors of the store say which chunk they are about."""
        if not items:
            return
        io = object_io(self.location)
        sizes = {item.array.chunk_bytes for item in items}
        budget = _Budget(self.budget_bytes, io.requests, max(sizes))

        @contextmanager
        def about(item: T) -> Iterator[None]:
            try:
                yield
            except BaseException as error:
                budget.stop(error)
                if isinstance(error, StorageError) and error.key is None:
                    error.key, error.chunk = item.array.key, item.index
                    error.message += f" (chunk {item.index} of key {item.array.key!r})"
                raise

        def begin(item: T, may_wait: bool) -> Callable[[], None] | None:
            with about(item):
                steps = request(io, item)
                weight = next(steps)
                assert weight is not None
                if not budget.take(*weight, may_wait=may_wait):
                    return None
                next(steps)

            def finish() -> None:
                with about(item):
                    next(steps, None)
                budget.give(*weight)

            return finish

        run_requests(io, items, begin, small=min(sizes) < LARGE_BYTES)


def _stored_bytes(array: ArrayMeta) -> int:
    """Size of a chunk's object, if it is not compressed."""
    return array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)


def _held_bytes(item: ChunkWrite) -> int:
    """Memory that putting a chunk takes, beside its source: what is sent, what it is gathered in,
    and what a function makes."""
    array, source = item.array, item.source
    stored = _stored_bytes(array)
    box, shape = array.grid.box(item.index), array.grid.chunk_shape
    made = box.size * dtypes.itemsize(array.dtype) if callable(source) else 0
    gathered = box.shape != shape if callable(source) else not lies_as_chunk(source, shape)
    # The compressor's output, and as much again for what the allocator keeps of it.
    return stored * (1 + gathered + array.is_packed) + made


class _Budget:
    """What may be under way at a time.

    Args:
        budget_bytes: memory; what takes more than all of it goes alone.
        large: objects from :data:`LARGE_BYTES` on.
        largest: bytes of the largest object, one of which is in memory twice at a time.
    """

    def __init__(self, budget_bytes: int, large: int, largest: int) -> None:
        # An eighth for connections, and for what the allocator keeps back.
        room = budget_bytes - budget_bytes // 8
        self._free = self._all = max(room - largest, room // 2)
        self._large = large
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def stop(self, error: BaseException) -> None:
        """Let nothing more go: who waits for room raises this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, held: int, size: int, *, may_wait: bool) -> bool:
        """Make room for an object of ``size`` bytes, which takes ``held`` bytes of memory, until
        :meth:`give`; ``False``: there is none, and the caller may not wait for it."""
        memory, large = self._of(held, size)
        with self._changed:
            while self._error is None:
                if self._free >= memory and self._large >= large:
                    self._free -= memory
                    self._large -= large
                    return True
                if not may_wait:
                    return False
                self._changed.wait()
            raise self._error

    def give(self, held: int, size: int) -> None:
        """Give back the room of an object."""
        memory, large = self._of(held, size)
        with self._changed:
            self._free += memory
            self._large += large
            self._changed.notify_all()

    def _of(self, held: int, size: int) -> tuple[int, int]:
        return min(held + min(size, CONNECTION_BYTES), self._all), int(size >= LARGE_BYTES)
