"""From sharded tensors to chunks: what this rank creates, writes, sends and receives.

Every decision is taken by each rank on its own and comes out the same everywhere. What has to be
heard of other ranks first is in :mod:`.layouts`, flattened ranges are planned in
:mod:`.flat_writes`. It moves no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardstore.errors import AccessPatternError, CheckpointingException
from shardstore.mapping import ShardedTensor, is_main_replica
from shardstore.saving.flat import _plan_flat
from shardstore.saving.replicas import SharedWrites, identity
from shardstore.saving.sources import (
    CutChunk,
    DevicePart,
    WritePlan,
    _Source,
)
from shardstore.sharded.layouts import (
    Layouts,
    flat_bounds,
    is_alone,
    is_first,
    local_box,
    local_layouts,
    merge_layouts,
)
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import CRC32C, SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, plan_grid, shard_edges
from shardstore.storage.format.names import node_name
from shardstore.storage.movers.chunks import ChunkWrite

__all__ = [
    "CutChunk",
    "DevicePart",
    "Layouts",
    "WritePlan",
    "array_meta",
    "flat_bounds",
    "is_alone",
    "is_first",
    "local_box",
    "local_layouts",
    "merge_layouts",
    "plan_writes",
]

CHUNKS_PER_RANGE = 4
MIN_RANGE_CHUNK_BYTES = 256 * 1024


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
    planned: list[tuple[ShardedTensor, ArrayMeta, Box, tuple[int, ...] | None]] = []
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
        # Of many tensors nearly all are one chunk, for which nothing has to be worked out.
        whole = meta.grid.chunk_at(box) if tensor.flattened_range is None else None
        if whole is None:
            _check_place(tensor, meta, box)
        plan.arrays.append((meta, is_first(tensor)))
        if in_group and identity(tensor) in seen:
            continue  # a rank may hold a shard twice
        seen.add(identity(tensor) if in_group else None)
        planned.append((tensor, meta, box, whole))
    if shared is not None:
        in_order = sorted(planned, key=lambda p: (p[0].key, p[0].global_offset))
        shared.plan(
            (tensor, meta, list(meta.grid.overlapping(box)))
            for tensor, meta, box, _ in in_order
            if shared.holds(tensor) and box.size
        )
    for tensor, meta, box, whole in planned:
        in_group = shared is not None and shared.holds(tensor)
        if whole is None and box.size == 0:
            continue
        if tensor.data is None:
            raise CheckpointingException(
                f"key {tensor.key!r} has no data on rank {rank}, which is to write it; give "
                "every main replica "
                "its tensor",
                key=tensor.key,
                rank=rank,
            )
        if whole is not None:
            if not in_group or shared is None or shared.is_mine(tensor, whole):
                source = _Source(tensor.data, tensor.key, tensor.prepend_axis_num)
                plan.writes.append(ChunkWrite(meta, whole, source.whole()))
        elif tensor.flattened_range is None:
            source = _Source(tensor.data, tensor.key, tensor.prepend_axis_num)
            for index in meta.grid.overlapping(box):
                if in_group and shared is not None and not shared.is_mine(tensor, index):
                    continue
                slices = meta.grid.box(index).relative_to(box.offset).slices
                plan.writes.append(ChunkWrite(meta, index, source.part(slices)))
        else:
            _plan_flat(plan, tensor, meta, box, layouts.ranges[tensor.key][box])
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
