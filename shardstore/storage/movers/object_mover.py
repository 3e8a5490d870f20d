"""Chunks in object stores: one PUT for each chunk; whole or ranged GETs, verified.

An object has the same bytes as a chunk file (the chunk, then its crc32c). A PUT is conditional: it
creates the object or fails. If an object of that name exists, it is either the result of an earlier
try whose answer was lost, or the attempt of this save decides whether to overwrite it. The memory
for chunks in transfer stays within a budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shardstore.errors import StorageError
from shardstore.storage.format import dtypes
from shardstore.storage.movers import codecs
from shardstore.storage.movers.chunk_bytes import lies_as_chunk
from shardstore.storage.movers.chunks import ChunkPart, ChunkWrite, GetManifest, ReadDone, WriteDone
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.object_io import (
    LARGE_BYTES,
    MAX_OBJECT_BYTES,
    ObjectIO,
    run_requests,
)
from shardstore.storage.stores.objects import begin_create, object_io

if TYPE_CHECKING:
    from shardstore.storage.movers.mover import Mover

T = TypeVar("T", ChunkWrite, ChunkPart)

_Request = Iterator[tuple[int, int, int] | None]
"""A request in three steps: it yields the memory that it needs, the further memory that only its
start needs, and the size of its object in bytes; then starts and yields ``None``; then waits for
the end."""

CONNECTION_BYTES = 512 * 1024
"""Buffer size of a TensorStore connection; a small object fills only a part of the buffer."""
LEAST_CONNECTION_BYTES = 96 * 1024
"""Memory of a TensorStore connection with a small object."""


def write_objects(mover: Mover, writes: Sequence[ChunkWrite], done: WriteDone) -> None:
    """Write chunks as objects, see :meth:`Mover.write`. A chunk larger than the memory budget
    transfers alone. Without an attempt, objects of the same names are replaced."""
    location, attempt, lock = mover.location, mover.attempt, threading.Lock()

    def request(io: ObjectIO, item: ChunkWrite) -> _Request:
        if (stored := codecs.uncompressed_bytes(item.array)) > MAX_OBJECT_BYTES:
            raise location.child(item.name).error(
                f" has {stored} bytes, and one request takes at most {MAX_OBJECT_BYTES}; save in "
                "smaller chunks, as the default strategy ('zarr', 2) does"
            )
        yield _held_bytes(item), stored if item.array.is_packed else 0, item.array.chunk_bytes
        chunk = codecs.EncodedChunk(item.array, item.data())
        (parts,) = chunk
        check = attempt.check if attempt else lambda: None
        create = begin_create(io, location, item.name, parts, check)
        yield None
        create()
        counters.add(bytes_written=chunk.record.stored_bytes, chunks_written=1)
        with lock:
            done(item, chunk.record)

    _each(mover, writes, request)


def read_objects(
    mover: Mover, parts: Sequence[ChunkPart], manifest: GetManifest, done: ReadDone
) -> None:
    """Read parts of chunks from objects, see :meth:`Mover.read`. Whole chunks are also compared
    with the commit, which detects chunks that a late writer of another save has overwritten."""

    def request(io: ObjectIO, part: ChunkPart) -> _Request:
        array, key = part.array, part.array.chunk_name(part.index)
        verifier = ChunkVerifier.of(part, manifest)
        size = verifier.last - verifier.first
        # A compressed chunk is in memory three times: twice as received, and decompressed.
        yield 3 * size if array.is_packed else size, 0, size
        stop: int | None = verifier.last
        if not verifier.sums and size == array.chunk_bytes:
            # The commit of an older checkpoint lacks the sizes of compressed chunks.
            is_known = codecs.stored_bytes(array, part.number) is not None or io.reads_past_end
            stop = io.end_of(codecs.most_stored_bytes(array, part.number)) if is_known else None
        get = io.begin_get(key, verifier.first, stop, size=size)
        yield None
        data = get()
        del get  # frees TensorStore's copy
        try:
            if data is None:
                raise codecs.BadChunkError("missing", "is missing")
            verifier.update(memoryview(data))
            verifier.finish()
        except codecs.BadChunkError as problem:
            url = f"{mover.location.url}/{key}"
            raise chunk_error(array, part.index, url, problem, manifest) from None
        verifier.scatter(part, verifier.chunk or data)
        counters.add(bytes_read=len(data), chunks_read=1)
        del data, verifier
        done(part.out.nbytes, 1)

    _each(mover, parts, request)


def _each(mover: Mover, items: Sequence[T], request: Callable[[ObjectIO, T], _Request]) -> None:
    """Run one request for each item. Add key and chunk to errors of the store."""
    if not items:
        return
    io = object_io(mover.location)
    sizes = {item.array.chunk_bytes for item in items}
    budget = _Budget(mover.options.budget_bytes, io, max(sizes))

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
            needs = next(steps)
            assert needs is not None
            held, starting, size = needs
            if not budget.take(held + starting, size, may_wait=may_wait):
                return None
            next(steps)
            budget.give(held + starting, size, left=held)

        def finish() -> None:
            with about(item):
                next(steps, None)
            budget.give(held, size)

        return finish

    run_requests(io, items, begin, small=min(sizes) < LARGE_BYTES)


def _held_bytes(item: ChunkWrite) -> int:
    """Return the memory in bytes that a PUT of a chunk takes in addition to its source: the request
    body, the gathered chunk, and the result of a source function."""
    array, source = item.array, item.source
    stored = codecs.uncompressed_bytes(array)
    box, shape = array.grid.box(item.index), array.grid.chunk_shape
    made = box.size * dtypes.itemsize(array.dtype) if callable(source) else 0
    gathered = box.shape != shape if callable(source) else not lies_as_chunk(source, shape)
    # A compressed chunk counts once more, for the memory that the allocator keeps.
    return stored * (1 + gathered + array.is_packed) + made


class _Budget:
    """Limits on the memory and the number of large objects in transfer.

    Args:
        budget_bytes: memory limit; an object that exceeds it transfers alone.
        io: puts and gets the objects; :attr:`ObjectIO.requests` limits the number of objects of at
            least :data:`LARGE_BYTES`.
        largest: size of the largest object in bytes; one such object at a time is in memory twice.
    """

    def __init__(self, budget_bytes: int, io: ObjectIO, largest: int) -> None:
        # Reserve an eighth for connections and for memory that the allocator keeps.
        room = budget_bytes - budget_bytes // 8
        self._free = self._all = max(room - largest, room // 2)
        self._large = io.requests
        self._least = 0 if io.blocks else LEAST_CONNECTION_BYTES
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def stop(self, error: BaseException) -> None:
        """Admit no further objects: waiting and later calls of :meth:`take` raise this error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def take(self, held: int, size: int, *, may_wait: bool) -> bool:
        """Reserve room for an object of ``size`` bytes, which needs ``held`` bytes of memory, until
        :meth:`give`. Return ``False`` if there is no room and the caller may not wait."""
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

    def give(self, held: int, size: int, *, left: int | None = None) -> None:
        """Release the room of an object; with ``left``, a part of it: the object needs ``left``
        bytes of memory from now on."""
        memory, large = self._of(held, size)
        if left is not None:
            memory, large = memory - self._of(left, size)[0], 0
        with self._changed:
            self._free += memory
            self._large += large
            self._changed.notify_all()

    def _of(self, held: int, size: int) -> tuple[int, int]:
        memory = held + min(max(size, self._least), CONNECTION_BYTES)
        return min(memory, self._all), int(size >= LARGE_BYTES)
