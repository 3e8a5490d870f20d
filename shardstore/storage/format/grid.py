"""The chunk grid: how an array is cut into chunks, and which chunks a region overlaps.

The grid is a pure function of the global shape, the shard shape, the item size and the target size,
so that all ranks compute the same grid. **No chunk straddles two shards.** All shapes, offsets and
edges are in elements, in C order, outermost axis first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from shardstore.errors import AccessPatternError

Shape = tuple[int, ...]

DEFAULT_TARGET_CHUNK_BYTES = 32 * 1024 * 1024
MIN_COLUMN_CHUNK_BYTES = 256 * 1024
"""A shard cut across an inner axis is cut further along it only while chunks stay this large."""
MIN_COLUMN_RUN_BYTES = 128
"""... and only while the contiguous runs inside stay this long."""
COLUMN_CUTS = (4, 2)
MIN_BLOCK_BYTES = 4096
BLOCKS_PER_CHUNK = 32


@dataclass(frozen=True, slots=True)
class Box:
    """A hyperrectangle: ``offset`` and ``shape``, one entry an axis."""

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
        """Return the common part, or ``None`` where there is none."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(e - o for o, e in zip(offset, end, strict=True))
        if any(s <= 0 for s in shape):
            return None
        return Box(offset, shape)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Return the same box with ``origin`` as the zero point."""
        return Box(tuple(o - z for o, z in zip(self.offset, origin, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """For indexing a NumPy array."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Grid:
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
        return math.prod(self.counts)

    def box(self, index: Sequence[int]) -> Box:
        """Return the part of the array that the chunk at ``index`` holds, cut off at the array's
        edge."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        shape = tuple(
            min(c, n - o) for o, c, n in zip(offset, self.chunk_shape, self.shape, strict=True)
        )
        return Box(offset, shape)

    def linear(self, index: Sequence[int]) -> int:
        """Position of a chunk in C order over the grid."""
        position = 0
        for i, n in zip(index, self.counts, strict=True):
            position = position * n + i
        return position

    def index(self, linear: int) -> Shape:
        """Inverse of :meth:`linear`."""
        out: list[int] = []
        for n in reversed(self.counts):
            linear, i = divmod(linear, n)
            out.append(i)
        return tuple(reversed(out))

    def chunk_at(self, region: Box) -> Shape | None:
        """Index of the chunk that holds ``region`` and nothing else; ``None`` if there is none."""
        index = []
        for o, s, c, n in zip(
            region.offset, region.shape, self.chunk_shape, self.shape, strict=True
        ):
            i, rest = divmod(o, c)
            if rest or s <= 0 or s != (c if o + c <= n else n - o):
                return None
            index.append(i)
        return tuple(index)

    def overlapping(self, region: Box) -> Iterator[Shape]:
        """Indices of the chunks that share elements with ``region``, in C order."""
        if any(s <= 0 for s in region.shape):
            return
        ranges = [
            range(o // c, -(-(o + s) // c))
            for o, s, c in zip(region.offset, region.shape, self.chunk_shape, strict=True)
        ]
        yield from product(*ranges)

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


def shard_edges(global_shape: Sequence[int], fragments: Sequence[int]) -> Shape:
    """Edges of a shard where axis ``i`` is cut into ``fragments[i]`` parts.

    The rule of ``torch.chunk``: ``ceil(n / parts)`` each, the last ones smaller or empty.
    """
    return tuple(max(1, -(-n // max(1, f))) for n, f in zip(global_shape, fragments, strict=True))


def cut_gcd(global_shape: Sequence[int], shards: Iterable[Box]) -> Shape:
    """Edges of the largest regular cells that no shard boundary crosses, for any cuts.

    Along each axis it is the greatest common divisor of the interior boundaries, the whole axis
    where there are none.
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


