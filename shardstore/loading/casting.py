"""Loads through host memory: into tensors of another data type than the stored one, or on a device.

The stored bytes go, verified, through two buffers, of which one is read while the other is
converted or copied; no more of them is in memory at a time than the budget says. It knows regions
and a function that reads; not why somebody wants another data type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from shardstore.loading.context import LoadContext
from shardstore.storage.format import dtypes
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.parallel import default_threads

__all__ = [
    "CastRead",
    "budget_of",
    "can_cast",
    "converted",
    "goes_through_host",
    "read_converting",
]

BUFFERS = 2
ALIGNMENT = 64
BYTES_A_THREAD = 32 * 1024 * 1024
"""Of files: more is only memory that is touched for the first time, and that takes its time."""

Read = Callable[[Sequence[RegionRead], ReadDone | None], None]


def goes_through_host(tensor: torch.Tensor) -> bool:
    """Whether bytes can not be read into a tensor's own memory, which is on a device."""
    return not tensor.is_cpu


def budget_of(context: LoadContext) -> int:
    """Return how much of a load's budget is used: all of it where requests take long."""
    if context.stored.location.is_local:
        return min(context.budget_bytes, BYTES_A_THREAD * default_threads())
    return context.budget_bytes


def can_cast(stored: str, wanted: torch.dtype) -> bool:
    """Whether values of a stored type may become another's: as ``torch.can_cast``, no fraction, no
    imaginary part and no number that is to be a truth value is lost. Within a kind (float64 to
    float16, int64 to int8) values that do not fit become what ``copy_`` makes of them."""
    return torch.can_cast(dtypes.torch_dtype(stored), wanted)


@dataclass(slots=True)
class CastRead(RegionRead):
    """A region to be read through host memory, and converted if its tensor is of another data type.

    Attributes:
        out: the tensor that it goes into, of the region's shape, on any device.
    """

    out: Any

    def __post_init__(self) -> None:
        if tuple(self.out.shape) != self.box.shape:
            raise ValueError(
                f"a region of key {self.array.key!r} has shape {self.box.shape}, its destination "
                f"{tuple(self.out.shape)}"
            )


def converted(out: torch.Tensor, stored: NDArray[Any]) -> None:
    """Fill a tensor with stored values."""
    with torch.no_grad():
        out.copy_(dtypes.as_tensor(stored))


def read_converting(
    read: Read,
    regions: Sequence[RegionRead],
    budget_bytes: int,
    done: ReadDone | None = None,
) -> None:
    """Read regions, :class:`CastRead` or not.

    Args:
        read: reads regions of their arrays' own data types.
        regions: what is wanted.
        budget_bytes: for the buffers. A chunk that can not be read in parts, as it is compressed,
            may take more.
        done: told as the regions fill, in bytes of their destinations.

    Raises:
        ChunkMissingError, ChunkCorruptError: as ``read``.
    """
    plain = [region for region in regions if not isinstance(region, CastRead)]
    cast = [region for region in regions if isinstance(region, CastRead)]
    if plain or not cast:
        read(plain, done)
    if not cast:
        return
    limit = max(1, budget_bytes // BUFFERS)
    batches = list(_batches(cast, limit))
    buffers = _Buffers(min(limit, max(map(_size, batches))), any(r.out.is_cuda for r in cast))

    def fetch(number: int) -> list[NDArray[Any]]:
        if number >= len(batches):
            return []
        views = buffers.views(number, batches[number])
        pairs = zip(batches[number], views, strict=True)
        read([RegionRead(piece.array, piece.box, view) for (piece, _), view in pairs], None)
        return views

    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-host") as reader:
        coming = reader.submit(fetch, 0)
        for number, batch in enumerate(batches):
            views = coming.result()
            coming = reader.submit(fetch, number + 1)
            for (piece, chunks), view in zip(batch, views, strict=True):
                converted(piece.out, view)
                if done is not None:
                    done(piece.out.nbytes, chunks)


_Batch = list[tuple[CastRead, int]]
"""Pieces, and how many chunks are complete with each."""


class _Buffers:
    """Host memory that batches take turns in."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._size = size
        self._pinned = pinned
        self._memory: list[torch.Tensor | None] = [None] * BUFFERS

    def views(self, number: int, batch: _Batch) -> list[NDArray[Any]]:
        """Room for each piece of a batch, of the stored data type."""
        size = max(self._size, _size(batch))
        memory = self._memory[number % BUFFERS]
        if memory is None or memory.numel() < size:
            self._memory[number % BUFFERS] = memory = None  # the old goes before the new comes
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory[number % BUFFERS] = memory
        views, position, raw = [], 0, memory.numpy()
        for piece, _ in batch:
            count = piece.box.size * dtypes.itemsize(piece.array.dtype)
            view = raw[position : position + count].view(dtypes.numpy_dtype(piece.array.dtype))
            views.append(view.reshape(piece.box.shape))
            position += _held(piece)
        return views


def _held(piece: CastRead) -> int:
    """Bytes in a buffer."""
    return -(-piece.box.size * dtypes.itemsize(piece.array.dtype) // ALIGNMENT) * ALIGNMENT


def _size(batch: _Batch) -> int:
    return sum(_held(piece) for piece, _ in batch)


def _batches(regions: Sequence[CastRead], limit: int) -> Iterator[_Batch]:
    batch: _Batch = []
    size = 0
    for region in regions:
        for piece, chunks in _pieces(region, limit):
            if batch and size + _held(piece) > limit:
                yield batch
                batch, size = [], 0
            batch.append((piece, chunks))
            size += _held(piece)
    if batch:
        yield batch


def _pieces(region: CastRead, limit: int) -> Iterator[tuple[CastRead, int]]:
    """A region cut along the chunk grid, and where that is not enough along its axes."""
    array = region.array
    most = max(1, limit // dtypes.itemsize(array.dtype))
    for part in chunk_parts(region):
        corner = array.grid.box(part.index).offset
        offset = tuple(a + b for a, b in zip(corner, part.within.offset, strict=True))
        box = Box(offset, part.within.shape)
        rest = box.size
        for small in _split(box, most) if array.is_plain else [box]:
            rest -= small.size
            where: tuple[Any, ...] = (..., *small.relative_to(offset).slices)
            yield CastRead(array, small, part.out[where]), int(rest == 0)


def _split(box: Box, most: int) -> Iterator[Box]:
    """Boxes of at most so many elements, in the order of their elements."""
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
