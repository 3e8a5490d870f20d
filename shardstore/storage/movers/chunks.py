"""The jobs of a mover: :class:`ChunkWrite` writes a whole chunk from memory, :class:`RegionRead`
reads a region into memory.

A mover takes lists of jobs and runs them in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.manifest import ChunkRecord, Manifest

Source = NDArray[Any] | Callable[[], NDArray[Any]]
FEW_CUTS = 16

SmallFiles = Sequence[tuple[str, bytes]]
"""Names below a location, and contents, of files that are no chunks."""
WriteDone = Callable[["ChunkWrite", ChunkRecord], None]
"""Callback that receives each written chunk."""
GetManifest = Callable[[], Manifest | None]
"""Function that returns the manifest of a checkpoint, which few reads need."""
ReadDone = Callable[[int, int], None]
"""Callback that receives the number of bytes that reached their destination, and of how many
chunks they are."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk to be written whole.

    Attributes:
        array: the array it belongs to.
        index: its index in the chunk grid.
        source: the part of the chunk within the array, with any strides and the array's data type;
            or a function that returns it. The mover calls the function when it writes the chunk.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    source: Source

    def data(self) -> NDArray[Any]:
        """Return the source array. Call the source function if there is one.

        Raises:
            ValueError: the array's shape or data type differs from the chunk's.
        """
        data = self.source() if callable(self.source) else self.source
        shape, dtype = self.array.grid.box(self.index).shape, dtypes.numpy_dtype(self.array.dtype)
        if data.shape != shape or data.dtype != dtype:
            raise ValueError(
                f"chunk {self.index} of key {self.array.key!r} takes {dtype} of shape {shape}, "
                f"not {data.dtype} of shape {data.shape}"
            )
        return data


@dataclass(slots=True)
class RegionRead:
    """A region to be read. Not frozen, because freezing takes longer than the construction itself.

    Attributes:
        array: the array to read from.
        box: the region, in elements of the array.
        out: the destination, with the region's shape, any strides and the array's data type.
    """

    array: ArrayMeta
    box: Box
    out: NDArray[Any]

    def __post_init__(self) -> None:
        dtype = dtypes.numpy_dtype(self.array.dtype)
        if self.out.shape != self.box.shape or self.out.dtype != dtype:
            raise ValueError(
                f"a region of key {self.array.key!r} gives {dtype} of shape {self.box.shape}, its "
                f"destination takes {self.out.dtype} of shape {self.out.shape}"
            )


@dataclass(slots=True)
class ChunkPart:
    """The part of a region that lies in one chunk. Not frozen, for the same reason as
    :class:`RegionRead`.

    Attributes:
        array: the array to read from.
        index: index of the chunk.
        within: the part, relative to the chunk's corner.
        out: the destination of the part.
        number: position of the chunk in C order over the grid.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    within: Box
    out: NDArray[Any]
    number: int


def chunk_parts(read: RegionRead) -> Iterator[ChunkPart]:
    """Split a region along the chunk grid."""
    array, out = read.array, read.out
    cuts = _few_cuts(array.grid, read.box) or _cuts(array.grid, read.box)
    for index, within, where, number in cuts:
        yield ChunkPart(array, index, within, out if where is None else out[where], number)


class _OverlappedChunk(NamedTuple):
    """A chunk that a region overlaps.

    Attributes:
        chunk: index of the chunk.
        within: the overlap, relative to the chunk.
        where: the overlap, relative to the region; ``None``: the whole region.
        number: position of the chunk in C order.
    """

    chunk: tuple[int, ...]
    within: Box
    where: tuple[Any, ...] | None
    number: int


@lru_cache(maxsize=512)  # many tensors and optimizer moments of a model share few shapes
def _few_cuts(grid: Grid, region: Box) -> Sequence[_OverlappedChunk] | None:
    """Return :func:`_cuts` as a tuple; ``None`` if there are more than :data:`FEW_CUTS`, which
    would take too much memory in the cache."""
    found = tuple(islice(_cuts(grid, region), FEW_CUTS + 1))
    return found if len(found) <= FEW_CUTS else None


def _cuts(grid: Grid, region: Box) -> Iterator[_OverlappedChunk]:
    for index in grid.overlapping(region):
        chunk = grid.box(index)
        common = chunk.intersect(region)
        assert common is not None
        # With the ellipsis, a 0-d part stays an array; indexing with () alone copies the element.
        where = None if common == region else (..., *common.relative_to(region.offset).slices)
        yield _OverlappedChunk(index, common.relative_to(chunk.offset), where, grid.linear(index))
