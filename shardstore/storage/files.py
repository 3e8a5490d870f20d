"""The mover for local file systems: whole uncompressed chunks by plain preallocated writes and reads.

Chunks are the same bytes that TensorStore's and zarr's ``bytes`` + ``crc32c`` codecs write (Zarr v3 codec specifications),
moved from and into the tensors' own memory without a copy in between, and checksummed while they are warm in the
processor's cache. Measured against TensorStore's file driver in the benchmark of this project.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from crc32c import crc32c
from numpy.typing import NDArray

from shardstore.errors import ChunkCorruptError, ChunkMissingError
from shardstore.storage.chunks import ChunkPart, ChunkWrite, RegionRead, as_bytes, chunk_parts
from shardstore.storage.counters import counters
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.grid import block_bytes
from shardstore.storage.location import Location, store_errors
from shardstore.storage.manifest import ChunkRecord, Manifest
from shardstore.storage.parallel import default_threads, run_batched

__all__ = ["FileMover"]

CRC_BYTES = 4
IO_BYTES = 8 * 1024 * 1024
"""A single write; large enough that system calls do not count."""
READ_BYTES = 1024 * 1024
"""A single read, checksummed while it is still in the processor's cache."""
SCRATCH_BYTES = 4 * 1024 * 1024
"""Rows of a strided or padded chunk are gathered in pieces of about this size."""
PREALLOCATE_FROM = 64 * 1024
BATCH_BYTES = 4 * 1024 * 1024
_CRC = struct.Struct("<I")

_local = threading.local()


def _scratch(size: int) -> NDArray[np.uint8]:
    """This thread's scratch memory, kept from call to call while it is small: fresh pages cost more than the copy."""
    buffer: NDArray[np.uint8] | None = getattr(_local, "scratch", None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, np.uint8)
        if size <= 2 * SCRATCH_BYTES:
            _local.scratch = buffer
    return buffer[:size]


