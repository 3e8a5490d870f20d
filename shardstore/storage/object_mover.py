"""The mover for object stores: whole chunks, one PUT each; ranged GETs, verified.

Chunks are the same bytes as in files (the chunk, then its crc32c). A PUT creates: where an object
of that name is there already, it is either our own (the answer to an earlier try was lost), or the
attempt that this save is a part of decides. Memory for chunks under way stays within a budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash
from numcodecs.zstd import Zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardstore.errors import ChunkCorruptError, ChunkMissingError, StorageError
from shardstore.storage.attempt import Attempt
from shardstore.storage.checksums import crc32c
from shardstore.storage.chunk_bytes import (
    checksums,
    free_scratch,
    pieces,
    span,
    view_in_chunk,
)
from shardstore.storage.chunk_reader import CRC, CRC_BYTES
from shardstore.storage.chunks import (
    ChunkPart,
    ChunkWrite,
    ReadDone,
    RegionRead,
    as_bytes,
    chunk_parts,
)
from shardstore.storage.counters import counters
from shardstore.storage.documents import ZSTD_LEVEL, ArrayMeta
from shardstore.storage.grid import block_bytes, inner_blocks
from shardstore.storage.location import Location
from shardstore.storage.manifest import ChunkRecord, Manifest
from shardstore.storage.object_io import IN_FLIGHT, MAX_OBJECT_BYTES, ObjectIO, object_io
from shardstore.storage.options import DEFAULT_BUDGET_BYTES

__all__ = ["ObjectMover"]

T = TypeVar("T")

REQUEST_BYTES = 4096
"""What a request weighs beside its data."""


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

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""
        for array in {item.array for item in writes}:
            if not (array.is_plain or array.is_packed):
                raise ValueError(f"chunks of key {array.key!r} have codecs {array.codecs}")
        if not writes:
            return
        io = object_io(self.location)
        flight: _Flight[bool] = _Flight(self.budget_bytes)
        try:
            for item in writes:
                stored = _stored_bytes(item.array)
                if stored > MAX_OBJECT_BYTES:
                    raise self._too_large(item, stored)
                # Twice while the bytes are put together: ours, and the copy of who sends them.
                flight.make_room(2 * stored)
                data, record = _encode(item)
                key = _key(item.array, item.index)
                finish = io.put(key, data, create=True)
                del data
                flight.add(stored, finish, self._written(io, item, record, done), item)
            flight.land()
        finally:
            flight.drain()
            io.close()
            free_scratch()

    def _written(
        self,
        io: ObjectIO,
        item: ChunkWrite,
        record: ChunkRecord,
        done: Callable[[ChunkWrite, ChunkRecord], None],
    ) -> Callable[[bool], None]:
        def landed(created: bool) -> None:
            if not created:
                self._settle(io, item)
            counters.add(bytes_written=record.stored_bytes, chunks_written=1)
            done(item, record)

        return landed

    def _settle(self, io: ObjectIO, item: ChunkWrite) -> None:
        """There is an object of a chunk's name: ours, a leftover, or a newer attempt's."""
        key = _key(item.array, item.index)
        data, _ = _encode(item)
        there = io.get(key)()
        if there == data:
            return
        if there is None and io.put(key, data, create=True)():
            return
        url = f"{self.location.url}/{key}"
        if there is None:
            raise StorageError(
                f"writing {url} failed: the store neither takes it nor has it; the bucket does "
                "not exist, perhaps: create it, or correct the URL",
                key=item.array.key,
                chunk=item.index,
                url=url,
            )
        if self._attempt is None:
            raise StorageError(f"{url} exists already, with other content; save elsewhere", url=url)
        self._attempt.check()
        io.put(key, data, create=False)()

    def _too_large(self, item: ChunkWrite, stored: int) -> StorageError:
        url = f"{self.location.url}/{_key(item.array, item.index)}"
        return StorageError(
            f"chunk {item.index} of key {item.array.key!r} has {stored} bytes, and one request "
            f"takes at most {MAX_OBJECT_BYTES}; save in smaller chunks, as the default strategy "
            "('zarr', 2) does",
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
        if not reads:
            return
        io = object_io(self.location)
        flight: _Flight[bytes | None] = _Flight(self.budget_bytes)
        try:
            for read in reads:
                for part in chunk_parts(read):
                    wanted = _wanted(part, manifest)
                    # Twice while the bytes that came are handed over.
                    flight.make_room(2 * wanted.size)
                    finish = io.get(_key(part.array, part.index), *wanted.request)
                    flight.add(wanted.size, finish, self._read(part, wanted, manifest, done), part)
            flight.land()
        finally:
            flight.drain()
            io.close()

    def _read(
        self,
        part: ChunkPart,
        wanted: _Wanted,
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None,
    ) -> Callable[[bytes | None], None]:
        def landed(data: bytes | None) -> None:
            if data is None:
                raise self._damage(part, "is missing", manifest, ChunkMissingError)
            problem = None
            if wanted.packed:
                data, problem = _unpacked(part, wanted, data)
            else:
                problem = _problem(part, wanted, data)
            if problem is not None:
                raise self._damage(part, problem, manifest, ChunkCorruptError)
            _scatter(part, wanted.first, data)
            counters.add(bytes_read=len(data), chunks_read=1)
            if done is not None:
                done(part.out.nbytes, 1)

        return landed

    def _damage(
        self,
        part: ChunkPart,
        what: str,
        manifest: Callable[[], Manifest | None],
        kind: type[ChunkMissingError] | type[ChunkCorruptError],
    ) -> ChunkMissingError | ChunkCorruptError:
        rank = None
        with suppress(OSError):
            found = manifest()
            rank = None if found is None else found.writer(part.array, part.index)
        url = f"{self.location.url}/{_key(part.array, part.index)}"
        by = "" if rank is None else f" (written by rank {rank})"
        return kind(
            f"chunk {part.index} of key {part.array.key!r} {what}: {url}{by}; the checkpoint is "
            "damaged, load an earlier one",
            key=part.array.key,
            chunk=part.index,
            rank=rank,
            url=url,
        )


class _Flight(Generic[T]):
    """Requests under way, finished in the order in which they were started."""

    def __init__(self, budget_bytes: int) -> None:
        # An eighth for connections, and for what the allocator keeps back.
        self._budget = budget_bytes - budget_bytes // 8
        self._bytes = 0
        self._pending: deque[
            tuple[int, Callable[[], T], Callable[[T], None], ChunkWrite | ChunkPart]
        ] = deque()

    def make_room(self, size: int) -> None:
        """Wait until ``size`` more bytes are within the budget, or nothing else is under way."""
        while self._pending and (
            self._bytes + size > self._budget or len(self._pending) >= IN_FLIGHT
        ):
            self._land_first()

    def add(
        self,
        size: int,
        finish: Callable[[], T],
        landed: Callable[[T], None],
        about: ChunkWrite | ChunkPart,
    ) -> None:
        """A request was started: ``finish`` waits for it, ``landed`` takes what it gives."""
        self._pending.append((size + REQUEST_BYTES, finish, landed, about))
        self._bytes += size + REQUEST_BYTES

    def land(self) -> None:
        """Wait for all."""
        while self._pending:
            self._land_first()

    def drain(self) -> None:
        """After an error: wait for the rest, whatever becomes of it."""
        while self._pending:
            _, finish, _, _ = self._pending.popleft()
            with suppress(Exception):
                finish()

    def _land_first(self) -> None:
        size, finish, landed, about = self._pending.popleft()
        self._bytes -= size
        try:
            landed(finish())
        except StorageError as error:
            if error.key is None:
                error.key, error.chunk = about.array.key, about.index
                error.message += f" (chunk {about.index} of key {about.array.key!r})"
            raise


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which bytes of a chunk's object are asked for, and how they are verified.

    Attributes:
        first: position of the first byte.
        last: one past the last byte of the chunk that is asked for.
        stored: size of the object if it is read whole, else ``None``.
        sums: running checksums of the manifest, at the ends of blocks, for a part.
        crc: of the whole chunk, by the root document or the manifest.
        packed: whether the object is compressed, and its size not known.
    """

    first: int
    last: int
    stored: int | None
    sums: NDArray[np.uint32] | None
    crc: int | None
    packed: bool = False

    @property
    def size(self) -> int:
        return self.last - self.first if self.stored is None else self.stored

    @property
    def request(self) -> tuple[int, int | None]:
        return (0, None) if self.stored is not None else (self.first, self.last)


