"""From sharded tensors to chunks: what this rank creates, writes, sends and receives.

Every decision is taken by each rank on its own and comes out the same everywhere. Only two kinds
of tensor need to hear of
other ranks first: those cut irregularly (their grid is made of everybody's boundaries) and those
    held in flattened
ranges (a chunk that a boundary cuts has several holders, and one of them writes it). It moves no
bytes.
"""

from __future__ import annotations

import math
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError, CheckpointingException, DTypeMismatchError
from shardstore.mapping import ShardedTensor, is_main_replica
from shardstore.storage import dtypes
from shardstore.storage.chunks import ChunkWrite
from shardstore.storage.documents import CRC32C, SEPARATOR, ArrayMeta
from shardstore.storage.grid import Box, Grid, cut_gcd, plan_grid, shard_edges
from shardstore.storage.names import node_name
from shardstore.strategies.shared_writes import SharedWrites, identity

__all__ = [
    "CutChunk",
    "DevicePart",
    "Layouts",
    "WritePlan",
    "array_meta",
    "local_box",
    "local_layouts",
    "merge_layouts",
    "plan_writes",
]

CHUNKS_PER_RANGE = 4
MIN_RANGE_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class FlatRange:
    """Elements ``start:stop`` of a flattened shard, held by a rank."""

    start: int
    stop: int
    rank: int


@dataclass
class Layouts:
    """What all ranks know of the tensors that one rank cannot place alone.

    Attributes:
        edges: key -> edges of the cells that no boundary crosses, for irregular cuts.
        ranges: key -> shard box -> the flat ranges that it is held in, in order.
    """

    edges: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: dict[str, dict[Box, list[FlatRange]]] = field(default_factory=dict)