class FileMover:
    """Moves chunks between memory and a folder.

    Args:
        location: a local folder, the root of the checkpoint.
        threads: threads for each call, the caller's included; default: see :func:`default_threads`.
    """

    def __init__(self, location: Location, *, threads: int | None = None) -> None:
        self.location = location
        self.threads = threads or default_threads()
        self._done = threading.Lock()

    # -- writing -------------------------------------------------------------------------------

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""

        def work(batch: Sequence[ChunkWrite]) -> None:
            size = 0
            for item in batch:
                with store_errors("writing", self._path(item.array, item.index), key=item.array.key):
                    record = self._write_chunk(item)
                size += record.stored_bytes
                with self._done:
                    done(item, record)
            counters.add(bytes_written=size, chunks_written=len(batch))

        run_batched(
            writes,
            work,
            threads=self.threads,
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=BATCH_BYTES,
        )

    def _path(self, array: ArrayMeta, index: Sequence[int]) -> str:
        return f"{self.location.url}/{array.node}/{array.chunk_key(index)}"

    def _write_chunk(self, item: ChunkWrite) -> ChunkRecord:
        array = item.array
        total = array.chunk_bytes
        tail = CRC_BYTES if array.has_crc else 0
        fd = _create(self._path(array, item.index))
        try:
            pieces = _pieces(item.data(), array.grid.chunk_shape)
            if total <= PREALLOCATE_FROM:
                piece = b"".join(pieces)
                crc, running = _checksums(piece, block_bytes(total), 0, 0)
                _write_all(fd, [piece, _CRC.pack(crc)[:tail]], 0)
                digest = xxhash.xxh3_128_digest(piece)
                return ChunkRecord(total + tail, crc, digest, running[: _inner(total)])
            os.posix_fallocate(fd, 0, total + tail)
            return self._stream(fd, pieces, total, tail)
        finally:
            os.close(fd)

    def _stream(
        self, fd: int, pieces: Iterator[memoryview], total: int, tail: int
    ) -> ChunkRecord:
        block = block_bytes(total)
        hasher = xxhash.xxh3_128()
        crc = position = 0
        running: list[int] = []
        for whole in pieces:
            for start in range(0, len(whole), IO_BYTES):
                piece = whole[start : start + IO_BYTES]
                crc, found = _checksums(piece, block, crc, position)
                running += found
                hasher.update(piece)
                position += len(piece)
                last = position == total and tail
                _write_all(fd, [piece, _CRC.pack(crc)] if last else [piece], position - len(piece))
        return ChunkRecord(total + tail, crc, hasher.digest(), running[: _inner(total)])

    # -- reading -------------------------------------------------------------------------------

    def read(self, reads: Sequence[RegionRead], manifest: Callable[[], Manifest | None]) -> None:
        """See :meth:`Mover.read`."""
        parts = [part for read in reads for part in chunk_parts(read)]

        def work(batch: Sequence[ChunkPart]) -> None:
            size = 0
            for part in batch:
                size += self._read_part(part, manifest)
            counters.add(bytes_read=size, chunks_read=len(batch))

        run_batched(
            parts,
            work,
            threads=self.threads,
            weight=lambda part: part.out.nbytes,
            batch_weight=BATCH_BYTES,
        )

    def _read_part(self, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int:
        array = part.array
        path = self._path(array, part.index)
        expected = array.chunk_bytes + (CRC_BYTES if array.has_crc else 0)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ChunkMissingError(
                f"chunk {part.index} of key {array.key!r} is missing: {path}{_written_by(part, manifest)}; "
                "the checkpoint is damaged, load an earlier one",
                **_about(part, manifest, path),
            ) from None
        except OSError as error:
            with store_errors("reading", path, key=array.key):
                raise error
        try:
            size = os.fstat(fd).st_size
            if size != expected:
                raise ChunkCorruptError(
                    f"chunk {part.index} of key {array.key!r} has {size} bytes, not {expected}: {path}"
                    f"{_written_by(part, manifest)}; the checkpoint is damaged, load an earlier one",
                    **_about(part, manifest, path),
                )
            with store_errors("reading", path, key=array.key):
                return self._read_from(fd, part, manifest, path)
        finally:
            os.close(fd)

    def _read_from(
        self, fd: int, part: ChunkPart, manifest: Callable[[], Manifest | None], path: str
    ) -> int:
        array = part.array
        chunk_shape = array.grid.chunk_shape
        itemsize = part.out.dtype.itemsize
        whole = part.within.shape == chunk_shape
        if whole and part.out.flags.c_contiguous:
            return _read_whole(fd, part, as_bytes(part.out), manifest, path)
        valid = array.grid.box(part.index).shape
        low, high = _span(part.within.offset, part.within.shape, chunk_shape, itemsize)
        if array.has_crc:
            covers = part.within.shape == valid
            sums = None if covers else _running(array, part.index, manifest)
            if sums is None:
                return _read_rows(fd, part, manifest, path)
            block = block_bytes(array.chunk_bytes)
        else:
            sums, block = None, 1
        first = low // block * block
        last = min(-(-high // block) * block, array.chunk_bytes)
        straight = part.out.flags.c_contiguous and part.out.nbytes == high - low
        if straight:
            _read_range(fd, part, as_bytes(part.out), (low, high), (first, last), block, sums, manifest, path)
        else:
            scratch = _scratch(last - first)
            _read_range(fd, part, scratch, (first, last), (first, last), block, sums, manifest, path)
            _copy_out(scratch, part, low - first, chunk_shape, itemsize)
        return last - first


def _copy_out(
    scratch: NDArray[np.uint8], part: ChunkPart, start: int, chunk_shape: tuple[int, ...], itemsize: int
) -> None:
    """Copy a part out of the bytes from its first element on, whose rows lie as they do in the chunk."""
    strides, step = [], itemsize
    for edge in reversed(chunk_shape):
        strides.append(step)
        step *= edge
    view = np.ndarray(
        part.within.shape, part.out.dtype, scratch, offset=start, strides=tuple(reversed(strides))
    )
    part.out[...] = view


def _span(
    offset: tuple[int, ...], shape: tuple[int, ...], chunk_shape: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """First byte, and one past the last byte, of a box within a chunk."""
    first = last = 0
    for o, s, edge in zip(offset, shape, chunk_shape, strict=True):
        first = first * edge + o
        last = last * edge + o + s - 1
    return first * itemsize, (last + 1) * itemsize


def _inner(total: int) -> int:
    return max(0, -(-total // block_bytes(total)) - 1)


def _checksums(
    piece: memoryview | bytes, block: int, crc: int, position: int
) -> tuple[int, list[int]]:
    """Carry the running crc32c over a piece; also its value at each block boundary met on the way."""
    running = []
    start, size = 0, len(piece)
    view = memoryview(piece)
    while start < size:
        step = min(block - (position + start) % block, size - start)
        crc = crc32c(view[start : start + step], crc)
        start += step
        if (position + start) % block == 0:
            running.append(crc)
    return crc, running


def _pieces(source: NDArray[Any], chunk_shape: tuple[int, ...]) -> Iterator[memoryview]:
    """The bytes of a chunk in order: the source's own memory where it lies right, else gathered piece by piece.

    A piece is valid until the next one is asked for.
    """
    if source.shape == chunk_shape and source.flags.c_contiguous:
        yield memoryview(as_bytes(source))
        return
    yield from _gathered(source, chunk_shape)


def _gathered(source: NDArray[Any], chunk_shape: tuple[int, ...]) -> Iterator[memoryview]:
    itemsize = source.dtype.itemsize
    row_bytes = itemsize
    for edge in chunk_shape[1:]:
        row_bytes *= edge
    if row_bytes > SCRATCH_BYTES and len(chunk_shape) > 1:
        padding = np.zeros((0,) * (len(chunk_shape) - 1), source.dtype)
        for i in range(chunk_shape[0]):
            yield from _gathered(source[i] if i < source.shape[0] else padding, chunk_shape[1:])
        return
    rows = max(1, SCRATCH_BYTES // max(1, row_bytes))
    for start in range(0, chunk_shape[0], rows):
        count = min(rows, chunk_shape[0] - start)
        scratch = _scratch(count * row_bytes)
        block = scratch.view(source.dtype).reshape(count, *chunk_shape[1:])
        part = source[start : start + count]
        if part.shape != block.shape:
            scratch[:] = 0
        block[tuple(slice(n) for n in part.shape)] = part
        yield memoryview(scratch)


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        # Only if the attempt itself is still there: a swept attempt must not come back to life.
        folder = os.path.dirname(path)
        try:
            os.mkdir(folder)
        except FileExistsError:
            pass
        return os.open(path, flags, 0o666)


def _write_all(fd: int, pieces: Sequence[memoryview | bytes], offset: int) -> None:
    size = sum(len(piece) for piece in pieces)
    written = os.pwritev(fd, pieces, offset)
    while written < size:
        rest = memoryview(b"".join(pieces))[written:]
        more = os.pwrite(fd, rest, offset + written)
        written += more


def _read_whole(
    fd: int, part: ChunkPart, out: NDArray[np.uint8], manifest: Callable[[], Manifest | None], path: str
) -> int:
    """A whole chunk straight into its destination, verified against the checksum behind it."""
    view = memoryview(out)
    size, crc = len(view), 0
    check = part.array.has_crc
    tail = bytearray(CRC_BYTES if check else 0)
    for start in range(0, size, READ_BYTES):
        piece = view[start : start + READ_BYTES]
        last = start + len(piece) == size
        _read_all(fd, [piece, tail] if last and check else [piece], start, part, manifest, path)
        if check:
            crc = crc32c(piece, crc)
    if check and crc != _CRC.unpack(tail)[0]:
        raise _corrupt(part, manifest, path, _CRC.unpack(tail)[0], crc)
    return size + len(tail)


def _read_rows(fd: int, part: ChunkPart, manifest: Callable[[], Manifest | None], path: str) -> int:
    """A whole chunk in pieces, verified, the wanted part of each copied out."""
    array = part.array
    total = array.chunk_bytes
    scratch = _scratch(total + CRC_BYTES)
    _read_whole_scratch = memoryview(scratch)
    crc = 0
    for start in range(0, total, READ_BYTES):
        stop = min(start + READ_BYTES, total)
        end = stop + CRC_BYTES if stop == total else stop
        _read_all(fd, [_read_whole_scratch[start:end]], start, part, manifest, path)
        crc = crc32c(_read_whole_scratch[start:stop], crc)
    stored = _CRC.unpack(_read_whole_scratch[total : total + CRC_BYTES])[0]
    if crc != stored:
        raise _corrupt(part, manifest, path, stored, crc)
    itemsize = part.out.dtype.itemsize
    low, _ = _span(part.within.offset, part.within.shape, array.grid.chunk_shape, itemsize)
    _copy_out(scratch, part, low, array.grid.chunk_shape, itemsize)
    return total + CRC_BYTES


def _read_range(
    fd: int,
    part: ChunkPart,
    out: NDArray[np.uint8],
    wanted: tuple[int, int],
    blocks: tuple[int, int],
    block: int,
    sums: NDArray[np.uint32] | None,
    manifest: Callable[[], Manifest | None],
    path: str,
) -> None:
    """Bytes ``wanted`` of a chunk into ``out``, reading and verifying the blocks that they touch.

    The running checksum at the start of the first block is the seed; the one at each block's end must follow.
    """
    low, high = wanted
    view = memoryview(out)
    if sums is None:
        for start in range(low, high, IO_BYTES):
            stop = min(start + IO_BYTES, high)
            _read_all(fd, [view[start - low : stop - low]], start, part, manifest, path)
        return
    crc = int(sums[blocks[0] // block - 1]) if blocks[0] else 0
    step = max(block, READ_BYTES // block * block)
    for start in range(blocks[0], blocks[1], step):
        stop = min(start + step, blocks[1])
        before, after = max(0, low - start), max(0, stop - high)
        pieces: list[memoryview | bytearray] = [view[start + before - low : stop - after - low]]
        if before:
            pieces.insert(0, bytearray(before))
        if after:
            pieces.append(bytearray(after))
        _read_all(fd, pieces, start, part, manifest, path)
        for piece in pieces:
            crc = crc32c(piece, crc)
        expected = int(sums[-(-stop // block) - 1])
        if crc != expected:
            raise _corrupt(part, manifest, path, expected, crc)


def _read_all(
    fd: int,
    pieces: Sequence[Any],
    offset: int,
    part: ChunkPart,
    manifest: Callable[[], Manifest | None],
    path: str,
) -> None:
    size = sum(len(piece) for piece in pieces)
    got = os.preadv(fd, pieces, offset)
    while got < size:
        rest, skip = [], got
        for piece in pieces:
            view = memoryview(piece)
            if skip >= len(view):
                skip -= len(view)
                continue
            rest.append(view[skip:])
            skip = 0
        more = os.preadv(fd, rest, offset + got)
        if more == 0:
            raise ChunkCorruptError(
                f"chunk {part.index} of key {part.array.key!r} ends at byte {offset + got}: {path}"
                f"{_written_by(part, manifest)}; the checkpoint is damaged, load an earlier one",
                **_about(part, manifest, path),
            )
        got += more


def _running(
    array: ArrayMeta, index: tuple[int, ...], manifest: Callable[[], Manifest | None]
) -> NDArray[np.uint32] | None:
    found = manifest()
    return None if found is None else found.running_of(array, index)


def _writer(part: ChunkPart, manifest: Callable[[], Manifest | None]) -> int | None:
    try:
        found = manifest()
    except OSError:
        return None
    return None if found is None else found.writer(part.array, part.index)


def _written_by(part: ChunkPart, manifest: Callable[[], Manifest | None]) -> str:
    rank = _writer(part, manifest)
    return "" if rank is None else f" (written by rank {rank})"


def _about(
    part: ChunkPart, manifest: Callable[[], Manifest | None], path: str
) -> dict[str, Any]:
    return {
        "key": part.array.key,
        "chunk": part.index,
        "rank": _writer(part, manifest),
        "url": path,
    }


def _corrupt(
    part: ChunkPart, manifest: Callable[[], Manifest | None], path: str, stored: int, found: int
) -> ChunkCorruptError:
    return ChunkCorruptError(
        f"chunk {part.index} of key {part.array.key!r} fails its checksum (crc32c {stored:#010x} expected, "
        f"{found:#010x} found): {path}{_written_by(part, manifest)}; the checkpoint is damaged, load an earlier one",
        **_about(part, manifest, path),
    )