def _wanted(part: ChunkPart, manifest: Callable[[], Manifest | None]) -> _Wanted:
    array = part.array
    total = array.chunk_bytes
    low, high = span(part.within, array.grid.chunk_shape, part.out.dtype.itemsize)
    if array.is_packed:
        return _Wanted(0, total, total, None, array.expected_crc(part.index), packed=True)
    if not array.has_crc:
        whole = (low, high) == (0, total)
        return _Wanted(low, high, total if whole else None, None, None)
    block = block_bytes(total)
    first, last = low // block * block, min(-(-high // block) * block, total)
    crc = array.expected_crc(part.index)
    if (first, last) != (0, total) or crc is None:
        found = manifest()
        sums = None if found is None else found.running_of(array, part.index)
        if sums is not None and (first, last) != (0, total):
            return _Wanted(first, last, None, sums, None)
        crc = int(sums[-1]) if sums is not None else crc
    return _Wanted(0, total, _stored_bytes(array), None, crc)


def _unpacked(part: ChunkPart, wanted: _Wanted, data: bytes) -> tuple[bytes, str | None]:
    """The chunk behind a compressed object, or what is wrong with it."""
    packed = memoryview(data)[:-CRC_BYTES]
    if not len(packed):
        return b"", f"has {len(data)} bytes, fewer than any chunk"
    (stored,) = CRC.unpack(data[-CRC_BYTES:])
    crc = crc32c(packed, 0)
    if crc != stored:
        return b"", _mismatch(stored, crc)
    try:
        chunk: bytes = Zstd().decode(packed)
    except RuntimeError as error:
        return b"", f"can not be decompressed ({error})"
    if len(chunk) != part.array.chunk_bytes:
        return b"", f"decompresses to {len(chunk)} bytes, not {part.array.chunk_bytes}"
    if wanted.crc is not None and crc32c(chunk, 0) != wanted.crc:
        return b"", _foreign(wanted.crc, crc32c(chunk, 0))
    return chunk, None


