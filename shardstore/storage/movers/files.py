"""Chunks in local file systems: plain writes, and reads that verify checksums. Parts of files of
other formats are read directly, or by a memory mapping.

Writes and reads use about 5 MiB of memory per thread in addition to the arrays, for chunks of any
size. Uncompressed chunks move from and to the tensors' own memory. Their checksums are computed
while the data is in the processor's cache. The compiled reader reads, copies and checksums a whole
chunk in one pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import DamagedCheckpointError
from shardstore.storage.format.documents import CRC32C, ArrayMeta
from shardstore.storage.format.names import key_of
from shardstore.storage.movers.chunk_bytes import (
    IO_BYTES,
    SCRATCH_BYTES,
    as_bytes,
    scratch,
    view_in_chunk,
)
from shardstore.storage.movers.chunks import (
    CRC_BYTES,
    BadChunkError,
    ChunkPart,
    ChunkWrite,
    EncodedChunk,
    GetManifest,
    ReadDone,
    RegionRead,
    SmallFiles,
    WriteDone,
)
from shardstore.storage.movers.mover import Mover
from shardstore.storage.movers.ranges import Slab
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error, require_stored_size
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import run_batched
from shardstore.storage.stores.folder import open_regular, store_errors
from shardstore.storage.stores.location import Location

try:
    from shardstore.storage.movers._copy_crc import read_chunk_files
except ImportError:  # no compiler at the installation
    COMPILED = False

    def read_chunk_files(requests: list[tuple[str, int, Any]], /) -> list[tuple[int, int] | None]:
        """Return no result: the compiled reader is not available."""
        return [None] * len(requests)
else:
    COMPILED = True

WRITEBACK_FROM = 1024 * 1024
"""Smaller files wait for the one sync at the end, which writes neighbouring files together."""
WRITE_BATCH_BYTES, READ_BATCH_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Bytes of the chunks in a thread's batch."""
FILES_IN_BATCH = 64
SLAB_BATCH_BYTES = 4 * 1024 * 1024
MAPPED_RUN_BYTES = 16 * 1024
"""Contiguous runs below this size are copied from a mapping, which is faster than a call each."""
_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)


class FolderMover(Mover):
    """Moves chunks between memory and a folder."""

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """See :meth:`Mover.write`. If a sync follows (``durable``), the writeback of large chunks
        starts at once. Small files come after them: threads that create files hold each other up.
        """
        root, lock = self.location.url, threading.Lock()

        def work(batch: Sequence[ChunkWrite]) -> None:
            size = 0
            for item in batch:
                path = f"{root}/{item.array.chunk_name(item.index)}"
                with store_errors("writing", path, key=item.array.key):
                    chunk = EncodedChunk(item.array, item.data(), IO_BYTES)
                    write_file(path, chunk, durable=self.options.durable)
                record = chunk.record
                size += record.stored_bytes
                with lock:
                    done(item, record)
            counters.add(bytes_written=size, chunks_written=len(batch))

        def put(batch: SmallFiles) -> None:
            for name, data in batch:
                key = key_of(name.rpartition("/")[0])
                with store_errors("writing", f"{root}/{name}", key=key):
                    write_file(f"{root}/{name}", [[data]])

        run_batched(
            writes,
            work,
            threads=self.options.threads,
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=WRITE_BATCH_BYTES,
        )
        run_batched(files, put, threads=self.options.threads, batch_weight=FILES_IN_BATCH)

    def read_parts(self, parts: Sequence[ChunkPart], manifest: GetManifest, done: ReadDone) -> None:
        """Read parts of chunks, see :meth:`Mover.read_parts`."""
        root = self.location.url

        def work(batch: Sequence[ChunkPart]) -> None:
            size = 0
            chunks = [
                WholeChunk(
                    f"{root}/{p.array.chunk_name(p.index)}",
                    p.array,
                    p.array.expected_crc(p.number),
                    p.out,
                )
                for p in batch
            ]
            for part, (path, array, *_), read in zip(
                batch, chunks, read_at_once(chunks), strict=True
            ):
                if not read:
                    with store_errors("reading", path, key=array.key):
                        verifier = ChunkVerifier.of(part, manifest)
                        try:
                            read = read_file(path, verifier, part)
                        except BadChunkError as problem:
                            raise chunk_error(array, part.index, path, problem, manifest) from None
                size += read
                done(part.out.nbytes, 1)
            counters.add(bytes_read=size, chunks_read=len(batch))

        run_batched(
            parts,
            work,
            threads=self.options.threads,
            weight=lambda part: part.out.nbytes,
            batch_weight=READ_BATCH_BYTES,
        )

    def read_discarding(self, name: str, verifier: ChunkVerifier) -> int:
        """See :meth:`Mover.read_discarding`. The compiled reader does not hash."""
        path, size = f"{self.location.url}/{name}", 0
        if verifier.digest is None:
            (size,) = read_at_once([WholeChunk(path, verifier.array, verifier.crc, None)])
        return size or read_file(path, verifier)

    def gap_bytes(self, read: RegionRead) -> int:
        """See :meth:`Mover.gap_bytes`. Short runs are copied from a mapping."""
        run = read.out.dtype.itemsize
        for length, edge in zip(reversed(read.box.shape), reversed(read.array.shape), strict=True):
            run *= length
            if length != edge:
                break
        return 0 if run >= MAPPED_RUN_BYTES else SCRATCH_BYTES

    def read_slabs(self, slabs: Sequence[Slab], done: ReadDone) -> None:
        """See :meth:`Mover.read_slabs`. Contiguous runs are read directly to their destinations,
        and short ones are copied from a memory mapping."""
        with contextlib.ExitStack() as stack:
            files = {
                name: _MappedFile(f"{self.location.url}/{name}", stack)
                for name in {slab.name for slab in slabs}
            }

            def copy(batch: Sequence[Slab]) -> None:
                for slab in batch:
                    files[slab.name].read(slab)
                done(sum(slab.out.nbytes for slab in batch), 0)

            run_batched(
                slabs,
                copy,
                weight=lambda slab: slab.out.nbytes,
                batch_weight=SLAB_BATCH_BYTES,
            )


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


