"""One chunk compared with everything that is known of it: its size, its own crc32c, the manifest.

Reads a chunk in order through a little memory of the thread and keeps nothing of it. Knows one
chunk at a time; not which chunks there are, and not what becomes of what it finds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from shardstore.errors import ChunkMissingError, DamagedCheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.chunk_bytes import pieces
from shardstore.storage.movers.chunk_reader import CRC, CRC_BYTES, checksum_whole_file
from shardstore.storage.movers.chunks import RegionRead

__all__ = ["ChunkChecker", "Problem", "free_memory"]

READ_BYTES = 1024 * 1024
"""A single read: large enough that system calls do not count, small enough for the checksum to find
it in the processor's own cache."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a chunk.

    Attributes:
        kind: ``missing``, ``size``, ``crc``, ``manifest`` (not what was saved, though its own
            checksum is right) or ``unreadable``.
        text: what was found and what was expected, without subject.
    """

    kind: str
    text: str


def free_memory() -> None:
    """Give this thread's buffer back."""
    _local.__dict__.clear()


class ChunkChecker:
    """Checks chunks of one checkpoint; safe to use from several threads.

    Args:
        stored: the checkpoint.
        manifest: what the chunks were when they were written, if known.
        hashes: compare the 128-bit hash too, which costs a second pass over the bytes.
    """

    def __init__(
        self, stored: StoredCheckpoint, manifest: Manifest | None, *, hashes: bool = False
    ) -> None:
        self._stored = stored
        self._manifest = manifest
        self._hashes = hashes and manifest is not None

    def check(self, array: ArrayMeta, index: Sequence[int]) -> tuple[int, Problem | None]:
        """Check one chunk.

        Returns:
            Bytes read, and what is wrong, ``None`` for nothing.
        """
        row = None if self._manifest is None else self._manifest.row(array, index)
        try:
            if not array.is_plain:
                return self._check_decoded(array, index, row)
            name = f"{array.node}/{array.chunk_key(index)}"
            if not self._stored.location.is_local:
                data = self._stored.location.read(name)
                return self._check_stream(array, [memoryview(data)], len(data), row)
            return self._check_file(array, f"{self._stored.location.url}/{name}", row)
        except FileNotFoundError:
            return 0, Problem("missing", "is missing")
        except DamagedCheckpointError as error:
            return 0, Problem("crc", f"can not be decoded: {_first_line(error)}")
        except OSError as error:
            return 0, Problem("unreadable", f"can not be read: {_first_line(error)}")

    def _check_file(
        self, array: ArrayMeta, path: str, row: int | None
    ) -> tuple[int, Problem | None]:
        if array.has_crc and not (self._hashes and row is not None):
            tail = bytearray(CRC_BYTES)
            found = checksum_whole_file(path, array.chunk_bytes, tail)
            if found is not None and CRC.unpack(tail)[0] == found:
                return array.chunk_bytes + CRC_BYTES, self._against_manifest(row, found, None)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise FileNotFoundError(path) from None
        try:
            size = os.fstat(fd).st_size
            return self._check_stream(array, _read(fd), size, row)
        finally:
            os.close(fd)

    def _check_stream(
        self, array: ArrayMeta, source: Iterable[memoryview], size: int, row: int | None
    ) -> tuple[int, Problem | None]:
        total = array.chunk_bytes
        expected = total + (CRC_BYTES if array.has_crc else 0)
        if size != expected:
            return 0, Problem("size", f"has {size} bytes instead of {expected}")
        hasher = xxhash.xxh3_128() if self._hashes and row is not None else None
        crc = done = 0
        tail = b""
        for piece in source:
            body = piece if done + len(piece) <= total else piece[: max(0, total - done)]
            if len(body) < len(piece):
                tail += bytes(piece[len(body) :])
            crc = crc32c(body, crc)
            if hasher is not None:
                hasher.update(body)
            done += len(piece)
        if done != expected:
            return done, Problem("size", f"ended at byte {done} of {expected}")
        if array.has_crc:
            (own,) = CRC.unpack(tail)
            if own != crc:
                return done, Problem(
                    "crc", f"fails its checksum (crc32c {own:#010x} stored, {crc:#010x} found)"
                )
        return done, self._against_manifest(row, crc, None if hasher is None else hasher.digest())

    def _check_decoded(
        self, array: ArrayMeta, index: Sequence[int], row: int | None
    ) -> tuple[int, Problem | None]:
        """A chunk behind codecs that are undone by whoever reads this array."""
        box = array.grid.box(index)
        out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
        try:
            self._stored.read([RegionRead(array, box, out)])
        except ChunkMissingError as error:
            raise FileNotFoundError(str(error)) from None
        if row is None:
            return out.nbytes, None
        hasher = xxhash.xxh3_128() if self._hashes else None
        crc = 0
        for piece in pieces(out, array.grid.chunk_shape):
            crc = crc32c(piece, crc)
            if hasher is not None:
                hasher.update(piece)
        found = self._against_manifest(row, crc, None if hasher is None else hasher.digest())
        return out.nbytes, found

    def _against_manifest(self, row: int | None, crc: int, digest: bytes | None) -> Problem | None:
        if self._manifest is None or row is None:
            return None
        saved = int(self._manifest.crc[row])
        if crc != saved:
            return Problem(
                "manifest",
                f"is not what was saved (crc32c {saved:#010x} in the manifest, {crc:#010x} found)",
            )
        if digest is not None and digest != self._manifest.digest[row].tobytes():
            return Problem("manifest", "is not what was saved (its xxh3-128 hash differs)")
        return None


def _read(fd: int) -> Iterator[memoryview]:
    """The bytes of a file in order; each piece is valid until the next one is asked for."""
    buffer: memoryview | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = memoryview(bytearray(READ_BYTES + CRC_BYTES))
    offset = 0
    while got := os.preadv(fd, (buffer,), offset):
        yield buffer[:got]
        offset += got


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
