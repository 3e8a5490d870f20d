"""Verifies one chunk: its size, its own crc32c, and the checksums of the commit.

Every read of a chunk in steps, from a file or an object, for a load or a verification, goes through
:class:`ChunkVerifier`. For the compiled reader, :func:`is_intact` compares the checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from shardstore.errors import ChunkCorruptError, ChunkMissingError, DamagedCheckpointError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import CRC32C, ArrayMeta
from shardstore.storage.format.grid import block_bytes
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.checksums import Sums, crc32c, read_chunk
from shardstore.storage.movers.chunk_bytes import pieces, scratch, span, view_in_chunk
from shardstore.storage.movers.chunks import ChunkPart, RegionRead
from shardstore.storage.movers.codecs import (
    CRC,
    CRC_BYTES,
    decompress,
    most_stored_bytes,
    stored_bytes,
)
from shardstore.storage.stores.location import open_regular

if TYPE_CHECKING:
    from shardstore.storage.checkpoint import StoredCheckpoint


READ_BYTES = 1024 * 1024
"""Size of one read, small enough for the checksum to find the bytes in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a chunk.

    Attributes:
        kind: ``missing``, ``size``, ``crc``, ``manifest`` (intact, but not the committed chunk) or
            ``unreadable``.
        text: the predicate of a sentence whose subject is the chunk.
    """

    kind: str
    text: str


MISSING = Problem("missing", "is missing")
NO_FILE = Problem("unreadable", "cannot be read: it is no regular file")


@dataclass(frozen=True, slots=True)
class Expected:
    """The bytes that a read of a chunk needs, and their expected checksums.

    Attributes:
        first: first byte of the range to read, in the uncompressed chunk.
        last: one past the last byte of the range.
        number: position of the chunk in C order over the grid.
        sums: the manifest's running checksums, one per block, from the block that starts at
            ``first``. They verify a part of the chunk, which starts and ends at block boundaries.
        before: running checksum of the bytes before that part.
        crc: the commit's crc32c of the whole chunk, if known.
        digest: the manifest's hash of the whole chunk, if the read compares it.
    """

    first: int
    last: int
    number: int
    sums: Sequence[int] | None = None
    before: int = 0
    crc: int | None = None
    digest: bytes | None = None

    @classmethod
    def of(cls, part: ChunkPart, manifest: Callable[[], Manifest | None]) -> Expected:
        """Return the bytes to read for ``part``: the blocks that it overlaps if the manifest has
        their checksums, else the whole chunk. Call ``manifest`` only if the result needs it."""
        array = part.array
        total, block = array.chunk_bytes, block_bytes(array.chunk_bytes)
        low, high = span(part.within, array.grid.chunk_shape, part.out.dtype.itemsize)
        if array.is_plain and not array.has_crc:
            return cls(low, high, part.number)
        first, last = low // block * block, min(-(-high // block) * block, total)
        # If the part is all but the padding, read the padding too: the chunk's own checksum
        # then suffices.
        is_all = part.within.shape == array.grid.box(part.index).shape
        is_whole = array.is_packed or last - first == total or (is_all and 2 * high >= total)
        crc = array.expected_crc(part.number)
        if is_whole and crc is not None:
            return cls(0, total, part.number, crc=crc)
        found = manifest()
        running = None if found is None else found.running_of(array, part.index)
        if running is None:
            return cls(0, total, part.number, crc=crc)
        sums = running.tolist()
        if is_whole:
            return cls(0, total, part.number, crc=sums[-1])
        begin = first // block
        before = sums[begin - 1] if begin else 0
        return cls(first, last, part.number, sums[begin:], before)


class ChunkVerifier:
    """Verifies the stored bytes of one chunk as they arrive.

    Args:
        array: the chunk's array.
        expected: the range of bytes that arrives, and its checksums.
    """

    def __init__(self, array: ArrayMeta, expected: Expected) -> None:
        self._array, self._expected = array, expected
        block = array.chunk_bytes if expected.sums is None else block_bytes(array.chunk_bytes)
        self._sums = Sums(block, expected.before, expected.first)
        self._is_summed = array.has_crc or expected.crc is not None
        self._hasher = None if expected.digest is None else xxhash.xxh3_128()
        self._rest = bytearray()
        """The stored crc32c; all bytes of a compressed chunk."""
        self.count = 0
        """Number of bytes that have arrived."""
        self.chunk: bytes | None = None
        """A compressed chunk's content, after :meth:`finish`."""

    def update(self, data: memoryview) -> None:
        """Take the next stored bytes of the chunk."""
        end = 0
        if not self._array.is_packed:
            end = max(0, self._expected.last - self._expected.first - self.count)
            self._add(data[:end])
        self._rest += data[end:]
        self.count += len(data)

    def finish(self) -> Problem | None:
        """Compare the checksums after the last byte. Return ``None`` if all agree."""
        array, expected = self._array, self._expected
        has_own = array.has_crc and expected.sums is None
        body = memoryview(self._rest)[:-CRC_BYTES]
        size = expected.last - expected.first + (CRC_BYTES if has_own else 0)
        if array.is_packed and not body:
            return Problem("size", f"has {self.count} bytes, fewer than any chunk")
        end = expected.first + self.count
        if array.is_packed and (found := size_problem(array, expected.number, end)) is not None:
            return found
        if not array.is_packed and self.count != size:
            found = size_problem(array, expected.number, end)
            return found or Problem("size", f"came as {self.count} bytes where {size} were read")
        if has_own:
            (own,) = CRC.unpack(self._rest[-CRC_BYTES:])
            crc = crc32c(body, 0) if array.is_packed else self._sums.crc
            if own != crc:
                return _mismatch(own, crc)
        if array.is_packed:
            try:
                self.chunk = decompress(array, body)
            except ValueError as error:
                return Problem("crc", str(error))
            self._add(memoryview(self.chunk))
        for wanted, crc in zip(expected.sums or (), self._sums.ends(), strict=False):
            if wanted != crc:
                return _mismatch(wanted, crc)
        return self._compare_committed()

    def _add(self, body: memoryview) -> None:
        if self._is_summed:
            self._sums.add(body)
        if self._hasher is not None:
            self._hasher.update(body)

    def _compare_committed(self) -> Problem | None:
        crc, digest = self._expected.crc, self._expected.digest
        if crc is not None and crc != self._sums.crc:
            how = f"crc32c {crc:#010x} expected, {self._sums.crc:#010x} found"
        elif self._hasher is not None and digest != self._hasher.digest():
            how = "its xxh3-128 hash differs"
        else:
            return None
        return Problem(
            "manifest",
            f"is intact but not the chunk that was committed ({how}): it was replaced, or "
            "overwritten by a late writer of another save",
        )


