"""Read through host memory into tensors on a device, of another data type, or of other ranks.

Verified bytes pass through two buffers: one is read while the other is converted, copied or sent.
The buffers together use at most the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, flat_range_boxes
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.parallel import in_rounds

BUFFERS = 2
ALIGNMENT = 64

Read = Callable[[Sequence[RegionRead], ReadDone | None], None]


@dataclass(slots=True)
class HostRead(RegionRead):
    """A region that is read into host memory and then copied to its destination.

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


class Piece(NamedTuple):
    """A box of an array that is read into a buffer.

    Attributes:
        array: the array.
        box: box of the array.
        targets: for each destination its part of the box, and the array or tensor.
        chunks: number of chunks that are complete with each target.
    """

    array: ArrayMeta
    box: Box
    targets: Sequence[tuple[Any, Any]]
    chunks: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece in a buffer with several pieces."""
        return -(-self.box.size * dtypes.itemsize(self.array.dtype) // ALIGNMENT) * ALIGNMENT


def read_through_host(
    read: Read,
    regions: Sequence[RegionRead],
    budget_bytes: int,
    done: ReadDone | None = None,
    chunks: Sequence[Piece] = (),
) -> None:
    """Read regions to their destinations, :class:`HostRead` through buffers.

    Args:
        read: reads regions into arrays of the stored data types.
        regions: the wanted regions.
        budget_bytes: memory for the buffers. A compressed chunk, which cannot be read in parts, may
            need more.
        done: called as the regions fill, with bytes of their destinations.
        chunks: further chunks, which are read once for all of their destinations.

    Raises:
        ChunkMissingError, ChunkCorruptError: as ``read``.
    """
    through = [region for region in regions if isinstance(region, HostRead)]
    read([region for region in regions if not isinstance(region, HostRead)], done)
    limit_bytes = max(1, budget_bytes // BUFFERS)
    pieces = [piece for region in through for piece in _pieces(region, limit_bytes)]
    batches = in_batches([*pieces, *chunks], limit_bytes)
    pinned = any(region.out.is_cuda for region in through)
    for batch, buffer in zip(batches, read_ahead(read, batches, pinned=pinned), strict=False):
        deliver(buffer, batch, done)


def read_ahead(
    read: Read, batches: Sequence[Sequence[Piece]], *, pinned: bool = False
) -> Iterator[NDArray[np.uint8]]:
    """Yield a buffer with the stored bytes of each batch, while the next batch is read.

    A buffer is reused for the batch after the next.
    """
    sizes = [sum(piece.size_bytes for piece in batch) for batch in batches]
    buffers = [
        torch.empty(max(sizes), dtype=torch.uint8, pin_memory=pinned).numpy()
        for _ in batches[:BUFFERS]
    ]

    def fetch(number: int) -> NDArray[np.uint8]:
        if number >= len(batches) or not batches[number]:
            return np.empty(0, np.uint8)
        buffer = buffers[number % BUFFERS][: sizes[number]]
        views = zip(batches[number], _views(buffer, batches[number]), strict=True)
        read([RegionRead(piece.array, piece.box, view) for piece, view in views], None)
        return buffer

    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-host") as reader:
        coming = reader.submit(fetch, 0)
        for number in range(len(batches)):
            buffer = coming.result()
            coming = reader.submit(fetch, number + 1)
            yield buffer


def deliver(buffer: NDArray[np.uint8], batch: Sequence[Piece], done: ReadDone | None) -> None:
    """Copy the bytes of a batch to their destinations."""
    for piece, view in zip(batch, _views(buffer, batch), strict=True):
        for where, out in piece.targets:
            target = out if isinstance(out, torch.Tensor) else dtypes.as_tensor(out)
            with torch.no_grad():
                target.copy_(dtypes.as_tensor(view[where]))
            if done is not None:
                done(out.nbytes, piece.chunks)


def _views(buffer: NDArray[np.uint8], batch: Sequence[Piece]) -> list[NDArray[Any]]:
    """Cut a buffer into arrays of the pieces' shapes and stored data types."""
    starts = accumulate((piece.size_bytes for piece in batch), initial=0)
    views = []
    for piece, start in zip(batch, starts, strict=False):
        dtype = dtypes.numpy_dtype(piece.array.dtype)
        raw = buffer[start : start + piece.box.size * dtype.itemsize]
        views.append(raw.view(dtype).reshape(piece.box.shape))
    return views


def in_batches(pieces: Iterable[Piece], limit_bytes: int) -> list[list[Piece]]:
    """Divide pieces into batches that fit into a buffer or consist of one piece."""
    return list(in_rounds(pieces, lambda piece: piece.size_bytes, limit_bytes))


def _pieces(region: HostRead, limit_bytes: int) -> Iterator[Piece]:
    """Cut a region along the chunk grid and, if that is not enough, along its axes."""
    array = region.array
    most = max(1, limit_bytes // dtypes.itemsize(array.dtype))
    for part in chunk_parts(region):
        box = box_of(part)
        rest = box.size
        for small in _split(box, most) if array.is_plain else [box]:
            rest -= small.size
            where: tuple[Any, ...] = (..., *small.relative_to(box.offset).slices)
            yield Piece(array, small, [(..., part.out[where])], int(rest == 0))


def box_of(part: ChunkPart) -> Box:
    """Return the box of the array that a part of a chunk covers."""
    corner = part.array.grid.box(part.index).offset
    offset = tuple(a + b for a, b in zip(corner, part.within.offset, strict=True))
    return Box(offset, part.within.shape)


def _split(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most ``most`` elements, in C order."""
    for start in range(0, box.size, most):
        for part in flat_range_boxes(box.shape, start, min(start + most, box.size)):
            offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
            yield Box(offset, part.shape)