def allocate(fd: int, size: int) -> None:
    """Give an open file its size, and its space on the disk if the file system can reserve it
    (man-pages fallocate(2)). Several ranks then write it faster, and a full disk is found at once.
    Existing content stays.
    """
    at, length = ctypes.c_int64(0), ctypes.c_int64(size)
    if size and _libc.fallocate(fd, 0, at, length) != 0:
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise OSError(number, os.strerror(number))
    os.truncate(fd, size)


def start_writeback(fd: int, start: int = 0, size: int = 0) -> None:
    """Start writing pages of an open file to the disk and do not wait (man-pages
    sync_file_range(2)).

    The sync at the end then has little left to write. That sync makes the files durable and reports
    errors.

    Args:
        fd: the file.
        start: byte offset of the first page.
        size: number of bytes; 0: to the end of the file.
    """
    of, count = ctypes.c_int64(start), ctypes.c_int64(size)
    _libc.sync_file_range(fd, of, count, _SYNC_FILE_RANGE_WRITE)


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
            if _libc.syncfs(fd) != 0:
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
                os.mkdir(path.rpartition("/")[0])


class WholeChunk(NamedTuple):
    """A chunk to read: the path of its file, its array, the commit's crc32c of it, if known, and
    what receives its elements; ``None``: they are discarded."""

    path: str
    array: ArrayMeta
    crc: int | None
    out: NDArray[Any] | None


def read_at_once(chunks: Sequence[WholeChunk]) -> list[int]:
    """Read and verify whole chunks with the compiled reader. A part of a chunk gets 0.

    Returns:
        For each chunk the number of bytes read; 0 if :func:`read_file` must read it, which also
        finds out what is wrong with a damaged one. What receives its elements may then be partly
        overwritten.
    """
    requests: list[tuple[str, int, NDArray[np.uint8] | None]] = []
    for path, array, _, out in chunks:
        size, target = -1, None  # -1 bytes: not with that reader
        is_known = array.codecs == (CRC32C,)
        if is_known and out is None:
            size = array.chunk_bytes
        elif is_known and out is not None and out.size == math.prod(array.grid.chunk_shape):
            if out.strides[-1:] == (out.itemsize,):
                size, target = out.nbytes, out.view(np.uint8)
            elif out.flags.c_contiguous:
                size, target = out.nbytes, as_bytes(out)
        requests.append((path, size, target))
    return [
        size + CRC_BYTES if found and found[0] == found[1] and crc in (None, found[0]) else 0
        for (_, size, _), found, (_, _, crc, _) in zip(
            requests, read_chunk_files(requests), chunks, strict=True
        )
    ]


def read_file(path: str, verifier: ChunkVerifier, part: ChunkPart | None = None) -> int:
    """Read the bytes of a chunk's file that a verifier takes, and return their number.

    Args:
        path: path of the file.
        verifier: the range of bytes to read, and their checksums.
        part: receives its elements, those of an uncompressed chunk before they are verified;
            ``None``: they are discarded.

    Raises:
        BadChunkError: the chunk is missing or damaged.
    """
    try:
        fd = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise BadChunkError("missing", "is missing") from None
    except (IsADirectoryError, DamagedCheckpointError):
        raise BadChunkError("unreadable", "cannot be read: it is no regular file") from None
    array = verifier.array
    try:
        require_stored_size(array, verifier.number, os.fstat(fd).st_size)
        views = None if part is None or array.is_compressed else verifier.targets(part)
        for view in views or repeat(scratch(IO_BYTES).data):
            got = _fill(fd, view, verifier.first + verifier.count)
            verifier.update(view[:got])
            if got < len(view):
                break
    finally:
        os.close(fd)
    verifier.finish()
    if part is not None and verifier.chunk is not None:
        verifier.scatter(part, verifier.chunk)
    return verifier.count


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read until ``view`` is full or the file ends. Return the number of bytes."""
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return done


class _MappedFile:
    """A file, open until the stack is closed."""

    def __init__(self, path: str, stack: contextlib.ExitStack) -> None:
        self._path = path
        with store_errors("reading", self._path):
            try:
                self._fd = open_regular(self._path)
            except FileNotFoundError:
                raise FileNotFoundError(path) from None
        stack.callback(os.close, self._fd)
        self._size = os.fstat(self._fd).st_size
        # Mapped once: a mapping takes as long as reading 100 KiB. It opens the file again: if it
        # shares the kernel's readahead with the reads, loads of cold files take half as long again.
        self._mapped = lru_cache(lambda: np.memmap(self._path, np.uint8, "r"))

    def read(self, slab: Slab) -> None:
        """Read a slab."""
        _, first, last, out, shape = slab
        if last > self._size:
            raise EOFError(f"{self._path} ends at byte {self._size}")
        counters.add(bytes_read=out.nbytes)
        if out.nbytes < last - first:
            out[...] = view_in_chunk(self._mapped()[first:last], out, shape)
            return
        memory = as_bytes(out) if out.flags.c_contiguous else scratch(last - first)
        with store_errors("reading", self._path):
            got = _fill(self._fd, memory.data, first)
        if got < len(memory):
            raise EOFError(f"{self._path} ends at byte {first + got}")
        if not out.flags.c_contiguous:
            out[...] = view_in_chunk(memory, out, shape)
