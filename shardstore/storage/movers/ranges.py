"""Reads parts of files of other formats: by a memory mapping on a disk, by ranged GETs from an
object store.

It uses a few MiB of memory per thread, for files of any size.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]
from numpy.typing import NDArray

from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import (
    SCRATCH_BYTES,
    as_bytes,
    scratch,
    slabs,
    view_in_chunk,
)
from shardstore.storage.movers.chunks import ReadDone, RegionRead
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import default_threads, run_batched
from shardstore.storage.stores.location import Location, open_regular, store_errors

BATCH_BYTES = 4 * 1024 * 1024
MAPPED_RUN_BYTES = 16 * 1024
"""Contiguous runs below this size are copied from a mapping, which is faster than a call each."""
GAP_BYTES = 1024 * 1024
"""Runs with gaps up to this size are read from a store with one request: the gap takes less time
than another request."""
REQUEST_BYTES = 8 * 1024 * 1024
REQUESTS = 8
"""Concurrent requests to a store. They use at most 8 times :data:`REQUEST_BYTES` of memory."""
BLOCK_BYTES = 64 * 1024
"""Block size of reads of the small structures in a file, in bytes."""


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box to read of an array that a file holds in C order.

    Attributes:
        name: name of the file.
        start: byte offset of the array in the file.
        shape: shape of the array.
        box: the part to read.
        out: the destination, with the box's shape, any strides and the array's data type.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    box: Box
    out: NDArray[Any]


class _Part(NamedTuple):
    """A slab of a box: its bytes in a file, and its destination."""

    name: str
    first: int
    last: int
    out: NDArray[Any]
    shape: tuple[int, ...]


def read_boxes(location: Location, boxes: Sequence[FileBox], done: ReadDone) -> None:
    """Read boxes of arrays in several files, from several threads.

    On a disk, contiguous runs are read directly to their destinations, and short ones are copied
    from a memory mapping. From a store, near runs are read with one request, and long ones with
    several at a time.

    Args:
        location: the folder or prefix of the files.
        boxes: the parts to read.
        done: called as the destinations fill.

    Raises:
        FileNotFoundError: a file does not exist.
        EOFError: a file ends before a box does.
        StorageError: the store failed.
    """
    parts = [
        _Part(one.name, first, last, out, one.shape)
        for one in boxes
        if one.out.size
        for first, last, out in slabs(
            one.out, one.box, one.shape, one.start, _gap_bytes(one, location.is_local)
        )
    ]
    if not location.is_local:
        requests = list(_joined(parts))
        run_batched(requests, lambda batch: _request(location, batch, done), threads=REQUESTS)
        return
    with ExitStack() as stack:
        files = {name: _LocalFile(location, name, stack) for name in {part.name for part in parts}}

        def copy(batch: Sequence[_Part]) -> None:
            for part in batch:
                files[part.name].read(part)
            done(sum(part.out.nbytes for part in batch), 0)

        size, threads = operator.attrgetter("out.nbytes"), default_threads()
        run_batched(parts, copy, threads=threads, weight=size, batch_weight=BATCH_BYTES)


def _gap_bytes(one: FileBox, is_local: bool) -> int:
    """Return the largest gap inside of a part."""
    if not is_local:
        return GAP_BYTES
    run = one.out.dtype.itemsize
    for length, edge in zip(reversed(one.box.shape), reversed(one.shape), strict=True):
        run *= length
        if length != edge:
            break
    return 0 if run >= MAPPED_RUN_BYTES else SCRATCH_BYTES


def _joined(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield the parts of each request: parts of a file with small gaps."""
    group: list[_Part] = []
    last = 0
    for part in sorted(parts, key=operator.itemgetter(0, 1, 2)):
        if group and (
            part.name != group[0].name
            or part.first - last > GAP_BYTES
            or part.last - group[0].first > REQUEST_BYTES
        ):
            yield group
            group, last = [], 0
        group.append(part)
        last = max(last, part.last)
    if group:
        yield group


def _request(location: Location, batch: Sequence[list[_Part]], done: ReadDone) -> None:
    """Read the parts of each request."""
    for parts in batch:
        name, first = parts[0][:2]
        last = max(part.last for part in parts)
        data = read_bytes(location, name, first, last)
        counters.add(bytes_read=len(data))
        if len(data) != last - first:
            raise EOFError(f"{name} ends at byte {first + len(data)}")
        for part in parts:
            own = np.frombuffer(data, np.uint8)[part.first - first : part.last - first]
            part.out[...] = view_in_chunk(own, part.out, part.shape)
            done(part.out.nbytes, 0)


class _LocalFile:
    """A file of a folder, open until the stack is closed."""

    def __init__(self, location: Location, name: str, stack: ExitStack) -> None:
        self._path = f"{location.url}/{name}"
        with store_errors("reading", self._path):
            self._fd = open_regular(self._path)
        stack.callback(os.close, self._fd)
        self._size = os.fstat(self._fd).st_size
        # Mapped once: a mapping takes as long as reading 100 KiB.
        self._mapped = lru_cache(lambda: np.memmap(self._path, np.uint8, "r"))

    def read(self, part: _Part) -> None:
        """Read a part."""
        _, first, last, out, shape = part
        if last > self._size:
            raise EOFError(f"{self._path} ends at byte {self._size}")
        counters.add(bytes_read=out.nbytes)
        if out.nbytes < last - first:
            out[...] = view_in_chunk(self._mapped()[first:last], out, shape)
            return
        memory = as_bytes(out) if out.flags.c_contiguous else scratch(last - first)
        with store_errors("reading", self._path):
            position = 0
            while position < len(memory):
                got = os.preadv(self._fd, [memory[position:].data], first + position)
                if not got:
                    raise EOFError(f"{self._path} ends at byte {first + position}")
                position += got
        if not out.flags.c_contiguous:
            out[...] = view_in_chunk(memory, out, shape)


def read_bytes(location: Location, name: str, start: int, stop: int) -> bytes:
    """Return bytes ``start:stop`` of a file, fewer if the file ends before ``stop``.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the store failed, or its server does not read ranges.
    """
    found = location.read_range(name, start, stop) if start < stop else b""
    if found is None:
        raise FileNotFoundError(f"{location.url}/{name}")
    if len(found) > max(0, stop - start):
        text = f"/{name}: the server sends whole files, not ranges; download them, or use another"
        raise location.error(text)
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
