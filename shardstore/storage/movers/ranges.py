"""Reads parts of files of other formats: by a memory mapping on a disk, by ranged GETs from an
object store.

It uses a few MiB of memory per thread, for files of any size.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import StorageError
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import slabs, view_in_chunk
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.stores.location import Location, open_regular, store_errors

BATCH_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 64 * 1024
"""Block size of reads of the small structures in a file, in bytes."""


class FileRanges:
    """Reads parts of the files below a location. Several threads may use it.

    Args:
        location: a local folder, or a prefix in an object store.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self._sizes: dict[str, int] = {}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the store failed.
        """
        if name not in self._sizes and self.location.is_local:
            with _reading(self.path(name)):
                self._sizes[name] = os.stat(self.path(name)).st_size
        elif name not in self._sizes:
            self._sizes.update((entry, n) for entry, n, _ in self.location.remote.details(name))
        if name not in self._sizes:
            raise FileNotFoundError(self.path(name))
        return self._sizes[name]

    def path(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.location.url}/{name}"

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes ``start:stop`` of a file, fewer if the file ends before ``stop``.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the store failed.
        """
        if not self.location.is_local:
            # A store refuses ranges that begin after the end of the object.
            stop = min(stop, self.size(name))
            found = self.location.remote.read_range(name, start, stop) if start < stop else b""
            if found is None:
                raise FileNotFoundError(self.path(name))
            return found
        if stop <= start:
            return b""
        with _reading(self.path(name)), open(open_regular(self.path(name)), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return os.pread(file.fileno(), min(stop, size) - start, start) if start < size else b""

    def read_box(
        self, name: str, start: int, shape: tuple[int, ...], box: Box, out: NDArray[Any]
    ) -> None:
        """Read a box of an array that a file holds in C order.

        Args:
            name: name of the file.
            start: byte offset of the array in the file.
            shape: shape of the array.
            box: the part to read.
            out: the destination, with the box's shape and the array's data type.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file ends before the array does.
            StorageError: the store failed.
        """
        if not out.size:
            return
        if self.location.is_local:
            where: tuple[Any, ...] = (..., *box.slices)
            out[...] = self._mapped(name, start, shape, out.dtype)[where]
            return
        for first, last, target in slabs(out, box, shape, start):
            data = self.read(name, first, last)
            if len(data) != last - first:
                raise ValueError(f"it ends at byte {first + len(data)}")
            target[...] = view_in_chunk(np.frombuffer(data, np.uint8), target, shape)

    def read_all(
        self,
        reads: Sequence[RegionRead],
        read: Callable[[RegionRead], None],
    ) -> None:
        """Call ``read`` for each region, from several threads."""

        def work(batch: Sequence[RegionRead]) -> None:
            for region in batch:
                read(region)

        run_batched(
            reads,
            work,
            threads=default_threads(),
            weight=lambda region: region.out.nbytes,
            batch_weight=BATCH_BYTES,
        )

    def _mapped(
        self, name: str, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        with _reading(self.path(name)):
            raw = np.memmap(self.path(name), np.uint8, "r", start, (nbytes,))
        found: NDArray[Any] = np.asarray(raw).view(dtype).reshape(shape)
        return found


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Convert errors of the disk to :class:`StorageError`; raise :class:`FileNotFoundError` for a
    missing file."""
    try:
        with store_errors("reading", path):
            yield
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise FileNotFoundError(path) from None
        raise


class RangeFile(io.RawIOBase):
    """File object over a range of a file, for readers of small structures in it.

    It reads in blocks and keeps them, because such readers seek back and forth. It is not meant for
    the array data.

    Args:
        ranges: reads the bytes.
        name: name of the file.
        start: first byte of the range.
        length: length of the range in bytes.
    """

    def __init__(self, ranges: FileRanges, name: str, start: int, length: int) -> None:
        self._ranges, self._name = ranges, name
        self._start, self._length = start, length
        self._position = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position within the range and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer and return the number of bytes, fewer than its size at the end of the
        range or of the file."""
        view = memoryview(buffer).cast("B")
        size = min(len(view), max(0, self._length - self._position))
        if size > 4 * BLOCK_BYTES:
            data = self._fetch(self._position, self._position + size)
        else:
            first = self._position // BLOCK_BYTES
            last = -(-(self._position + size) // BLOCK_BYTES)
            joined = b"".join(self._block(i) for i in range(first, last))
            begin = self._position - first * BLOCK_BYTES
            data = joined[begin : begin + size]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _block(self, i: int) -> bytes:
        if i not in self._blocks:
            stop = min((i + 1) * BLOCK_BYTES, self._length)
            self._blocks[i] = self._fetch(i * BLOCK_BYTES, stop)
        return self._blocks[i]

    def _fetch(self, start: int, stop: int) -> bytes:
        return self._ranges.read(self._name, self._start + start, self._start + stop)
