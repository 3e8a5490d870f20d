"""Reads that go through host memory: into tensors on a device, or of another data type.

The stored bytes go, verified, through two buffers: one is read while the other is converted or
copied. The buffers together take no more memory than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.loading.context import LoadContext
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.parallel import default_threads

__all__ = [
    "HostRead",
    "box_of",
    "budget_of",
    "carved",
    "carved_bytes",
    "fill",
    "read_through_host",
]

BUFFERS = 2
ALIGNMENT = 64
BYTES_A_THREAD = 32 * 1024 * 1024
"""Larger buffers gain nothing for files, and touching new memory takes time."""

Read = Callable[[Sequence[RegionRead], ReadDone | None], None]


@dataclass(slots=True)
class HostRead(RegionRead):
    """A region that is read into host memory, and from there copied to its destination.

    Attributes:
        out: a tensor of the region's shape, on any device and of any data type.
    """

    out: Any

    def __post_init__(self) -> None:
        if tuple(self.out.shape) != self.box.shape:
            raise ValueError(
                f"a region of key {self.array.key!r} has shape {self.box.shape}, its destination "
                f"{tuple(self.out.shape)}"
            )


def budget_of(context: LoadContext) -> int:
    """Return how much of a load's budget is used: all of it where requests take long."""
    if context.stored.location.is_local:
        return min(context.budget_bytes, BYTES_A_THREAD * default_threads())
    return context.budget_bytes


def fill(out: Any, stored: NDArray[Any]) -> None:
    """Copy stored values to the destination of a read, an array or a tensor."""
    target = out if isinstance(out, torch.Tensor) else dtypes.as_tensor(out)
    with torch.no_grad():
        target.copy_(dtypes.as_tensor(stored))


def read_through_host(
    read: Read,
    regions: Sequence[RegionRead],
    budget_bytes: int,
    done: ReadDone | None = None,
) -> None:
    """Read regions to their destinations, :class:`HostRead` through buffers.

    Args:
        read: reads regions into arrays of the stored data types.
        regions: what is wanted.
        budget_bytes: for the buffers. A chunk that cannot be read in parts, as it is compressed,
            may take more.
        done: told as the regions fill, in bytes of their destinations.

    Raises:
        ChunkMissingError, ChunkCorruptError: as ``read``.
    """
    through = [region for region in regions if isinstance(region, HostRead)]
    direct = [region for region in regions if not isinstance(region, HostRead)]
    if direct or not through:
        read(direct, done)
    if not through:
        return
    batches = list(_batches(through, max(1, budget_bytes // BUFFERS)))
    size = max(sum(carved_bytes(part.array, part.box) for part, _ in batch) for batch in batches)
    pinned = any(region.out.is_cuda for region in through)
    buffers = [
        torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy() for _ in batches[:BUFFERS]
    ]

    def fetch(number: int) -> list[NDArray[Any]]:
        if number >= len(batches):
            return []
        parts = [part for part, _ in batches[number]]
        views = carved(buffers[number % BUFFERS], [(part.array, part.box) for part in parts])
        pairs = zip(parts, views, strict=True)
        read([RegionRead(part.array, part.box, view) for part, view in pairs], None)
        return views

    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-host") as reader:
        coming = reader.submit(fetch, 0)
        for number, batch in enumerate(batches):
            views = coming.result()
            coming = reader.submit(fetch, number + 1)
            for (part, chunks), view in zip(batch, views, strict=True):
                fill(part.out, view)
                if done is not None:
                    done(part.out.nbytes, chunks)


def carved_bytes(array: ArrayMeta, box: Box) -> int:
    """Bytes that a region takes in a buffer of several."""
    return -(-box.size * dtypes.itemsize(array.dtype) // ALIGNMENT) * ALIGNMENT


def carved(
    buffer: NDArray[np.uint8], regions: Sequence[tuple[ArrayMeta, Box]]
) -> list[NDArray[Any]]:
    """Cut a buffer into arrays of the regions' shapes and stored data types."""
    ends = accumulate((carved_bytes(*region) for region in regions), initial=0)
    views = []
    for (array, box), start in zip(regions, ends, strict=False):
        dtype = dtypes.numpy_dtype(array.dtype)
        raw = buffer[start : start + box.size * dtype.itemsize]
        views.append(raw.view(dtype).reshape(box.shape))
    return views


_Batch = list[tuple[HostRead, int]]
"""Parts of regions, and how many chunks are complete with each."""


def _batches(regions: Iterable[HostRead], limit_bytes: int) -> Iterator[_Batch]:
    batch: _Batch = []
    size = 0
    for region in regions:
        for part, chunks in _parts(region, limit_bytes):
            more = carved_bytes(part.array, part.box)
            if batch and size + more > limit_bytes:
                yield batch
                batch, size = [], 0
            batch.append((part, chunks))
            size += more
    if batch:
        yield batch


def _parts(region: HostRead, limit_bytes: int) -> Iterator[tuple[HostRead, int]]:
    """Cut a region along the chunk grid, and where that is not enough along its axes."""
    array = region.array
    most = max(1, limit_bytes // dtypes.itemsize(array.dtype))
    for part in chunk_parts(region):
        box = box_of(part)
        rest = box.size
        for small in _split(box, most) if array.is_plain else [box]:
            rest -= small.size
            where: tuple[Any, ...] = (..., *small.relative_to(box.offset).slices)
            yield HostRead(array, small, part.out[where]), int(rest == 0)


def box_of(part: ChunkPart) -> Box:
    """Return which part of its array a part of a chunk is."""
    corner = part.array.grid.box(part.index).offset
    offset = tuple(a + b for a, b in zip(corner, part.within.offset, strict=True))
    return Box(offset, part.within.shape)


def _split(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most so many elements, in C order."""
    if box.size <= most:
        yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    rows = max(1, most // (box.size // box.shape[axis]))
    for start in range(0, box.shape[axis], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += start
        shape[axis] = min(rows, box.shape[axis] - start)
        yield from _split(Box(tuple(offset), tuple(shape)), most)