def plan_grid(
    global_shape: Sequence[int],
    shard_shape: Sequence[int],
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
        itemsize: bytes an element.
        target_chunk_bytes: chunks are cut down to about this many bytes, a smaller shard is one
            chunk.
        leading_only: never cut along an inner axis before the outer ones are cut to single rows, so
            that each chunk is one contiguous range of the flattened shard.
    """
    shape = tuple(global_shape)
    edges = tuple(max(1, min(s, n)) for s, n in zip(shard_shape, shape, strict=True))
    cut = tuple(e < n for e, n in zip(edges, shape, strict=True))
    return Grid(shape, chunk_shape_for(edges, cut, itemsize, target_chunk_bytes, leading_only))


@lru_cache(maxsize=4096)  # a model has many tensors of few shapes, each with its moments
def chunk_shape_for(
    edges: Shape, cut: tuple[bool, ...], itemsize: int, target_chunk_bytes: int, leading_only: bool
) -> Shape:
    """Chunk edges for shards of the given edges.

    Args:
        edges: shard edges.
        cut: per axis, whether there are several shards along it: then the chunk edge must divide
            the shard's.
        itemsize: bytes an element.
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
            # Any edge will do; an even cut wastes the least padding in the last chunk.
            chunk[axis] = -(-chunk[axis] // -(-chunk[axis] // at_most))
        else:
            chunk[axis] = _divisor(chunk[axis], at_most, leading_only)
        if leading_only and chunk[axis] != 1:
            break
    return tuple(chunk)


def _cut_columns(chunk: list[int], cut: tuple[bool, ...], itemsize: int) -> None:
    """Cut shards of an inner-axis sharding further along that axis.

    Read under a finer sharding of the same axis, a chunk that spans the whole shard would be read
    by several ranks in full; a quarter of it is read by one.
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

    The largest one that is not above it, if that is not much smaller; else the next one above, if
    that is not much larger; else the edge stays whole and the next axis is cut instead.
    """
    divisors = _divisors(edge)
    below = max(d for d in divisors if d <= at_most)
    above = min((d for d in divisors if d > at_most), default=edge)
    if below * 4 >= at_most or at_most == 1:
        return below
    if above <= at_most * 4:
        return above
    return below if must_divide and below > 1 else edge


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in small]


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that make up elements ``start:stop`` of a flattened array, in order: at most ``2 * ndim
    - 1``.

    Each box is contiguous in the flattened array, so that one follows the other in the flat range.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise AccessPatternError(
            f"flat range {start}:{stop} is not within the {total} elements of {shape}"
        )
    return list(_boxes(tuple(shape), start, stop))


def _boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, into = divmod(start, row)
    if into or stop - start < row:
        # The range begins inside a row (or does not fill one): that row first, then the rest.
        end = min(stop, (first + 1) * row)
        for box in _boxes(shape[1:], into, end - first * row):
            yield Box((first, *box.offset), (1, *box.shape))
        yield from _boxes(shape, end, stop)
        return
    whole = stop // row
    yield Box((first, *(0 for _ in shape[1:])), (whole - first, *shape[1:]))
    for box in _boxes(shape[1:], 0, stop - whole * row):
        yield Box((whole, *box.offset), (1, *box.shape))


def block_bytes(chunk_bytes: int) -> int:
    """Size of the blocks of a chunk whose running checksums are kept in the manifest.

    A power of two, at least 4 KiB, at most :data:`BLOCKS_PER_CHUNK` blocks a chunk: a reader of
    part of a chunk verifies what it reads while it reads little more than it wants.
    """
    block = MIN_BLOCK_BYTES
    while block * BLOCKS_PER_CHUNK < chunk_bytes:
        block *= 2
    return block


def inner_blocks(chunk_bytes: int) -> int:
    """Number of block boundaries inside a chunk, its two ends left out."""
    return max(0, -(-chunk_bytes // block_bytes(chunk_bytes)) - 1)


SMALL_CHUNK_BYTES = 64 * 1024
CHUNKS_PER_BOX = 64
STRADDLING_CHUNK_BYTES = 1024 * 1024


def grid_of(
    shape: Sequence[int], boxes: Sequence[Box], itemsize: int, target_chunk_bytes: int
) -> tuple[Grid, tuple[int, ...], bool]:
    """Return the chunk grid of a tensor, the edges of its shards, and whether chunks may straddle
    boxes.

    No chunk straddles two boxes, unless the boundaries are such that this would take a great many
    tiny chunks (boundaries at 7 and 13 of a thousand have chunks of one): then a plain grid is
    taken, and the few chunks that a boundary cuts have several holders.

    Args:
        shape: global shape.
        boxes: what is written, disjoint; together they cover the tensor.
        itemsize: bytes an element.
        target_chunk_bytes: see :func:`shardstore.storage.format.grid.plan_grid`.
    """
    edges = cut_gcd(shape, boxes)
    grid = plan_grid(shape, edges, itemsize, target_chunk_bytes)
    chunk_bytes = math.prod(grid.chunk_shape) * itemsize
    parts = max(1, len(boxes))
    if chunk_bytes >= SMALL_CHUNK_BYTES or grid.size <= CHUNKS_PER_BOX * parts:
        return grid, edges, False
    share = math.prod(shape) * itemsize // (4 * parts)
    at_most = min(target_chunk_bytes, max(SMALL_CHUNK_BYTES, min(STRADDLING_CHUNK_BYTES, share)))
    return plan_grid(shape, shape, itemsize, at_most), edges, True
