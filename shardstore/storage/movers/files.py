"""The mover for local file systems: whole uncompressed chunks by plain preallocated writes and
reads.

Chunks are the same bytes that TensorStore's and zarr's ``bytes`` + ``crc32c`` codecs write (Zarr v3
codec specifications), moved from and into the tensors' own memory without a copy in between, and
checksummed while they are warm in the processor's cache. Measured against TensorStore's file driver
in the benchmark of this project.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash
from numpy.typing import NDArray

from shardstore.errors import ChunkCorruptError, ChunkMissingError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import block_bytes, inner_blocks
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.chunk_bytes import Sums, free_scratch, pieces
from shardstore.storage.movers.chunk_reader import CRC, CRC_BYTES, read_part, read_whole_files
from shardstore.storage.movers.chunks import (
    ChunkPart,
    ChunkWrite,
    ReadDone,
    RegionRead,
    chunk_parts,
    told,
)
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.writeback import Writeback
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["FileMover"]

IO_BYTES = 2 * 1024 * 1024
"""A single write: large enough that system calls do not count, small enough that much of it is in
the processor's cache when it is written, having been checksummed and hashed."""
PREALLOCATE_FROM = 64 * 1024
WRITE_BATCH_BYTES, READ_BATCH_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
"""That a thread takes on at a time. Reads of a batch are one call, of some milliseconds."""

