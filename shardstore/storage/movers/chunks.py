"""The jobs of a mover: whole chunks to write from memory, regions to read into memory.

A mover takes lists of them and carries them out with its own parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, chunk_key
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.manifest import ChunkRecord, Manifest

Source = NDArray[Any] | Callable[[], NDArray[Any]]
FEW_CUTS = 16

ReadDone = Callable[[int, int], None]
"""Called with the bytes that have reached their destination, and their number of chunks."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk to be written whole.

    Attributes:
        array: the array it belongs to.
        index: its index in the chunk grid.
        source: the part of the chunk within the array, any strides, true data type; or a function
            that returns it, called when the chunk is written.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    source: Source

    def data(self) -> NDArray[Any]:
        """Return the source array, or what the source function returns.

        Raises:
            ValueError: it has another shape or data type than the chunk.
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
    """A region to be read. Not frozen: that takes longer than to make it.

    Attributes:
        array: the array to read from.
        box: the region, in elements of the array.
        out: its destination, of the region's shape, any strides, the array's data type.
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
    """The part of a region that lies in one chunk. Not frozen, as :class:`RegionRead`.

    Attributes:
        array: the array to read from.
        index: index of the chunk.
        within: the part, relative to the chunk's corner.
        out: its destination.
        key: key of the chunk below the array.
        number: position of the chunk in C order over the grid.
        is_whole: whether the part is the whole chunk.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    within: Box
    out: NDArray[Any]
    key: str
    number: int
    is_whole: bool


def chunk_parts(read: RegionRead) -> Iterator[ChunkPart]:
    """Split a region along the chunk grid."""
    array, out = read.array, read.out
    cutting = array.grid, array.zarr_format, array.separator, read.box
    cuts = _few_cuts(*cutting)
    for index, within, where, key, number, whole in _cuts(*cutting) if cuts is None else cuts:
        target = out if where is None else out[where]
        yield ChunkPart(array, index, within, target, key, number, whole)


_Cut = tuple[tuple[int, ...], Box, tuple[Any, ...] | None, str, int, bool]
"""A chunk that a region touches: its index, the part that is touched, the place of that part in the
region (``None``: it is the whole region), the chunk's key, its number, and whether the part is the
whole chunk."""


@lru_cache(maxsize=512)  # a model has many tensors of few shapes, each with its moments
def _few_cuts(grid: Grid, zarr_format: int, separator: str, region: Box) -> Sequence[_Cut] | None:
    """:func:`_cuts` if they are few; more would take much memory."""
    found = tuple(islice(_cuts(grid, zarr_format, separator, region), FEW_CUTS + 1))
    return found if len(found) <= FEW_CUTS else None


def _cuts(grid: Grid, zarr_format: int, separator: str, region: Box) -> Iterator[_Cut]:
    one = grid.chunk_at(region)
    for index in grid.overlapping(region) if one is None else (one,):
        chunk = grid.box(index)
        common = chunk.intersect(region)
        assert common is not None
        # The ellipsis keeps a 0-d part an array: indexing with () alone copies the element.
        where = (..., *common.relative_to(region.offset).slices) if one is None else None
        yield (
            index,
            common.relative_to(chunk.offset),
            where,
            chunk_key(zarr_format, separator, index),
            grid.linear(index),
            common.shape == grid.chunk_shape,
        )


class Mover(Protocol):
    """Moves chunks between memory and one location."""

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """Write whole chunks; ``done`` is called for each, from any thread, one call at a time.

        Raises:
            StorageError: the store refused; nothing more is started, what runs is waited for.
        """

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: Callable[[], Manifest | None],
        done: ReadDone | None = None,
    ) -> None:
        """Read regions into their destinations, verifying every byte that has a checksum; ``done``
        is called as they arrive, from any thread.

        Raises:
            ChunkMissingError, ChunkCorruptError: name key, chunk and, where the manifest knows it,
                the writer.
        """