def _foreign(expected: int, found: int) -> str:
    return (
        "is whole, but it is not the chunk that was committed, a late writer of another save "
        f"changed it (crc32c {expected:#010x} expected, {found:#010x} found)"
    )


def _problem(part: ChunkPart, wanted: _Wanted, data: bytes) -> str | None:
    """What is wrong with the bytes that came."""
    if len(data) != wanted.size:
        if wanted.stored is not None:
            return f"has {len(data)} bytes, not {wanted.stored}"
        return f"ends at byte {wanted.first + len(data)} all of a sudden"
    if not part.array.has_crc:
        return None
    view = memoryview(data)
    if wanted.sums is not None:
        block = block_bytes(part.array.chunk_bytes)
        number = wanted.first // block
        crc = int(wanted.sums[number - 1]) if number else 0
        for start in range(0, len(view), block):
            crc = crc32c(view[start : start + block], crc)
            if crc != int(wanted.sums[number]):
                return _mismatch(int(wanted.sums[number]), crc)
            number += 1
        return None
    total = part.array.chunk_bytes
    (stored,) = CRC.unpack(view[total:])
    crc = crc32c(view[:total], 0)
    if crc != stored:
        return _mismatch(stored, crc)
    if wanted.crc is not None and crc != wanted.crc:
        return _foreign(wanted.crc, crc)
    return None


def _mismatch(expected: int, found: int) -> str:
    return f"fails its checksum (crc32c {expected:#010x} expected, {found:#010x} found)"


def _scatter(part: ChunkPart, first: int, data: bytes) -> None:
    """Bring the bytes of a chunk, from ``first`` on, to the part's destination."""
    shape = part.array.grid.chunk_shape
    low, high = span(part.within, shape, part.out.dtype.itemsize)
    raw = np.frombuffer(data, np.uint8)[low - first : high - first]
    if part.out.flags.c_contiguous and part.out.nbytes == high - low:
        as_bytes(part.out)[:] = raw
    else:
        part.out[...] = view_in_chunk(raw, part.out, shape)


def _encode(item: ChunkWrite) -> tuple[bytes, ChunkRecord]:
    """The bytes of a chunk's object, and what the manifest says of them."""
    array = item.array
    total = array.chunk_bytes
    block = block_bytes(total)
    hasher = xxhash.xxh3_128()
    crc = position = 0
    running: list[int] = []
    parts: list[Any] = []
    for piece in pieces(item.data(), array.grid.chunk_shape):
        crc, found = checksums(piece, block, crc, position)
        running += found
        hasher.update(piece)
        position += len(piece)
        # A piece that is not the whole chunk is gathered in memory that the next one needs.
        parts.append(piece if len(piece) == total else bytes(piece))
    if not array.is_packed:
        if array.has_crc:
            parts.append(CRC.pack(crc))
        data = b"".join(parts)
    else:
        packed = Zstd(level=ZSTD_LEVEL).encode(b"".join(parts))
        data = packed + CRC.pack(crc32c(packed, 0))
    return data, ChunkRecord(len(data), crc, hasher.digest(), running[: inner_blocks(total)])


def _stored_bytes(array: ArrayMeta) -> int:
    return array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)


def _key(array: ArrayMeta, index: Sequence[int]) -> str:
    return f"{array.node}/{array.chunk_key(index)}"
