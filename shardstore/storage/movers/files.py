"""The mover for local file systems: plain preallocated writes, and reads that verify.

Uncompressed chunks move from and to the tensors' own memory, and are checksummed while they are in
the processor's cache. A whole chunk that is in the page cache is read by the compiled part, which
reads, copies and checksums in one pass.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.chunk_bytes import (
    as_bytes,
    free_scratch,
    scratch,
    slabs,
    span,
    view_in_chunk,
)
from shardstore.storage.movers.chunks import (
    ChunkPart,
    ChunkWrite,
    ReadDone,
    RegionRead,
    chunk_parts,
    told,
)
from shardstore.storage.movers.codecs import CRC_BYTES, EncodedChunk, stored_bytes
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.verify import (
    MISSING,
    ChunkVerifier,
    Expected,
    chunk_error,
    receive,
    size_problem,
)
from shardstore.storage.movers.writeback import Writeback
from shardstore.storage.stores.location import Location, store_errors

try:
    from shardstore.storage.movers import _copy_crc
except ImportError:  # no compiler at the installation, or another processor
    COMPILED = False
else:
    COMPILED = True

__all__ = ["COMPILED", "FileMover"]

IO_BYTES = 2 * 1024 * 1024
"""A single read or write: large enough that system calls do not count, small enough that most of it
is in the processor's cache while it is checksummed and moved."""
SKIP_BYTES = 1024 * 1024
"""A single read of bytes that are only verified."""
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
        """See :meth:`Mover.write`."""
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
        root = self.location.url

        def work(batch: Sequence[ChunkPart]) -> None:
            paths = [f"{root}/{part.array.node}/{part.key}" for part in batch]
            left = _read_compiled(batch, paths)
            size = 0
            for number, (part, path) in enumerate(zip(batch, paths, strict=True)):
                if number in left:
                    with store_errors("reading", path, key=part.array.key):
                        size += _read_chunk(path, part, manifest)
                else:
                    size += part.out.nbytes + CRC_BYTES
                if done is not None:
                    done(part.out.nbytes, 1)
            counters.add(bytes_read=size, chunks_read=len(batch))

        self._run(parts, work, lambda part: part.out.nbytes, READ_BATCH_BYTES)

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
    chunk = EncodedChunk(array, item.data(), IO_BYTES)
    fd = _create(path)
    try:
        size = stored_bytes(array)
        if size is not None and size >= PREALLOCATE_FROM:
            _preallocate(fd, size)
        position = 0
        for parts in chunk:
            position += _write_all(fd, parts, position)
    except BaseException:
        os.close(fd)
        raise
    if writeback is not None:
        writeback.take(fd, position, path, array.key)
    else:
        os.close(fd)
    return chunk.record


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


def _write_all(fd: int, parts: Sequence[memoryview | bytes], offset: int) -> int:
    size = sum(len(part) for part in parts)
    written = os.pwritev(fd, parts, offset)
    while written < size:
        rest = memoryview(b"".join(parts))[written:]
        written += os.pwrite(fd, rest, offset + written)
    return size


def _read_compiled(parts: Sequence[ChunkPart], paths: Sequence[str]) -> set[int]:
    """Read the whole chunks that are in the page cache, in one call.

    Returns:
        Positions of the parts that have to be read in another way, where what is wrong with them
        shows: the file is missing, has another size or checksum, or is not in memory. Their
        destinations may have been written to.
    """
    left = set(range(len(parts)))
    if not COMPILED:
        return left
    fast, views, crcs = [], [], []
    for number, part in enumerate(parts):
        array, out = part.array, part.out
        if not (part.is_whole and array.is_plain and array.has_crc):
            continue
        if out.flags.c_contiguous:
            views.append(as_bytes(out))
        elif out.strides[-1] == out.itemsize:
            views.append(out.view(np.uint8))
        else:
            continue
        fast.append(number)
        crcs.append(array.expected_crc(part.number))
    remaining = _copy_crc.read_chunks([paths[i] for i in fast], views, crcs)
    return left - set(fast) | {fast[i] for i in remaining}


def _read_chunk(path: str, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int:
    """Read a part of a chunk into its destination, which is written before it is verified.

    Returns:
        Number of bytes read.

    Raises:
        ChunkMissingError, ChunkCorruptError: name key, chunk, path and writer.
    """
    array = part.array
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise chunk_error(array, part.index, path, MISSING, manifest) from None
    try:
        size = os.fstat(fd).st_size
        problem = size_problem(array, size)
        if problem is None:
            expected = Expected.of(part, manifest)
            if array.is_packed:
                data = memoryview(bytearray(size))
                problem = receive(part, expected, data[: _fill(fd, data, 0)])
            else:
                verifier = ChunkVerifier(array, expected)
                for view in _targets(part, expected):
                    got = _fill(fd, view, expected.first + verifier.count)
                    verifier.update(view[:got])
                size, problem = verifier.count, verifier.finish()
    finally:
        os.close(fd)
    if problem is not None:
        raise chunk_error(array, part.index, path, problem, manifest)
    return size


def _targets(part: ChunkPart, expected: Expected) -> Iterator[memoryview]:
    """Memory for the expected bytes in order; each view is filled before the next is asked for."""
    array, out, shape = part.array, part.out, part.array.grid.chunk_shape
    low, high = span(part.within, shape, out.dtype.itemsize)
    yield from _skipped(low - expected.first)
    if out.flags.c_contiguous and out.nbytes == high - low:
        yield from _cut(as_bytes(out).data)
    else:
        for start, stop, target in slabs(out, part.within, shape):
            yield from _skipped(start - low)
            buffer = scratch(stop - start)
            yield from _cut(buffer.data)
            target[...] = view_in_chunk(buffer, target, shape)
            low = stop
    yield from _skipped(expected.last - high)
    if array.has_crc and expected.sums is None:
        yield memoryview(bytearray(CRC_BYTES))


def _cut(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), IO_BYTES):
        yield view[start : start + IO_BYTES]


def _skipped(count: int) -> Iterator[memoryview]:
    """Scratch memory for bytes that are read only to be verified."""
    while count > 0:
        view = scratch(min(count, SKIP_BYTES)).data
        yield view
        count -= len(view)


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read until ``view`` is full or the file ends; the number of bytes."""
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return done