@dataclass(frozen=True)
class CutChunk:
    """A chunk whose elements several ranks hold.

    Attributes:
        array: its array.
        index: its index in the grid.
        shape: shape of the part within the array.
        owner: rank that writes it.
        pieces: ``(rank, start, stop)`` in elements of the chunk's part: what each rank gives.
        start: where this rank's own elements begin.
        local: this rank's own elements, if it has any.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    pieces: tuple[tuple[int, int, int], ...]
    start: int
    local: Callable[[], NDArray[Any]] | None


@dataclass
class WritePlan:
    """What one rank does.

    Attributes:
        arrays: arrays that it writes to, and whether it creates them.
        writes: chunks that it writes alone.
        cut: chunks that it shares with others, in an order that all ranks follow.
    """

    arrays: list[tuple[ArrayMeta, bool]] = field(default_factory=list)
    writes: list[ChunkWrite] = field(default_factory=list)
    cut: list[CutChunk] = field(default_factory=list)


def local_box(tensor: ShardedTensor) -> Box:
    """The box of the global tensor that a (whole, unflattened) local tensor is."""
    return Box(tensor.global_offset, (1,) * tensor.prepend_axis_num + tensor.local_shape)


def flat_bounds(tensor: ShardedTensor) -> tuple[int, int]:
    """First and last-plus-one element of a flattened range within the flattened local tensor."""
    assert tensor.flattened_range is not None
    start, stop, _ = tensor.flattened_range.indices(math.prod(tensor.local_shape))
    return start, max(start, stop)


def is_alone(tensor: ShardedTensor) -> bool:
    """Whether a rank can place this shard without hearing of the others."""
    if tensor.flattened_range is not None:
        return False
    return tensor.axis_fragmentations is not None or local_box(tensor).shape == tensor.global_shape


def local_layouts(tensors: Iterable[ShardedTensor], rank: int) -> bytes:
    """This rank's part of :class:`Layouts`, for the coordinator.

    Empty where there is nothing to tell.
    """
    entries = []
    for tensor in tensors:
        if is_main_replica(tensor.replica_id) and not is_alone(tensor):
            bounds = flat_bounds(tensor) if tensor.flattened_range is not None else None
            irregular = tensor.axis_fragmentations is None
            entries.append(
                (tensor.key, tensor.global_shape, irregular, local_box(tensor), bounds, rank)
            )
    return pickle.dumps(entries) if entries else b""


def merge_layouts(reports: Sequence[bytes]) -> Layouts:
    """Put together what all ranks told.

    Raises:
        AccessPatternError: ranges of a shard overlap or leave a gap; names key, shard, range and
            ranks.
    """
    layouts = Layouts()
    shards: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for report in reports:
        for key, global_shape, irregular, box, bounds, rank in (
            pickle.loads(report) if report else ()
        ):
            if irregular:
                shape, boxes = shards.setdefault(key, (global_shape, []))
                if shape != global_shape:
                    raise AccessPatternError(
                        f"Invalid access pattern: rank {rank} gives key {key!r} the global shape "
                        f"{global_shape}, "
                        f"another rank {shape}",
                        key=key,
                        rank=rank,
                    )
                boxes.append(box)
            if bounds is not None:
                by_shard = layouts.ranges.setdefault(key, {})
                by_shard.setdefault(box, []).append(FlatRange(bounds[0], bounds[1], rank))
    for key, (shape, boxes) in shards.items():
        layouts.edges[key] = cut_gcd(shape, boxes)
    for key, by_shard in layouts.ranges.items():
        for box, ranges in by_shard.items():
            by_shard[box] = _checked(key, box, ranges)
    return layouts


def _checked(key: str, box: Box, ranges: list[FlatRange]) -> list[FlatRange]:
    """The ranges in order, proven to cover the shard exactly once."""
    ranges = sorted(
        (r for r in ranges if r.stop > r.start), key=lambda r: (r.start, r.stop, r.rank)
    )
    position, before = 0, -1
    for r in [*ranges, FlatRange(box.size, box.size, -1)]:
        if r.start > position:
            raise AccessPatternError(
                "Invalid access pattern: Flattened ranges dont cover the whole shard "
                f"ShardedTensor(key={key!r}, "
                f"offset {box.offset}, shape {box.shape}): no rank holds elements "
                f"{position}:{r.start} of "
                f"{box.size}; ranges by rank: {[(x.rank, x.start, x.stop) for x in ranges[:8]]}",
                key=key,
            )
        if r.start < position:
            raise AccessPatternError(
                f"Invalid access pattern: Flattened ranges of key {key!r}, shard at offset "
                f"{box.offset}, shape "
                f"{box.shape}, overlap: rank {before} and rank {r.rank} both hold elements from "
                f"{r.start} on; "
                "only one of them may be the main replica",
                key=key,
            )
        position, before = r.stop, r.rank
    return ranges


def array_meta(
    tensor: ShardedTensor,
    *,
    zarr_format: int,
    target_chunk_bytes: int,
    layouts: Layouts | None = None,
    compression: str | None = None,
) -> ArrayMeta:
    """The array that a sharded tensor is a part of, the same on every rank.

    Raises:
        DTypeMismatchError: the data type can not be stored.
        KeyNameError: the key can not be stored.
    """
    layouts = layouts or Layouts()
    name = dtypes.zarr_name(tensor.dtype)
    size = dtypes.itemsize(name)
    shape = tensor.global_shape
    if tensor.axis_fragmentations is not None:
        edges = shard_edges(shape, tensor.axis_fragmentations)
    else:
        edges = layouts.edges.get(tensor.key, tuple(max(1, n) for n in shape))
    if zarr_format == 2:
        # The layout of Megatron-Core: a shard is a chunk.
        return ArrayMeta(
            tensor.key, node_name(tensor.key), Grid(shape, edges), name, codecs=(), zarr_format=2
        )
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
        codecs=(CRC32C,) if compression is None else (compression, CRC32C),
        separator=SEPARATOR,
        shard_shape=edges,
    )


def plan_writes(
    tensors: Iterable[ShardedTensor],
    rank: int,
    *,
    zarr_format: int,
    target_chunk_bytes: int,
    layouts: Layouts,
    compression: str | None = None,
    shared: SharedWrites | None = None,
) -> WritePlan:
    """Plan what a rank does with its sharded tensors.

    Args:
        tensors: all of this rank's, replicas included (only main replicas are written).
        rank: this rank.
        zarr_format: 3 or 2.
        target_chunk_bytes: see :func:`plan_grid`.
        layouts: what :func:`merge_layouts` made of all ranks' reports.
        compression: of each chunk (Zarr v3 alone).
        shared: the shards whose chunks this rank's group shares out; the others are their main
            replica's.

    Raises:
        AccessPatternError: a shard is not made of whole chunks of the grid that its sharding
            announces.
        CheckpointingException: a main replica has no data.
    """
    plan = WritePlan()
    planned: list[tuple[ShardedTensor, ArrayMeta, Box]] = []
    seen: set[object] = set()
    for tensor in tensors:
        in_group = shared is not None and shared.holds(tensor)
        if not in_group and not is_main_replica(tensor.replica_id):
            continue
        tensor.validate_metadata_integrity()
        meta = array_meta(
            tensor,
            zarr_format=zarr_format,
            target_chunk_bytes=target_chunk_bytes,
            layouts=layouts,
            compression=compression,
        )
        box = local_box(tensor)
        _check_place(tensor, meta, box)
        plan.arrays.append((meta, is_first(tensor)))
        if in_group and identity(tensor) in seen:
            continue  # a rank may hold a shard twice
        seen.add(identity(tensor) if in_group else None)
        planned.append((tensor, meta, box))
    if shared is not None:
        shared.plan(
            (tensor, meta, list(meta.grid.overlapping(box)))
            for tensor, meta, box in sorted(planned, key=lambda p: (p[0].key, p[0].global_offset))
            if shared.holds(tensor) and box.size
        )
    for tensor, meta, box in planned:
        in_group = shared is not None and shared.holds(tensor)
        if box.size == 0:
            continue
        if tensor.data is None:
            raise CheckpointingException(
                f"key {tensor.key!r} has no data on rank {rank}, which is to write it; give "
                "every main replica "
                "its tensor",
                key=tensor.key,
                rank=rank,
            )
        if tensor.flattened_range is None:
            source = _Source(tensor.data.detach()[(None,) * tensor.prepend_axis_num], tensor.key)
            for index in meta.grid.overlapping(box):
                if in_group and shared is not None and not shared.is_mine(tensor, index):
                    continue
                part = meta.grid.box(index).relative_to(box.offset)
                plan.writes.append(ChunkWrite(meta, index, source.part(part.slices)))
        else:
            _plan_flat(plan, tensor, meta, box, layouts.ranges[tensor.key][box], rank)
    plan.cut.sort(key=lambda chunk: (chunk.array.key, chunk.index, chunk.start))
    plan.cut = _one_a_chunk(plan.cut, rank)
    return plan


def _one_a_chunk(cut: Sequence[CutChunk], rank: int) -> list[CutChunk]:
    """A chunk that this rank owns appears once, also where it gives several pieces of it."""
    chunks: list[CutChunk] = []
    for _, group in groupby(cut, key=lambda chunk: (chunk.array.key, chunk.index)):
        same = list(group)
        if same[0].owner != rank or len(same) == 1:
            chunks += same
            continue
        # One piece as long as the chunk, and before the others', which then fill its gaps.
        others = tuple(piece for piece in same[0].pieces if piece[0] != rank)
        pieces = ((rank, 0, math.prod(same[0].shape)), *others)
        chunks.append(replace(same[0], pieces=pieces, start=0, local=_joined(same)))
    return chunks


def _joined(pieces: Sequence[CutChunk]) -> Callable[[], NDArray[Any]]:
    def joined() -> NDArray[Any]:
        first = pieces[0]
        out = np.zeros(math.prod(first.shape), dtypes.numpy_dtype(first.array.dtype))
        for piece in pieces:
            assert piece.local is not None
            data = piece.local()
            out[piece.start : piece.start + data.size] = data
        return out

    return joined


def is_first(tensor: ShardedTensor) -> bool:
    """Whether this is the main replica of the first shard, whose holder creates the array."""
    if not is_main_replica(tensor.replica_id) or any(o != 0 for o in tensor.global_offset):
        return False
    return tensor.flattened_range is None or flat_bounds(tensor)[0] == 0


def _check_place(tensor: ShardedTensor, meta: ArrayMeta, box: Box) -> None:
    shape = tensor.global_shape
    if box.size and any(e > n for e, n in zip(box.end, shape, strict=True)):
        raise AccessPatternError(
            f"Invalid access pattern: key {tensor.key!r}, offset {box.offset}, shape {box.shape} "
            "reaches beyond the "
            f"global shape {shape}",
            key=tensor.key,
        )
    if box.size and not meta.grid.is_aligned(box):
        raise AccessPatternError(
            f"Invalid access pattern: key {tensor.key!r}, offset {box.offset}, shape {box.shape} "
            "does not fit the "
            f"sharding that axis_fragmentations={tensor.axis_fragmentations} of global shape "
            f"{shape} announces "
            f"(shards of {meta.shard_shape or meta.grid.chunk_shape}); pass "
            "axis_fragmentations=None for an irregular cut",
            key=tensor.key,
        )


@dataclass(frozen=True)
class DevicePart:
    """Part of a tensor on a device: fetched when it is called, or by who copies it himself."""

    tensor: torch.Tensor

    def __call__(self) -> NDArray[Any]:
        return dtypes.as_numpy(self.tensor.contiguous().cpu())

    def reshape(self, shape: tuple[int, ...]) -> DevicePart:
        """The same elements in another shape."""
        return DevicePart(self.tensor.reshape(shape))


class _Source:
    """A local tensor as the source of chunks.

    A view on the host, fetched chunk by chunk from a device.
    """

    def __init__(self, tensor: torch.Tensor, key: str) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise DTypeMismatchError(
                f"key {key!r} is a tensor of layout {tensor.layout} on {tensor.device}, which "
                "has no plain memory to "
                "write; make it a dense tensor with data",
                key=key,
            )
        self._tensor = tensor
        self._array = dtypes.as_numpy(tensor) if tensor.device.type == "cpu" else None

    def part(self, slices: tuple[slice, ...]) -> NDArray[Any] | Callable[[], NDArray[Any]]:
        if self._array is not None:
            where: tuple[Any, ...] = (..., *slices)
            view: NDArray[Any] = self._array[where]
            return view
        return DevicePart(self._tensor[slices])


def _plan_flat(
    plan: WritePlan,
    tensor: ShardedTensor,
    meta: ArrayMeta,
    box: Box,
    ranges: Sequence[FlatRange],
    rank: int,
) -> None:
    """A chunk that lies wholly in this rank's range is its own, one that a boundary cuts has one
    owner."""
    assert tensor.data is not None
    start, stop = flat_bounds(tensor)
    source = _Source(tensor.data.detach(), tensor.key)
    for index, part, position in _parts_in_range(meta, box, start, stop):
        # C order within the chunk is the order of the flattened shard, with or without gaps, so
        # that a range of the shard is a range of the chunk.
        first, last = (_elements_before(part, box.shape, n, position) for n in (start, stop))
        if first == last:
            continue
        if position is not None:
            low = position - start
            data = source.part((slice(low + first, low + last),))
        else:
            data = _gathered(source, part, box.shape, start, first, last)
        if last - first == part.size:
            plan.writes.append(ChunkWrite(meta, index, _shaped(data, part.shape)))
            continue
        bounds = (
            (
                r.rank,
                _elements_before(part, box.shape, r.start, position),
                _elements_before(part, box.shape, r.stop, position),
            )
            for r in ranges
        )
        pieces = tuple(piece for piece in bounds if piece[1] < piece[2])
        owner = max(pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]
        local = data if callable(data) else _constant(data)
        plan.cut.append(CutChunk(meta, index, part.shape, owner, pieces, first, local))


def _parts_in_range(
    meta: ArrayMeta, box: Box, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], Box, int | None]]:
    """The chunks of a shard that may share elements with a flat range of it.

    Yields:
        Index of the chunk, its box within the shard, and where it begins in the flattened shard;
        ``None`` where it is not one range of it.
    """
    grid = meta.grid
    indices = list(grid.overlapping(box))

    def begin(index: tuple[int, ...]) -> int:
        offset = (i * c - o for i, c, o in zip(index, grid.chunk_shape, box.offset, strict=True))
        return _flat_position(tuple(offset), box.shape)

    contiguous = _is_contiguous(grid.box(indices[0]), box.shape)
    if contiguous:
        # Then the chunks lie end to end, in this order: the others need not be looked at.
        first = bisect_right(indices, start, key=begin) - 1
        indices = indices[first : bisect_left(indices, stop, key=begin)]
    for index in indices:
        part = grid.box(index).relative_to(box.offset)
        yield index, part, _flat_position(part.offset, box.shape) if contiguous else None


def _elements_before(part: Box, shape: Sequence[int], position: int, begin: int | None) -> int:
    """How many elements of a part of a box come before a flat position in the box.

    Args:
        part: the part.
        shape: of the box.
        position: in the flattened box.
        begin: where the part begins in it, if it is one range of it.
    """
    if begin is not None:
        return min(max(position - begin, 0), part.size)
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
    """Whether a part of a box is one range of the flattened box."""
    axis = next((axis for axis, length in enumerate(part.shape) if length != 1), len(shape))
    return part.shape[axis + 1 :] == tuple(shape[axis + 1 :])


def _gathered(
    source: _Source, part: Box, shape: Sequence[int], start: int, first: int, last: int
) -> Callable[[], NDArray[Any]]:
    """Elements ``first:last`` of a part with gaps, out of a flat range that begins at ``start``."""

    def gathered() -> NDArray[Any]:
        positions = np.zeros((), np.int64)
        for offset, length, extent in zip(part.offset, part.shape, shape, strict=True):
            positions = positions[..., None] * extent + np.arange(offset, offset + length)
        wanted = positions.reshape(-1)[first:last] - start
        low = int(wanted[0])
        data = source.part((slice(low, int(wanted[-1]) + 1),))
        out: NDArray[Any] = (data() if callable(data) else data)[wanted - low]
        return out

    return gathered


def _constant(array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    return lambda: array


def _shaped(
    data: NDArray[Any] | Callable[[], NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[Any] | Callable[[], NDArray[Any]]:
    if callable(data) and not isinstance(data, DevicePart):
        return lambda: data().reshape(shape)
    return data.reshape(shape)


def _flat_position(offset: Sequence[int], shape: Sequence[int]) -> int:
    position = 0
    for o, n in zip(offset, shape, strict=True):
        position = position * n + o
    return position
