"""The mover for local file systems: plain writes, and reads that verify checksums.

Uncompressed chunks move from and to the tensors' own memory. Their checksums are computed while the
data is in the processor's cache. The compiled reader reads, copies and checksums a whole chunk in
one pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat

import numpy as np

from shardstore.storage.format.documents import CRC32C
from shardstore.storage.format.manifest import ChunkRecord, Manifest
from shardstore.storage.movers.checksums import read_chunk
from shardstore.storage.movers.chunk_bytes import (
    as_bytes,
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
)
from shardstore.storage.movers.codecs import CRC_BYTES, EncodedChunk
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.verify import (
    Expected,
    chunk_error,
    is_intact,
    read_file,
)
from shardstore.storage.stores.location import Location, store_errors

IO_BYTES = 2 * 1024 * 1024
"""Size of a single read or write: large enough to make the cost of system calls negligible, small
enough to stay mostly in the processor's cache during checksum and copy."""
WRITEBACK_FROM = 1024 * 1024
"""Smaller files wait for the one sync at the end, which writes neighbouring files together."""
WRITE_BATCH_BYTES, READ_BATCH_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Bytes of the chunks in a thread's batch."""
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)


class FileMover:
    """Moves chunks between memory and a folder.

    It uses about 5 MiB of memory per thread in addition to the arrays, for chunks of any size.

    Args:
        location: a local folder, the root of the checkpoint.
        threads: number of threads for each call, including the caller's; ``None``:
            :func:`default_threads`.
        durable: whether a sync follows. If so, the mover starts the writeback to the disk at once.
    """

    def __init__(
        self, location: Location, *, threads: int | None = None, durable: bool = False
    ) -> None:
        self.location = location
        self.threads = threads or default_threads()
        self.durable = durable
        self._done = threading.Lock()

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""

        def work(batch: Sequence[ChunkWrite]) -> None:
            size = 0
            for item in batch:
                array = item.array
                path = f"{self.location.url}/{item.name}"
                with store_errors("writing", path, key=array.key):
                    record = _write_chunk(path, item, durable=self.durable)
                size += record.stored_bytes
                with self._done:
                    done(item, record)
            counters.add(bytes_written=size, chunks_written=len(batch))

        run_batched(
            writes,
            work,
            threads=self.threads,
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=WRITE_BATCH_BYTES,
        )

    # -- reading -------------------------------------------------------------------------------

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None = None,
    ) -> None:
        """See :meth:`Mover.read`."""
        parts = [part for read in reads for part in chunk_parts(read)]
        root = self.location.url

        def work(batch: Sequence[ChunkPart]) -> None:
            size = 0
            for part in batch:
                path = f"{root}/{part.array.node}/{part.key}"
                read = _read_at_once(path, part)
                if not read:
                    with store_errors("reading", path, key=part.array.key):
                        read = _read_chunk(path, part, manifest)
                size += read
                if done is not None:
                    done(part.out.nbytes, 1)
            counters.add(bytes_read=size, chunks_read=len(batch))

        run_batched(
            parts,
            work,
            threads=self.threads,
            weight=lambda part: part.out.nbytes,
            batch_weight=READ_BATCH_BYTES,
        )


def _write_chunk(path: str, item: ChunkWrite, *, durable: bool) -> ChunkRecord:
    chunk = EncodedChunk(item.array, item.data(), IO_BYTES)
    if not any(item.index):  # an array's folder is made with its first chunk
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.rpartition("/")[0])
    write_file(path, chunk, durable=durable)
    return chunk.record


def write_file(
    path: str, content: Iterable[Sequence[bytes | memoryview]], *, durable: bool = False
) -> None:
    """Write a file from lists of buffers, and create its folder. Replace an existing file.

    Args:
        path: path of the file.
        content: lists of buffers in order, each valid until the next one is requested.
        durable: start the writeback of a large file.
    """
    fd, size = _create(path), 0
    try:
        for parts in content:
            for part in parts:
                view = memoryview(part)
                size += len(view)
                while view:  # a disk that fills up writes a part first, and then refuses
                    view = view[os.write(fd, view) :]
        if durable and size >= WRITEBACK_FROM:
            start_writeback(fd)
    finally:
        os.close(fd)  # some file systems report write errors here


def start_writeback(fd: int) -> None:
    """Start writing an open file's pages to the disk and do not wait (man-pages
    sync_file_range(2)). Do nothing outside of Linux.

    The sync at the end then has little left to write. That sync makes the files durable and reports
    errors.
    """
    if hasattr(_libc, "sync_file_range"):
        start, size = ctypes.c_int64(0), ctypes.c_int64(0)
        _libc.sync_file_range(fd, start, size, _SYNC_FILE_RANGE_WRITE)


def sync_file_system(location: Location) -> None:
    """Wait until all data written to a folder's file system is on the disk (man-pages sync(2)).

    One ``syncfs`` commits the journal once; an fsync of each file would commit it each time. Linux
    5.8 and later report errors of the disk.

    Raises:
        StorageError: the sync failed.
    """
    with store_errors("syncing", location.url):
        fd = os.open(location.url, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not hasattr(_libc, "syncfs"):
                os.sync()
            elif _libc.syncfs(fd) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), location.url)
        finally:
            os.close(fd)


def _create(path: str) -> int:
    # Never write into an existing file: it may be a hard link to a chunk of another checkpoint.
    # Ranks that wrongly share a chunk do this at the same time; the commit tells them so.
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except FileNotFoundError:
            # mkdir creates one level only: it must not recreate the folder of an attempt that
            # another process has removed.
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))


def _read_at_once(path: str, part: ChunkPart) -> int:
    """Read a whole chunk with the compiled reader.

    Returns:
        Number of bytes read; 0 if :func:`_read_chunk` must read the chunk, which also finds out
        what is wrong with a damaged one. The destination may then be partly overwritten.
    """
    array, out = part.array, part.out
    if not part.is_whole or array.codecs != (CRC32C,):
        return 0
    if out.strides[-1:] == (out.itemsize,):
        target = out.view(np.uint8)
    elif out.flags.c_contiguous:
        target = as_bytes(out)
    else:
        return 0
    sound = is_intact(read_chunk(path, out.nbytes, target), array.expected_crc(part.number))
    return out.nbytes + CRC_BYTES if sound else 0


def _read_chunk(path: str, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int:
    """Read a part of a chunk into its destination. The bytes of an uncompressed chunk reach the
    destination before they are verified.

    Returns:
        Number of bytes read.

    Raises:
        ChunkMissingError, ChunkCorruptError: the chunk is missing or damaged. The error names key,
            chunk, path and writer.
    """
    array, expected = part.array, Expected.of(part, manifest)
    packed = array.is_packed
    targets = repeat(scratch(IO_BYTES).data) if packed else _targets(part, expected)
    size, problem = read_file(path, array, expected, targets, part)
    if problem is not None:
        raise chunk_error(array, part.index, path, problem, manifest)
    return size


def _targets(part: ChunkPart, expected: Expected) -> Iterator[memoryview]:
    """Yield memory for the expected bytes in order. The caller fills each view before it requests
    the next one."""
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
    """Yield scratch memory for ``count`` bytes that are read only for verification."""
    while count > 0:
        view = scratch(min(count, IO_BYTES)).data
        yield view
        count -= len(view)