def _mismatch(expected: int, found: int) -> Problem:
    text = f"fails its checksum (crc32c {expected:#010x} expected, {found:#010x} found)"
    return Problem("crc", text)


def is_intact(read: tuple[int, int] | None, committed: int | None) -> bool:
    """Return whether the computed, stored and committed checksums of a whole chunk agree.

    Args:
        read: computed and stored checksum, from :func:`read_chunk`.
        committed: the commit's checksum, if known.
    """
    return read is not None and read[0] == read[1] and committed in (None, read[0])


def size_problem(array: ArrayMeta, number: int, found: int) -> Problem | None:
    """Return the problem if a chunk's file or object has a wrong size, else ``None``. ``number`` is
    the position of the chunk in C order over the grid."""
    stored, most = stored_bytes(array, number), most_stored_bytes(array, number)
    if stored is None and found > most:
        return Problem("size", f"has {found} bytes, and compressed chunks at most {most}")
    if stored in (None, found):
        return None
    return Problem("size", f"has {found} bytes, not {stored}")


def read_file(
    path: str,
    array: ArrayMeta,
    expected: Expected,
    targets: Iterable[memoryview],
    part: ChunkPart | None = None,
) -> tuple[int, Problem | None]:
    """Read the expected bytes of a chunk's file, and verify them.

    Args:
        path: path of the file.
        array: the chunk's array.
        expected: the range of bytes to read, and its checksums.
        targets: memory for the bytes in order, written before the bytes are verified. Each view is
            filled before the next one is requested. The views may exceed the size of the file.
        part: receives its elements of a compressed chunk after verification.

    Returns:
        Number of bytes read, and the problem; ``None`` if the chunk is intact.
    """
    try:
        fd = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return 0, MISSING
    except (IsADirectoryError, DamagedCheckpointError):
        return 0, NO_FILE
    verifier = ChunkVerifier(array, expected)
    try:
        size = os.fstat(fd).st_size
        if (problem := size_problem(array, expected.number, size)) is not None:
            return 0, problem
        for view in targets:
            got = _fill(fd, view, expected.first + verifier.count)
            verifier.update(view[:got])
            if got < len(view):
                break
    finally:
        os.close(fd)
    problem = verifier.finish()
    if part is not None and problem is None and verifier.chunk is not None:
        _scatter(part, expected, verifier.chunk)
    return verifier.count, problem


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """Read until ``view`` is full or the file ends. Return the number of bytes."""
    done = 0
    while done < len(view) and (got := os.preadv(fd, [view[done:]], offset + done)):
        done += got
    return done