_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class FileMover:
    """Moves chunks between memory and a folder.

    Memory above the arrays themselves: about 5 MiB a thread, whatever the size of the chunks.

    Args:
        location: a local folder, the root of the checkpoint.
        threads: threads for each call, the caller's included; default: see
            :func:`default_threads`.
        durable: what is written is going to be synchronised, so the disk may begin at once.
    """

    def __init__(
        self, location: Location, *, threads: int | None = None, durable: bool = False
    ) -> None:
        self.location = location
        self.threads = threads or default_threads()
        self.durable = durable
        self._done = threading.Lock()
        self._writeback: Writeback | None = None

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`.

        Raises:
            ValueError: an array has codecs that only TensorStore knows.
        """
        for array in {item.array for item in writes}:
            if not array.is_plain:
                raise ValueError(f"chunks of key {array.key!r} have codecs {array.codecs}")

        shared = self._writeback
        writeback = shared or (Writeback() if self.durable else None)

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                path = self._path(item.array, item.index)
                with told(item), store_errors("writing", path, key=item.array.key):
                    record = _write_chunk(path, item, writeback)
                counters.add(bytes_written=record.stored_bytes, chunks_written=1)
                with self._done:
                    done(item, record)

        try:
            self._run(writes, work, lambda item: item.array.chunk_bytes, WRITE_BATCH_BYTES)
        finally:
            if writeback is not None and shared is None:
                writeback.finish()

    @contextlib.contextmanager
    def one_writeback(self) -> Iterator[None]:
        """Within, calls that write do not wait for the disk to take their files, each for itself;
        the end does, for all of them, and raises what :meth:`write` would have."""
        if not self.durable:
            yield
            return
        self._writeback = writeback = Writeback()
        try:
            yield
        finally:
            self._writeback = None
            writeback.finish()

    # -- reading -------------------------------------------------------------------------------

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None = None,
    ) -> None:
        """See :meth:`Mover.read`."""
        with collector_paused():
            parts = [part for read in reads for part in chunk_parts(read)]

        def work(batch: Sequence[ChunkPart]) -> None:
            size, there, rest = self._read_at_once(batch)
            if done is not None:
                for part in there:
                    done(part.out.nbytes, 1)
            for part in rest:
                path = self._path(part.array, part.index)
                with store_errors("reading", path, key=part.array.key):
                    size += _read_chunk(path, part, manifest)
                if done is not None:
                    done(part.out.nbytes, 1)
            counters.add(bytes_read=size, chunks_read=len(batch))

        self._run(parts, work, lambda part: part.out.nbytes, READ_BATCH_BYTES)

    def _read_at_once(
        self, batch: Sequence[ChunkPart]
    ) -> tuple[int, list[ChunkPart], list[ChunkPart]]:
        """Read whole chunks that are in memory and in order. Number of bytes read; the parts that
        are there, and those that have to go the long way."""
        whole: list[ChunkPart] = []
        rest: list[ChunkPart] = []
        for part in batch:
            (whole if part.is_whole and part.array.has_crc else rest).append(part)
        root = self.location.url
        left = read_whole_files(
            [f"{root}/{part.array.node}/{part.key}" for part in whole],
            [part.out for part in whole],
            [part.array.expected_crc(part.number) for part in whole],
        )
        slow = set(left)
        rest += [whole[i] for i in left]
        whole = [part for i, part in enumerate(whole) if i not in slow]
        return sum([part.out.nbytes + CRC_BYTES for part in whole]), whole, rest

    def _run(
        self,
        items: Sequence[Any],
        work: Callable[[Sequence[Any]], None],
        weight: Callable[[Any], int],
        batch_bytes: int,
    ) -> None:
        try:
            run_batched(items, work, threads=self.threads, weight=weight, batch_weight=batch_bytes)
        finally:
            free_scratch()

    def _path(self, array: ArrayMeta, index: Sequence[int]) -> str:
        return f"{self.location.url}/{array.node}/{array.chunk_key(index)}"


def _write_chunk(path: str, item: ChunkWrite, writeback: Writeback | None) -> ChunkRecord:
    array = item.array
    total = array.chunk_bytes
    data = item.data()
    fd = _create(path)
    try:
        stored = total + (CRC_BYTES if array.has_crc else 0)
        if total >= PREALLOCATE_FROM:
            _preallocate(fd, stored)
        sums, digest = _stream(fd, data, array)
    except BaseException:
        os.close(fd)
        raise
    if writeback is not None:
        writeback.take(fd, stored, path, array.key)
    else:
        os.close(fd)
    return ChunkRecord(stored, sums.crc, digest, sums.running[: inner_blocks(total)])


def _stream(fd: int, data: NDArray[Any], array: ArrayMeta) -> tuple[Sums, bytes]:
    total = array.chunk_bytes
    sums = Sums(block_bytes(total))
    hasher = xxhash.xxh3_128()
    for piece in pieces(data, array.grid.chunk_shape, sums, IO_BYTES):
        hasher.update(piece)
        ends = sums.position == total and array.has_crc
        start = sums.position - len(piece)
        _write_all(fd, [piece, CRC.pack(sums.crc)] if ends else [piece], start)
    return sums, hasher.digest()


def _preallocate(fd: int, size: int) -> None:
    """Claim the disk space of a file at once: a full disk shows here, and extents stay long."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_PREALLOCATION:
            raise


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        # Only if the attempt itself is still there: a swept attempt must not come back to life.
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path))
        return os.open(path, flags, 0o666)


def _write_all(fd: int, parts: Sequence[memoryview | bytes], offset: int) -> None:
    size = sum(len(part) for part in parts)
    written = os.pwritev(fd, parts, offset)
    while written < size:
        rest = memoryview(b"".join(parts))[written:]
        written += os.pwrite(fd, rest, offset + written)


def _read_chunk(path: str, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int:
    array = part.array

    def corrupt(what: str) -> ChunkCorruptError:
        rank = _writer(part, manifest)
        return ChunkCorruptError(
            f"chunk {part.index} of key {array.key!r} {what}: {path}{_by(rank)}; the checkpoint "
            "is damaged, load an earlier one",
            key=array.key,
            chunk=part.index,
            rank=rank,
            url=path,
        )

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        rank = _writer(part, manifest)
        raise ChunkMissingError(
            f"chunk {part.index} of key {array.key!r} is missing: {path}{_by(rank)}; the "
            "checkpoint is damaged, load an earlier one",
            key=array.key,
            chunk=part.index,
            rank=rank,
            url=path,
        ) from None
    try:
        size = os.fstat(fd).st_size
        expected = array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)
        if size != expected:
            raise corrupt(f"has {size} bytes, not {expected}")
        return read_part(fd, part, manifest, corrupt)
    finally:
        os.close(fd)


def _writer(part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int | None:
    try:
        found = manifest()
    except OSError:
        # The damage that is being reported matters more than that of the manifest.
        return None
    return None if found is None else found.writer(part.array, part.index)


def _by(rank: int | None) -> str:
    return "" if rank is None else f" (written by rank {rank})"
