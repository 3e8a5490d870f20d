"""The chunk grid: cuts an array into chunks, and finds the chunks that a region overlaps.

The grid is a pure function of the global shape, the shard shape, the item size and the target size,
so all ranks compute the same grid. **No chunk straddles two shards**; :func:`grid_of` has the one
exception. All shapes, offsets and edges are in elements, in C order, outermost axis first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from shardstore.errors import AccessPatternError

Shape = tuple[int, ...]

DEFAULT_TARGET_CHUNK_BYTES = 32 * 1024 * 1024
MIN_COLUMN_CHUNK_BYTES = 256 * 1024
"""If an array is sharded along an inner axis, shards are cut further along this axis only into
chunks of at least this size."""
MIN_COLUMN_RUN_BYTES = 128
"""Minimum length of the contiguous runs in such a chunk."""
COLUMN_CUTS = (4, 2)
MIN_BLOCK_BYTES = 4096
BLOCKS_PER_CHUNK = 32


class Box(NamedTuple):
    """A hyperrectangle: ``offset`` and ``shape``, each with one entry per axis."""

    offset: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        """One past the last index along each axis."""
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part; ``None`` if the boxes do not overlap."""
        if self == other and 0 not in self.shape:
            return self
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(e - o for o, e in zip(offset, end, strict=True))
        return None if any(s <= 0 for s in shape) else Box(offset, shape)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box with ``origin`` as the zero point."""
        return Box(tuple(o - z for o, z in zip(self.offset, origin, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as slices, to index a NumPy array."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


class Grid(NamedTuple):
    """A regular chunk grid (Zarr v3 core specification, "Regular grids").

    Attributes:
        shape: global shape of the array.
        chunk_shape: edges of a chunk, at least 1 along each axis; chunks at the upper edge reach
            beyond ``shape``.
    """

    shape: Shape
    chunk_shape: Shape

    @property
    def counts(self) -> Shape:
        """Number of chunks along each axis; 0 along an empty axis."""
        return _counts(self.shape, self.chunk_shape)

    @property
    def size(self) -> int:
        """Number of chunks; 1 for a 0-d array, 0 for an empty one."""
        return math.prod(_counts(self.shape, self.chunk_shape))

    def box(self, index: Sequence[int]) -> Box:
        """Return the part of the array that the chunk at ``index`` holds, cut off at the array's
        edge."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        shape = tuple(
            min(c, n - o) for o, c, n in zip(offset, self.chunk_shape, self.shape, strict=True)
        )
        return Box(offset, shape)

    def linear(self, index: Sequence[int]) -> int:
        """Return the position of a chunk in C order over the grid."""
        position = 0
        for i, n in zip(index, self.counts, strict=True):
            position = position * n + i
        return position

    def index_at(self, linear: int) -> Shape:
        """Return the chunk index at a position; the inverse of :meth:`linear`."""
        out: list[int] = []
        for n in reversed(self.counts):
            linear, i = divmod(linear, n)
            out.append(i)
        return tuple(reversed(out))

    def chunk_at(self, region: Box) -> Shape | None:
        """Return the index of the chunk that is exactly ``region``; ``None`` if there is none."""
        index = tuple(o // c for o, c in zip(region.offset, self.chunk_shape, strict=True))
        return index if all(region.shape) and self.box(index) == region else None

    def overlapping(self, region: Box) -> Iterator[Shape]:
        """Yield the indices of the chunks that overlap ``region``, in C order."""
        ranges = (
            range(o // c, -(-(o + s) // c) if s > 0 else 0)
            for o, s, c in zip(region.offset, region.shape, self.chunk_shape, strict=True)
        )
        return product(*ranges)

    def is_aligned(self, region: Box) -> bool:
        """Return whether ``region`` is made of whole chunks."""
        return all(
            s == 0 or (o % c == 0 and ((o + s) % c == 0 or o + s == n))
            for o, s, c, n in zip(
                region.offset, region.shape, self.chunk_shape, self.shape, strict=True
            )
        )


@lru_cache(maxsize=4096)
def _counts(shape: Shape, chunk_shape: Shape) -> Shape:
    return tuple(-(-n // c) for n, c in zip(shape, chunk_shape, strict=True))


@lru_cache(maxsize=4096)  # many tensors and optimizer moments of a model share few shapes
def shard_edges(global_shape: Shape, fragments: Shape) -> Shape:
    """Return the edges of a shard if axis ``i`` is cut into ``fragments[i]`` parts.

    As in ``torch.chunk``, each part has ``ceil(n / parts)`` elements; the last parts may be smaller
    or empty.
    """
    return tuple(max(1, -(-n // max(1, f))) for n, f in zip(global_shape, fragments, strict=True))


def cut_gcd(global_shape: Sequence[int], shards: Iterable[Box]) -> Shape:
    """Return the edges of the largest regular cells that no shard boundary crosses, for any shards.

    Along each axis, the edge is the greatest common divisor of the interior boundaries, or the
    whole axis if there are none.
    """
    edges = [0] * len(global_shape)
    for shard in shards:
        if shard.size == 0:
            continue
        for axis, (start, end) in enumerate(zip(shard.offset, shard.end, strict=True)):
            edges[axis] = math.gcd(edges[axis], start)
            if end != global_shape[axis]:
                edges[axis] = math.gcd(edges[axis], end)
    return tuple(e or max(1, n) for e, n in zip(edges, global_shape, strict=True))


@lru_cache(maxsize=4096)  # as above
def plan_grid(
    global_shape: Shape,
    shard_shape: Shape,
    itemsize: int,
    target_chunk_bytes: int = DEFAULT_TARGET_CHUNK_BYTES,
    *,
    leading_only: bool = False,
) -> Grid:
    """Return the chunk grid of an array whose shards have edges ``shard_shape``.

    Args:
        global_shape: shape of the whole array.
        shard_shape: edges of the shards, which start at multiples of them (:func:`shard_edges`,
            :func:`cut_gcd`).
        itemsize: size of an element in bytes.
        target_chunk_bytes: approximate size of a chunk in bytes; a smaller shard is one chunk.
        leading_only: cut an inner axis only if all outer axes are cut to single rows, so that each
            chunk is one contiguous range of the flattened shard.
    """
    edges = tuple(max(1, min(s, n)) for s, n in zip(shard_shape, global_shape, strict=True))
    cut = tuple(e < n for e, n in zip(edges, global_shape, strict=True))
    chunk_shape = chunk_shape_for(edges, cut, itemsize, target_chunk_bytes, leading_only)
    return Grid(global_shape, chunk_shape)


@lru_cache(maxsize=4096)  # many shapes share few shards
def chunk_shape_for(
    edges: Shape, cut: tuple[bool, ...], itemsize: int, target_chunk_bytes: int, leading_only: bool
) -> Shape:
    """Return the chunk edges for shards of the given edges.

    Args:
        edges: shard edges.
        cut: for each axis, whether several shards lie along it; the chunk edge must then divide the
            shard edge.
        itemsize: size of an element in bytes.
        target_chunk_bytes: see :func:`plan_grid`.
        leading_only: see :func:`plan_grid`.
    """
    chunk = list(edges)
    if not leading_only:
        _cut_columns(chunk, cut, itemsize)
    for axis in range(len(chunk)):
        size = math.prod(chunk) * itemsize
        if size <= target_chunk_bytes:
            break
        at_most = max(1, chunk[axis] * target_chunk_bytes // size)
        if not cut[axis]:
            # Any edge is valid; an even cut has the least padding in the last chunk.
            chunk[axis] = -(-chunk[axis] // -(-chunk[axis] // at_most))
        else:
            chunk[axis] = _divisor(chunk[axis], at_most, leading_only)
        if leading_only and chunk[axis] != 1:
            break
    return tuple(chunk)


def _cut_columns(chunk: list[int], cut: tuple[bool, ...], itemsize: int) -> None:
    """Cut the shards of an array that is sharded along an inner axis further along that axis.

    If a load shards this axis more finely, several ranks would read the whole of a chunk that spans
    a saved shard. Each quarter of the shard is read by one rank.
    """
    inner = [axis for axis in range(1, len(chunk)) if cut[axis] and math.prod(chunk[:axis]) > 1]
    if not inner:
        return
    axis = inner[-1]
    for parts in COLUMN_CUTS:
        edge, rest = divmod(chunk[axis], parts)
        run = edge * math.prod(chunk[axis + 1 :]) * itemsize
        size = math.prod(chunk) * itemsize // parts
        if not rest and run >= MIN_COLUMN_RUN_BYTES and size >= MIN_COLUMN_CHUNK_BYTES:
            chunk[axis] = edge
            return


def _divisor(edge: int, at_most: int, must_divide: bool) -> int:
    """Return a divisor of ``edge`` near ``at_most``.

    Prefer the largest divisor up to ``at_most``, unless it is much smaller; else the next larger
    divisor, unless it is much larger; else return ``edge``, and the caller cuts the next axis. With
    ``must_divide``, return the smaller divisor instead of ``edge``.
    """
    small = [d for d in range(1, math.isqrt(edge) + 1) if edge % d == 0]
    divisors = small + [edge // d for d in small]
    below = max(d for d in divisors if d <= at_most)
    above = min((d for d in divisors if d > at_most), default=edge)
    if below * 4 >= at_most:
        return below
    if above <= at_most * 4:
        return above
    return below if must_divide and below > 1 else edge


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes of elements ``start:stop`` of a flattened array, at most ``2 * ndim - 1``.

    Each box is contiguous in the flattened array. The boxes are in the order of the flat range.

    Raises:
        AccessPatternError: the range is not within the array.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise AccessPatternError(
            f"flat range {start}:{stop} is not within the {total} elements of {shape}"
        )
    if not shape:
        return [Box((), ())] * (stop - start)
    shape, boxes = tuple(shape), []
    if total and stop - start == total:
        return [Box((0,) * len(shape), shape)]
    elements = Grid(shape, (1,) * len(shape))
    rows = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < stop:
        # Take as many whole rows as there are, along the outermost axis that has one at the start.
        axis, row = next(
            (axis, row) for axis, row in enumerate(rows) if start % row == 0 and start + row <= stop
        )
        offset = elements.index_at(start)
        count = min((stop - start) // row, shape[axis] - offset[axis])
        boxes.append(Box(offset, (1,) * axis + (count, *shape[axis + 1 :])))
        start += count * row
    return boxes


def block_bytes(chunk_bytes: int) -> int:
    """Return the size in bytes of the blocks of a chunk. The manifest has a running checksum for
    each block.

    The size is a power of two, at least 4 KiB, with at most :data:`BLOCKS_PER_CHUNK` blocks per
    chunk. A reader of a part of a chunk reads and verifies only the blocks that the part overlaps.
    """
    least = -(-chunk_bytes // BLOCKS_PER_CHUNK)
    return max(MIN_BLOCK_BYTES, 1 << (least - 1).bit_length())


def inner_blocks(chunk_bytes: int) -> int:
    """Return the number of block boundaries inside a chunk, without its start and end."""
    return max(0, -(-chunk_bytes // block_bytes(chunk_bytes)) - 1)


SMALL_CHUNK_BYTES = 64 * 1024
CHUNKS_PER_BOX = 64
STRADDLING_CHUNK_BYTES = 1024 * 1024


class FittedGrid(NamedTuple):
    """The chunk grid of a tensor that is written in boxes.

    Attributes:
        grid: the grid.
        edges: the edges of the tensor's shards.
        straddles: whether a chunk may straddle boxes.
    """

    grid: Grid
    edges: tuple[int, ...]
    straddles: bool


def grid_of(
    shape: Sequence[int], boxes: Sequence[Box], itemsize: int, target_chunk_bytes: int
) -> FittedGrid:
    """Return the chunk grid of a tensor.

    No chunk straddles two boxes, unless this would take very many tiny chunks: boundaries at 7 and
    13 of 1000 elements would need chunks of one element. In that case the grid ignores the boxes,
    and several boxes share the few chunks that a boundary cuts.

    Args:
        shape: global shape.
        boxes: the written boxes; they are disjoint and together cover the tensor.
        itemsize: size of an element in bytes.
        target_chunk_bytes: see :func:`shardstore.storage.format.grid.plan_grid`.
    """
    edges = cut_gcd(shape, boxes)
    grid = plan_grid(shape, edges, itemsize, target_chunk_bytes)
    chunk_bytes = math.prod(grid.chunk_shape) * itemsize
    parts = max(1, len(boxes))
    if chunk_bytes >= SMALL_CHUNK_BYTES or grid.size <= CHUNKS_PER_BOX * parts:
        return FittedGrid(grid, edges, straddles=False)
    share = math.prod(shape) * itemsize // (4 * parts)
    at_most = min(target_chunk_bytes, max(SMALL_CHUNK_BYTES, min(STRADDLING_CHUNK_BYTES, share)))
    return FittedGrid(plan_grid(shape, shape, itemsize, at_most), edges, straddles=True)
