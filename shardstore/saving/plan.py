"""Plan a save: the arrays that this rank creates and the chunks that it writes.

Each rank plans alone, by the same rules. For irregular and flattened tensors, it first needs the
layouts of other ranks (:mod:`shardstore.coverage`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.coverage import FlatRange, Layouts, is_first
from shardstore.errors import AccessPatternError, CheckpointingException, DTypeMismatchError
from shardstore.mapping import ShardedTensor, flat_bounds, is_main_replica, local_box
from shardstore.saving.replicas import Shard, SharedWrites, identity
from shardstore.saving.sources import CutChunk, TensorSource, WritePlan, fetched
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import CRC32C, SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, plan_grid, shard_edges
from shardstore.storage.format.names import node_name
from shardstore.storage.movers.chunks import ChunkWrite, Source
from shardstore.storage.options import SaveOptions

CHUNKS_PER_RANGE = 4
MIN_RANGE_CHUNK_BYTES = 256 * 1024


def array_meta(
    tensor: ShardedTensor,
    options: SaveOptions,
    *,
    zarr_format: int = 3,
    layouts: Layouts | None = None,
) -> ArrayMeta:
    """Return the array of a sharded tensor, the same on every rank.

    Raises:
        DTypeMismatchError: the data type cannot be stored.
        KeyNameError: the key cannot be stored.
    """
    layouts = layouts or Layouts()
    try:
        name = dtypes.zarr_name(tensor.dtype)
    except DTypeMismatchError as error:
        raise DTypeMismatchError(f"key {tensor.key!r}: {error}", key=tensor.key) from error
    size = dtypes.itemsize(name)
    shape = tensor.global_shape
    if tensor.axis_fragmentations is not None:
        edges = shard_edges(shape, tensor.axis_fragmentations)
    else:
        edges = layouts.edges.get(tensor.key, tuple(max(1, n) for n in shape))
    if zarr_format == 2:
        # In Megatron-Core's layout, a shard is a chunk.
        return ArrayMeta(
            tensor.key, node_name(tensor.key), Grid(shape, edges), name, codecs=(), zarr_format=2
        )
    target_chunk_bytes = options.target_chunk_bytes
    ranges = layouts.ranges.get(tensor.key)
    flat = ranges is not None
    if ranges:
        most = max(len(r) for r in ranges.values())
        share = math.prod(edges) * size // max(1, CHUNKS_PER_RANGE * most)
        target_chunk_bytes = min(target_chunk_bytes, max(MIN_RANGE_CHUNK_BYTES, share))
    return ArrayMeta(
        tensor.key,
        node_name(tensor.key),
        plan_grid(shape, edges, size, target_chunk_bytes, leading_only=flat),
        name,
        codecs=(CRC32C,) if options.compression is None else (options.compression, CRC32C),
        separator=SEPARATOR,
        shard_shape=edges,
    )


def plan_writes(
    tensors: Iterable[ShardedTensor],
    rank: int,
    options: SaveOptions,
    *,
    zarr_format: int = 3,
    layouts: Layouts | None = None,
    shared: SharedWrites = SharedWrites(),  # noqa: B008 (frozen)
    known: Mapping[str, ArrayMeta] | None = None,
) -> WritePlan:
    """Plan the writes of a rank's sharded tensors. A pure function; it waits for no rank.

    Args:
        tensors: all sharded tensors of this rank, replicas included.
        rank: this rank.
        options: chunk size and compression.
        zarr_format: 3 or 2.
        layouts: layouts of all ranks, from :func:`merge_layouts`.
        shared: the shards whose chunks this rank's group divides; the main replica writes others.
        known: arrays that exist, by key; others are made by :func:`array_meta`.

    Returns:
        The arrays that this rank writes to, the chunks that it writes, and those that it shares.

    Raises:
        AccessPatternError: a shard does not consist of whole chunks of the grid of its sharding.
        CheckpointingException: a main replica has no data.
    """
    plan, layouts = WritePlan(), layouts or Layouts()
    found: list[tuple[ShardedTensor, ArrayMeta, Box, tuple[int, ...] | None]] = []
    in_group: dict[Shard, tuple[ArrayMeta, Box]] = {}
    for tensor in tensors:
        is_shared = shared.holds(tensor)
        if not is_shared and not is_main_replica(tensor.replica_id):
            continue
        tensor.validate_metadata_integrity()
        meta = (known or {}).get(tensor.key)
        meta = meta or array_meta(tensor, options, zarr_format=zarr_format, layouts=layouts)
        box = local_box(tensor)
        # A short path, because most tensors are one chunk.
        whole = meta.grid.chunk_at(box) if tensor.flattened_range is None else None
        if whole is None:
            _check_place(tensor, meta, box)
        plan.arrays.append((meta, is_first(tensor)))
        if is_shared and identity(tensor) in in_group:
            continue  # a rank may hold a shard twice
        if is_shared:
            in_group[identity(tensor)] = (meta, box)
        if whole is not None or box.size:
            found.append((tensor, meta, box, whole))
    mine = shared.own_chunks(in_group)
    cut: dict[tuple[str, tuple[int, ...]], CutChunk] = {}
    for tensor, meta, box, whole in found:
        if tensor.data is None:
            raise CheckpointingException(
                f"key {tensor.key!r} has no data on rank {rank}, which must write it; give "
                "every main replica its tensor",
                key=tensor.key,
                rank=rank,
            )
        if tensor.flattened_range is not None:
            _plan_flat(plan.writes, cut, tensor, meta, box, layouts.ranges[tensor.key][box])
            continue
        source = TensorSource(tensor.data, tensor.key, tensor.prepend_axis_num)
        for index in meta.grid.overlapping(box) if whole is None else (whole,):
            if (name := identity(tensor)) in in_group and (name, index) not in mine:
                continue
            slices = (
                () if whole is not None else meta.grid.box(index).relative_to(box.offset).slices
            )
            plan.writes.append(ChunkWrite(meta, index, source.part(slices)))
    plan.cut = [cut[chunk] for chunk in sorted(cut)]
    return plan


def _check_place(tensor: ShardedTensor, meta: ArrayMeta, box: Box) -> None:
    shape = tensor.global_shape
    is_inside = all(end <= length for end, length in zip(box.end, shape, strict=True))
    if not box.size or (is_inside and meta.grid.is_aligned(box)):
        return
    wrong = f"reaches beyond the global shape {shape}"
    if is_inside:
        wrong = (
            f"does not match axis_fragmentations={tensor.axis_fragmentations} of global shape "
            f"{shape} (shards of {meta.shard_shape or meta.grid.chunk_shape}); pass "
            "axis_fragmentations=None for an irregular cut"
        )
    raise AccessPatternError(
        f"Invalid access pattern: key {tensor.key!r}, offset {box.offset}, shape {box.shape} "
        f"{wrong}",
        key=tensor.key,
    )


# -- flattened ranges ----------------------------------------------------------------------------


def _plan_flat(
    writes: list[ChunkWrite],
    cut: dict[tuple[str, tuple[int, ...]], CutChunk],
    tensor: ShardedTensor,
    meta: ArrayMeta,
    box: Box,
    ranges: Sequence[FlatRange],
) -> None:
    """Plan the chunks that overlap a flattened range.

    This rank writes a chunk that is inside of the range. If a boundary cuts a chunk, all ranks
    compute the same owner for it.

    Args:
        writes: receives the whole chunks.
        cut: receives the shared chunks, by key and index.
        tensor: the range.
        meta: its array.
        box: the shard of the range.
        ranges: ranges of all ranks in this shard.
    """
    assert tensor.data is not None
    start, stop = flat_bounds(tensor)
    source = TensorSource(tensor.data, tensor.key)
    for index, part, position in _parts_in_range(meta, box, start, stop):
        # C order within the chunk is the order of the flattened shard, with or without gaps, so
        # that a range of the shard is a range of the chunk.
        before = partial(_elements_before, part, box.shape)
        first, last = before(start), before(stop)
        if first == last:
            continue
        is_whole = last - first == part.size
        shape = part.shape if is_whole else (last - first,)
        data: Source
        if position is not None:
            low = position - start
            data = source.part((slice(low + first, low + last),)).reshape(shape)
        else:
            data = partial(_gathered, source, part, box.shape, start, first, last, shape)
        if is_whole:
            writes.append(ChunkWrite(meta, index, data))
            continue
        bounds = ((r.rank, before(r.start), before(r.stop)) for r in ranges)
        pieces = tuple(piece for piece in bounds if piece[1] < piece[2])
        owner = max(pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]
        shared = CutChunk(meta, index, part.shape, owner, pieces)
        cut.setdefault((meta.key, index), shared).local[first] = data


def _parts_in_range(
    meta: ArrayMeta, box: Box, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], Box, int | None]]:
    """Yield the chunks of a shard that may overlap a flattened range of it.

    Yields:
        Index of the chunk, its box within the shard, and its start in the flattened shard, ``None``
        if it is not contiguous there.
    """
    grid = meta.grid
    indices = list(grid.overlapping(box))

    def begin(index: tuple[int, ...]) -> int:
        offset = (i * c - o for i, c, o in zip(index, grid.chunk_shape, box.offset, strict=True))
        return _flat_position(tuple(offset), box.shape)

    contiguous = _is_contiguous(grid.box(indices[0]), box.shape)
    if contiguous:
        # The chunks are contiguous and in order: skip those before and after the range.
        first = bisect_right(indices, start, key=begin) - 1
        indices = indices[first : bisect_left(indices, stop, key=begin)]
    for index in indices:
        part = grid.box(index).relative_to(box.offset)
        yield index, part, _flat_position(part.offset, box.shape) if contiguous else None


def _elements_before(part: Box, shape: Sequence[int], position: int) -> int:
    """Return how many elements of a part of a box come before a position in the flattened box."""
    if position >= math.prod(shape):
        return part.size
    before, inside, row = 0, part.size, math.prod(shape)
    for offset, length, extent in zip(part.offset, part.shape, shape, strict=True):
        row //= extent
        inside //= length
        digit, position = divmod(position, row)
        before += min(max(digit - offset, 0), length) * inside
        if not offset <= digit < offset + length:
            break
    return before


def _is_contiguous(part: Box, shape: Sequence[int]) -> bool:
    """Return whether a part of a box is one range of the flattened box."""
    axis = next((axis for axis, length in enumerate(part.shape) if length != 1), len(shape))
    return part.shape[axis + 1 :] == tuple(shape[axis + 1 :])


def _gathered(
    source: TensorSource,
    part: Box,
    extents: Sequence[int],
    start: int,
    first: int,
    last: int,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """Return elements ``first:last`` of a part with gaps, from a range that begins at ``start``."""
    positions = np.zeros((), np.int64)
    for offset, length, extent in zip(part.offset, part.shape, extents, strict=True):
        positions = positions[..., None] * extent + np.arange(offset, offset + length)
    wanted = positions.reshape(-1)[first:last] - start
    low = int(wanted[0])
    data = fetched(source.part((slice(low, int(wanted[-1]) + 1),)))
    out: NDArray[Any] = data[wanted - low].reshape(shape)
    return out


def _flat_position(offset: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for o, n in zip(offset, shape, strict=True):
        position = position * n + o
    return position
