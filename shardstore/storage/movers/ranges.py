"""Reads parts of files of other formats: by a memory mapping on a disk, by ranged GETs from an
object store.

It uses a few MiB of memory per thread, for files of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]
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


class RangeFile(AbstractBufferedFile):  # type: ignore[misc]
    """File object over a range of a file, for readers of small structures in it.

    It reads ahead and keeps what it read last, because such readers seek back and forth. It is not
    meant for the array data.

    Args:
        location: folder or prefix of the file.
        name: name of the file.
        start: first byte of the range.
        length: length of the range in bytes.
    """

    def __init__(self, location: Location, name: str, start: int, length: int) -> None:
        self._read = partial(read_bytes, location, name)
        self._first = start
        super().__init__(None, name, block_size=BLOCK_BYTES, cache_type="bytes", size=length)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._read(self._first + start, self._first + end)
