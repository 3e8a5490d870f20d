"""Chunks in object stores: one PUT for each chunk; whole or ranged GETs, verified.

An object has the same bytes as a chunk file (the chunk, then its crc32c). A PUT is conditional: it
creates the object or fails. If an object of that name exists, it is either the result of an earlier
try whose answer was lost, or the attempt of this save decides whether to overwrite it. The memory
for chunks in transfer stays within a budget. Parts of files of other formats are read by ranged
GETs.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from shardstore.errors import StorageError
from shardstore.storage.format import dtypes
from shardstore.storage.format.manifest import ChunkRecord
from shardstore.storage.movers import ranges
from shardstore.storage.movers.chunk_bytes import lies_as_chunk, view_in_chunk
from shardstore.storage.movers.chunks import (
    BadChunkError,
    ChunkPart,
    ChunkWrite,
    EncodedChunk,
    GetManifest,
    ReadDone,
    RegionRead,
    SmallFiles,
    WriteDone,
    most_stored_bytes,
    stored_bytes,
    uncompressed_bytes,
)
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import run_batched, run_together
from shardstore.storage.stores.object_io import (
    LARGE_BYTES,
    MAX_OBJECT_BYTES,
    Create,
    Pieces,
    Request,
    run_requests,
)
from shardstore.storage.stores.prefix import ObjectPrefix

T = TypeVar("T", ChunkWrite, ChunkPart)

CONNECTION_BYTES = 512 * 1024
"""Buffer size of a TensorStore connection; a small object fills only a part of the buffer."""
LEAST_CONNECTION_BYTES = 96 * 1024
"""Memory of a TensorStore connection with a small object."""


class ObjectMover(Mover):
    """Moves chunks between memory and objects."""

    location: ObjectPrefix

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """Write chunks and files as objects, see :meth:`Mover.write`. A chunk larger than the
        memory budget transfers alone. Objects of older attempts are replaced."""
        lock = threading.Lock()

        def written(item: ChunkWrite, record: ChunkRecord) -> None:
            counters.add(bytes_written=record.stored_bytes, chunks_written=1)
            with lock:
                done(item, record)

        jobs = list[Callable[[], None]]()
        if files:
            io, url = self.location.io(), self.location.url
            puts = [Create(io, url, name, [data], self.check) for name, data in files]
            jobs.append(partial(run_requests, io, puts))
        if writes:
            lane = _Lane(self, {item.array.chunk_bytes for item in writes}, of_puts=True)
            jobs.append(
                partial(lane.run, (_Put(item, lane, self.check, written) for item in writes))
            )
        run_together(*jobs)

    def read_parts(self, parts: Sequence[ChunkPart], manifest: GetManifest, done: ReadDone) -> None:
        """Read parts of chunks from objects, see :meth:`Mover.read_parts`. Whole chunks are also
        compared with the commit, which detects chunks that a late writer of another save has
        overwritten."""
        if parts:
            lane = _Lane(self, {part.array.chunk_bytes for part in parts}, of_puts=False)
            lane.run(_GetPart(part, lane, manifest, done) for part in parts)

    def read_discarding(self, name: str, verifier: ChunkVerifier) -> int:
        """See :meth:`Mover.read_discarding`."""
        most = most_stored_bytes(verifier.array, verifier.number)
        data = self.location.read_range(name, 0, most + 1)
        if data is None:
            raise FileNotFoundError(name)
        verifier.update(memoryview(data))
        verifier.finish()
        return verifier.count

    def fetch_range(self, name: str, first: int, last: int) -> bytes | memoryview | None:
        """See :meth:`Mover.fetch_range`. Ranges take the way of chunks, which takes half of the
        processor time of fsspec."""
        return self.location.io().get(name, first, last, size=last - first)

    def gap_bytes(self, read: RegionRead) -> int:
        """See :meth:`Mover.gap_bytes`."""
        return ranges.GAP_BYTES

    def read_slabs(self, slabs: Sequence[ranges.Slab], done: ReadDone) -> None:
        """See :meth:`Mover.read_slabs`. Near slabs are read with one request, and long ones with
        several at a time."""

        def request(batch: Sequence[list[ranges.Slab]]) -> None:
            for group in batch:
                name, first = group[0][:2]
                last = max(slab.last for slab in group)
                data = self.read_range(name, first, last)
                for slab in group:
                    own = np.frombuffer(data, np.uint8)[slab.first - first : slab.last - first]
                    slab.out[...] = view_in_chunk(own, slab.out, slab.shape)
                    done(slab.out.nbytes, 0)

        run_batched(list(ranges.grouped(slabs)), request, threads=ranges.REQUESTS)


class _Needs(NamedTuple):
    """The memory that a transfer needs in bytes, the further memory that only its start needs, and
    the size of its chunk."""

    held: int
    starting: int
    size: int


class _Lane:
    """What the transfers of one call share: the client, the URL of the location, and limits on the
    memory and the number of large objects in transfer.

    Args:
        mover: the mover. Its budget limits the memory; an object that exceeds it transfers alone.
            :attr:`ObjectIO.requests` limits the number of objects of at least :data:`LARGE_BYTES`.
        sizes: sizes of the chunks in bytes.
        of_puts: whether the chunks are written.
    """

    def __init__(self, mover: ObjectMover, sizes: Collection[int], *, of_puts: bool) -> None:
        self.io, self.url = mover.location.io(), mover.location.url
        budget_bytes = mover.options.budget_bytes
        # Reserve an eighth for connections and for memory that the allocator keeps, and room for
        # the copies of one object at a time.
        room = budget_bytes - budget_bytes // 8
        copies_bytes = max(sizes) * (self.io.put_copies if of_puts else 1)
        self._free = self._all = max(room - copies_bytes, room // 2)
        self._large = self.io.requests
        self._least = 0 if self.io.blocks else LEAST_CONNECTION_BYTES
        self._has_small = min(sizes) < LARGE_BYTES
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, transfers: Iterable[Request]) -> None:
        """Run the transfers."""
        run_requests(self.io, transfers, small=self._has_small)

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


@dataclass(slots=True)
class _Transfer(Request, Generic[T]):
    """A chunk in transfer, within a budget: :meth:`needs`, then :meth:`begin`, then :meth:`end`.
    Errors of the store get its key and index."""

    item: T
    lane: _Lane
    _needs: _Needs | None = field(default=None, init=False)

    @abstractmethod
    def needs(self) -> _Needs:
        """Return what the transfer needs."""

    @abstractmethod
    def begin(self) -> None:
        """Send the request."""

    @abstractmethod
    def end(self) -> None:
        """Wait for the answer, and hand on the result."""

    def start(self, *, may_wait: bool) -> bool:
        """See :meth:`Request.start`."""
        with self._reporting():
            held, starting, size = self._needs = self._needs or self.needs()
            if not self.lane.take(held + starting, size, may_wait=may_wait):
                return False
            self.begin()
            self.lane.give(held + starting, size, left=held)
        return True

    def finish(self) -> None:
        """See :meth:`Request.finish`."""
        with self._reporting():
            self.end()
        assert self._needs is not None
        self.lane.give(self._needs.held, self._needs.size)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.lane.stop(error)
            key, index = self.item.array.key, self.item.index
            if isinstance(error, StorageError) and error.key is None:
                error.key, error.chunk = key, index
                error.message += f" (chunk {index} of key {key!r})"
            raise


@dataclass(slots=True)
class _Put(_Transfer[ChunkWrite]):
    """A chunk that is written."""

    check: Callable[[], None]
    done: WriteDone
    _chunk: EncodedChunk = field(init=False)
    _create: Create = field(init=False)

    def needs(self) -> _Needs:
        """See :meth:`_Transfer.needs`."""
        array = self.item.array
        if (stored := uncompressed_bytes(array)) > MAX_OBJECT_BYTES:
            url = f"{self.lane.url}/{array.chunk_name(self.item.index)}"
            raise StorageError(
                f"{url} has {stored} bytes, and one request takes at most {MAX_OBJECT_BYTES}; save "
                "in smaller chunks, as the default strategy ('zarr', 2) does",
                url=url,
            )
        return _Needs(
            _held_bytes(self.item), stored if array.is_compressed else 0, array.chunk_bytes
        )

    def begin(self) -> None:
        """See :meth:`_Transfer.begin`."""
        self._chunk = EncodedChunk(self.item.array, self.item.data())
        (parts,), name = self._chunk, self.item.array.chunk_name(self.item.index)
        self._create = Create(self.lane.io, self.lane.url, name, parts, self.check)
        self._create.start()

    def end(self) -> None:
        """See :meth:`_Transfer.end`."""
        self._create.finish()
        self.done(self.item, self._chunk.record)


@dataclass(slots=True)
class _GetPart(_Transfer[ChunkPart]):
    """A part of a chunk that is read."""

    manifest: GetManifest
    done: ReadDone
    _verifier: ChunkVerifier = field(init=False)
    _answer: Pieces = field(init=False)

    def needs(self) -> _Needs:
        """See :meth:`_Transfer.needs`. A compressed chunk is in memory three times: twice as
        received, and decompressed."""
        self._verifier = verifier = ChunkVerifier.of(self.item, self.manifest)
        size = verifier.last - verifier.first
        return _Needs(3 * size if self.item.array.is_compressed else size, 0, size)

    def begin(self) -> None:
        """See :meth:`_Transfer.begin`."""
        io, verifier = self.lane.io, self._verifier
        array, number = self.item.array, self.item.number
        size = verifier.last - verifier.first
        stop: int | None = verifier.last
        if not verifier.sums and size == array.chunk_bytes:
            # The commit of an older checkpoint lacks the sizes of compressed chunks.
            is_known = stored_bytes(array, number) is not None or io.reads_past_end
            stop = io.end_of(most_stored_bytes(array, number)) if is_known else None
        name = array.chunk_name(self.item.index)
        self._answer = io.begin_get(name, verifier.first, stop, size=size)

    def end(self) -> None:
        """See :meth:`_Transfer.end`."""
        part, verifier = self.item, self._verifier
        try:
            verifier.receive(part, self._answer)
        except BadChunkError as problem:
            url = f"{self.lane.url}/{part.array.chunk_name(part.index)}"
            raise chunk_error(part.array, part.index, url, problem, self.manifest) from None
        counters.add(bytes_read=verifier.count, chunks_read=1)
        self.done(part.out.nbytes, 1)


def _held_bytes(item: ChunkWrite) -> int:
    """Return the memory in bytes that a PUT of a chunk takes in addition to its source: the request
    body, the gathered chunk, and the result of a source function."""
    array, source = item.array, item.source
    stored = uncompressed_bytes(array)
    box, shape = array.grid.box(item.index), array.grid.chunk_shape
    made = box.size * dtypes.itemsize(array.dtype) if callable(source) else 0
    gathered = box.shape != shape if callable(source) else not lies_as_chunk(source, shape)
    # A compressed chunk counts once more, for the memory that the allocator keeps.
    return stored * (1 + gathered + array.is_compressed) + made
