"""Reads parts of files of other formats: by a memory mapping on a disk, by ranged GETs from an
object store.

It uses a few MiB of memory per thread, for files of any size.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import slabs, view_in_chunk
from shardstore.storage.movers.chunks import RegionRead
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.stores.location import Location, store_errors

BATCH_BYTES = 4 * 1024 * 1024
BLOCK_BYTES = 64 * 1024
"""Block size of reads of the small structures in a file, in bytes."""


def read_box(
    location: Location, name: str, start: int, shape: tuple[int, ...], box: Box, out: NDArray[Any]
) -> None:
    """Read a box of an array that a file holds in C order. Several threads may call it.

    Args:
        location: a local folder, or a prefix in an object store.
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
    if location.is_local:
        with store_errors("reading", f"{location.url}/{name}"):
            size = math.prod(shape) * out.dtype.itemsize
            raw = np.memmap(f"{location.url}/{name}", np.uint8, "r", start, (size,))
        where: tuple[Any, ...] = (..., *box.slices)
        out[...] = np.asarray(raw).view(out.dtype).reshape(shape)[where]
        return
    for first, last, target in slabs(out, box, shape, start):
        data = read_bytes(location, name, first, last)
        if len(data) != last - first:
            raise ValueError(f"it ends at byte {first + len(data)}")
        target[...] = view_in_chunk(np.frombuffer(data, np.uint8), target, shape)


def read_bytes(location: Location, name: str, start: int, stop: int) -> bytes:
    """Return bytes ``start:stop`` of a file, fewer if the file ends before ``stop``.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed.
    """
    found = location.read_range(name, start, stop) if start < stop else b""
    if found is None:
        raise FileNotFoundError(f"{location.url}/{name}")
    return found


def for_each_region(reads: Sequence[RegionRead], read: Callable[[RegionRead], None]) -> None:
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


class RangeFile(io.RawIOBase):
    """File object over a range of a file, for readers of small structures in it.

    It reads in blocks and keeps them, because such readers seek back and forth. It is not meant for
    the array data.

    Args:
        location: folder or prefix of the file.
        name: name of the file.
        start: first byte of the range.
        length: length of the range in bytes.
    """

    def __init__(self, location: Location, name: str, start: int, length: int) -> None:
        self._location, self._name = location, name
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
        return read_bytes(self._location, self._name, self._start + start, self._start + stop)