def receive(part: ChunkPart, expected: Expected, data: bytes | memoryview) -> Problem | None:
    """Verify the bytes of :class:`Expected`, all at once. Copy the part to ``part.out`` if they are
    intact; otherwise return the problem and write nothing."""
    verifier = ChunkVerifier(part.array, expected)
    verifier.update(memoryview(data))
    problem = verifier.finish()
    if problem is None:
        _scatter(part, expected, verifier.chunk or data)
    return problem


def _scatter(part: ChunkPart, expected: Expected, data: bytes | memoryview) -> None:
    shape, out = part.array.grid.chunk_shape, part.out
    low, high = span(part.within, shape, out.dtype.itemsize)
    wanted = np.frombuffer(data, np.uint8)[low - expected.first : high - expected.first]
    out[...] = view_in_chunk(wanted, out, shape)


def chunk_error(
    array: ArrayMeta,
    index: Sequence[int],
    url: str,
    problem: Problem,
    manifest: Callable[[], Manifest | None],
) -> ChunkMissingError | ChunkCorruptError:
    """Return the error for a chunk that cannot be read. The error names the rank that wrote the
    chunk, if the manifest has it."""
    rank = None
    with suppress(OSError):  # an unreadable manifest matters less than the damaged chunk
        found = manifest()
        rank = None if found is None else found.writer(array, index)
    by = "" if rank is None else f" (written by rank {rank})"
    kind = ChunkMissingError if problem.kind == "missing" else ChunkCorruptError
    return kind(
        f"chunk {tuple(index)} of key {array.key!r} {problem.text}: {url}{by}; the checkpoint is "
        "damaged, load an earlier one",
        key=array.key,
        chunk=tuple(index),
        rank=rank,
        url=url,
    )


class ChunkChecker:
    """Verifies chunks of one checkpoint and discards their data. Several threads may use it.

    Args:
        stored: the checkpoint.
        manifest: its manifest, if it has one.
        hashes: whether to compare the 128-bit hash too, which takes a second pass over the bytes.
    """

    def __init__(
        self, stored: StoredCheckpoint, manifest: Manifest | None, *, hashes: bool = False
    ) -> None:
        self._stored = stored
        self._manifest = manifest
        self._hashes = hashes

    def check(self, array: ArrayMeta, index: Sequence[int]) -> tuple[int, Problem | None]:
        """Verify one chunk.

        Returns:
            Number of bytes read, and the problem; ``None`` if the chunk is intact.
        """
        number, manifest = array.grid.linear(index), self._manifest
        expected = Expected(0, array.chunk_bytes, number)
        row = None if manifest is None else manifest.row(array, index)
        if manifest is not None and row is not None:
            digest = manifest.digest[row].tobytes() if self._hashes else None
            expected = replace(expected, crc=int(manifest.crc[row]), digest=digest)
        verifier = ChunkVerifier(array, expected)
        location = self._stored.location
        name = array.chunk_name(index)
        path = f"{location.url}/{name}"
        try:
            if not (array.is_plain or array.is_packed):
                return self._check_decoded(array, index, verifier)
            if not location.is_local:
                data = location.read_range(name, 0, most_stored_bytes(array, number) + 1)
                if data is None:
                    return 0, MISSING
                verifier.update(memoryview(data))
                return verifier.count, verifier.finish()
            quick = array.codecs == (CRC32C,) and not self._hashes
            if quick and is_intact(read_chunk(path, array.chunk_bytes), expected.crc):
                return array.chunk_bytes + CRC_BYTES, None
            return read_file(path, array, expected, repeat(scratch(READ_BYTES).data))
        except FileNotFoundError:
            return 0, MISSING
        except DamagedCheckpointError as error:
            return 0, Problem("crc", f"cannot be decoded: {_first_line(error)}")
        except OSError as error:
            return 0, Problem("unreadable", f"cannot be read: {_first_line(error)}")

    def _check_decoded(
        self, array: ArrayMeta, index: Sequence[int], verifier: ChunkVerifier
    ) -> tuple[int, Problem | None]:
        """Read and verify a chunk with codecs of other programs through TensorStore."""
        box = array.grid.box(index)
        out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
        try:
            self._stored.read([RegionRead(array, box, out)])
        except ChunkMissingError as error:
            raise FileNotFoundError(str(error)) from None
        for piece in pieces(out, array.grid.chunk_shape):
            verifier.update(piece)
        return out.nbytes, verifier.finish()


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
