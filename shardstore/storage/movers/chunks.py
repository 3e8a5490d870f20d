"""What a mover moves: whole chunks out of arrays in memory, regions into arrays in memory.

A mover takes lists of these and carries them out with its own parallelism. It knows chunks, bytes
and one location; not who else writes, and not what a checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

from numpy.typing import NDArray

from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, chunk_key
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.format.manifest import ChunkRecord, Manifest

__all__ = ["ChunkPart", "ChunkWrite", "Mover", "ReadDone", "RegionRead", "chunk_parts", "told"]

Source = NDArray[Any] | Callable[[], NDArray[Any]]
FEW_CUTS = 16

ReadDone = Callable[[int, int], None]
"""Told the bytes that have reached their destination, and of how many chunks."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk to be written whole.

    Attributes:
        array: the array it belongs to.
        index: its index in the chunk grid.
        source: the part of it that lies within the array, any strides, true data type; or a
            function that brings it to the host when its turn comes.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    source: Source

    def data(self) -> NDArray[Any]:
        """The source array, fetched if need be.

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


@contextmanager
def told(item: ChunkWrite) -> Iterator[None]:
    """Begin once a chunk's source is ready, and tell it of an error within, if it wants to know.

    For movers of several threads. A source may wait for others to be written: so nothing that
    those need (a share of a budget) may be held by who waits, and who waits must hear of an error.
    """
    ready = getattr(item.source, "wait", None)
    if ready is not None:
        ready()
    try:
        yield
    except BaseException as error:
        fail = getattr(item.source, "fail", None)
        if fail is not None:
            fail(error)
        raise


@dataclass(slots=True)
class RegionRead:
    """A region to be read. Nobody changes it; to freeze it would take longer than to make it.

    Attributes:
        array: the array to read from.
        box: the region, in elements of the array.
        out: where it goes, of the region's shape, any strides, the array's data type.
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
        within: the part, counted from the chunk's own corner.
        out: where it goes.
        key: of the chunk, below the array.
        number: position of the chunk in C order over the grid.
        is_whole: whether it is all of the chunk.
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
"""Of a chunk that a region touches: its index, which part of it, where in the region that lies
(``None`` where it is all of the region), its key, its number, and whether the part is all of it."""


@lru_cache(maxsize=512)  # a model has many tensors of few shapes, each with its moments
def _few_cuts(grid: Grid, zarr_format: int, separator: str, region: Box) -> Sequence[_Cut] | None:
    """:func:`_cuts`, where they are few; to keep more would take memory."""
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
