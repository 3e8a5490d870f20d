"""Plan a save: the arrays that this rank creates, the chunks that it writes, and the tensors that
they are copied from.

Each rank plans alone, by the same rules. For irregular and flattened tensors, it first needs the
layouts of other ranks (:mod:`shardstore.coverage`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.coverage import FlatRange, Layouts, require_inside
from shardstore.errors import AccessPatternError, CheckpointingException, DTypeMismatchError
from shardstore.mapping import ShardedObject, ShardedTensor, flat_bounds, is_main_replica, local_box
from shardstore.saving.replicas import Shard, SharedWrites, identity
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import CRC32C, SEPARATOR, ArrayMeta
from shardstore.storage.format.grid import Box, Grid, plan_grid, shard_edges
from shardstore.storage.format.names import node_name
from shardstore.storage.format.packs import SMALL_BYTES, Places
from shardstore.storage.movers.chunks import ChunkWrite, Source
from shardstore.storage.movers.device import on_host, stream_of
from shardstore.storage.options import SaveOptions

HOST_BYTES = 64 * 1024
"""A tensor of a device up to this size is compared on the host."""
BLOCK_ELEMENTS = 1024 * 1024
"""Elements of a block that is compared at once."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNKS_PER_RANGE = 4
MIN_RANGE_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class CutChunk:
    """A chunk whose elements several ranks hold.

    Attributes:
        array: the array of the chunk.
        index: index of the chunk in the grid.
        shape: shape of the part of the chunk that is inside of the array.
        owner: rank that writes the chunk.
        pieces: the piece of each rank, in elements of this part.
        local: start of each piece of this rank -> source of its elements.
    """

    array: ArrayMeta
    index: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int
    pieces: tuple[FlatRange, ...]
    local: dict[int, Source] = field(default_factory=dict)


@dataclass
class WritePlan:
    """The plan of one rank.

    Attributes:
        tensors: the tensors that the rank writes, or whose arrays it creates.
        arrays: the array of each of them.
        writes: chunks that it writes alone.
        cut: chunks that it shares with others, in the same order on all ranks.
    """

    tensors: list[ShardedTensor] = field(default_factory=list)
    arrays: list[ArrayMeta] = field(default_factory=list)
    writes: list[ChunkWrite] = field(default_factory=list)
    cut: list[CutChunk] = field(default_factory=list)

    def written(self, rank: int) -> list[ArrayMeta]:
        """Return the array of each chunk that this rank writes."""
        owned = [cut.array for cut in self.cut if cut.owner == rank]
        return owned + [write.array for write in self.writes]


@dataclass(frozen=True)
class DevicePart:
    """Part of a tensor on a device; calling it copies the part to the host.

    Attributes:
        tensor: the part.
        stream: stream of the tensor's thread; the copy waits for work queued there.
    """

    tensor: torch.Tensor
    stream: torch.Stream | None = None

    def __call__(self) -> NDArray[Any]:
        return on_host(self.tensor, self.stream)

    def __getitem__(self, where: tuple[Any, ...]) -> DevicePart:
        return DevicePart(self.tensor[where], self.stream)

    def reshape(self, shape: tuple[int, ...]) -> DevicePart:
        """Return the same elements in another shape."""
        return DevicePart(self.tensor.reshape(shape), self.stream)


def fetched(source: Source) -> NDArray[Any]:
    """Return the data of a source."""
    return source() if callable(source) else source


def plain_tensor(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """Return a tensor of any class as :class:`torch.Tensor` with the same memory.

    Raises:
        DTypeMismatchError: it is not dense memory.
    """
    if hasattr(tensor, "trigger_wait"):  # the result of a collective
        tensor = cast(Any, tensor).wait()
    if dtypes.is_plain(tensor):
        return tensor.as_subclass(torch.Tensor).detach()
    if (held := dtypes.unwrapped(tensor)) is not tensor:
        return plain_tensor(held, key)
    raise DTypeMismatchError(
        f"key {key!r} is a {type(tensor).__name__} of {tensor.dtype} and layout {tensor.layout} on "
        f"{tensor.device}, which has no plain memory to write; {dtypes.how_to_save(tensor)}",
        key=key,
    )


LocalData: TypeAlias = "NDArray[Any] | DevicePart"
"""The memory of a local tensor, or a part of it. The indices of a part begin with an ellipsis, so
that a part without axes remains an array."""


def data_of(tensor: torch.Tensor, key: str, prepended: int = 0) -> LocalData:
    """Return the memory of a local tensor: a view on the host, a :class:`DevicePart` on a device.

    Args:
        tensor: the data.
        key: key of the tensor, for error texts.
        prepended: number of axes of length 1 to add before the tensor's axes.
    """
    tensor = plain_tensor(tensor, key)[(None,) * prepended]
    if tensor.device.type == "cpu":
        return dtypes.as_numpy(tensor)
    return DevicePart(tensor, stream_of(tensor.device))


def constant_of(data: LocalData) -> bytes | None:
    """Return the bits that all elements of a tensor have, little-endian; ``None`` if they differ.

    The first and the last element settle it for most tensors. Others are compared in blocks, so
    that a difference is found early; large tensors of a device are compared there.
    """
    if isinstance(data, DevicePart):
        if data.tensor.nbytes > HOST_BYTES:
            given = data.tensor.resolve_conj().resolve_neg()
            given = torch.view_as_real(given) if given.is_complex() else given[..., None]
            for part in given.view(_BITS[given.element_size()]).unbind(-1):
                low, high = torch.aminmax(part)
                if low != high:
                    return None
            first_element = data.tensor[(slice(1),) * data.tensor.ndim]
            data = DevicePart(first_element, data.stream)
        data = data()
    if (
        not data.size
        or (first := data[(0,) * data.ndim].tobytes()) != data[(-1,) * data.ndim].tobytes()
    ):
        return None
    for values in [data.real, data.imag] if data.dtype.kind == "c" else [data]:
        bits = values.view(f"u{values.dtype.itemsize}")
        bits = bits.reshape(-1) if bits.flags.c_contiguous else bits
        rows = max(1, BLOCK_ELEMENTS * len(bits) // bits.size)
        for start in range(0, len(bits), rows):
            if not (bits[start : start + rows] == bits[(0,) * bits.ndim]).all():
                return None
    return first if _is_kept_by_zarr(first, data.dtype) else None


def _is_kept_by_zarr(bits: bytes, dtype: np.dtype[Any]) -> bool:
    """Return whether zarr keeps the bits of a fill value when it reads or writes a document: it
    knows one NaN of the types that NumPy has."""
    if dtype.isbuiltin != 1 or dtype.kind not in "fc":
        return True
    part = np.dtype(f"f{dtype.itemsize // (1 + (dtype.kind == 'c'))}")
    nan, values = np.array(np.nan, part).tobytes(), np.frombuffer(bits, part)
    return all(not np.isnan(value) or value.tobytes() == nan for value in values)


def needing_layouts(shards: Iterable[ShardedTensor | ShardedObject]) -> list[ShardedTensor]:
    """Return the tensors that a rank cannot plan without the layouts of other ranks: the main
    replicas of irregular cuts and flattened ranges."""
    found = []
    for shard in shards:
        if not isinstance(shard, ShardedTensor):
            continue
        is_flat, irregular = shard.flattened_range is not None, shard.axis_fragmentations is None
        is_part = is_flat or (irregular and local_box(shard).shape != shard.global_shape)
        if is_part and is_main_replica(shard.replica_id):
            found.append(shard)
    return found


def stored_name(key: str, dtype: torch.dtype, layout: torch.layout) -> str:
    """Return the data type of a tensor's array.

    Raises:
        DTypeMismatchError: no array stores such tensors.
    """
    if layout is not torch.strided:
        text = f"no array has the layout {layout}; make it a dense tensor (to_dense() makes one)"
        raise DTypeMismatchError(f"key {key!r}: {text}", key=key)
    try:
        return dtypes.zarr_name(dtype)
    except DTypeMismatchError as error:
        raise DTypeMismatchError(f"key {key!r}: {error}", key=key) from error


def array_meta(
    tensor: ShardedTensor,
    options: SaveOptions,
    *,
    zarr_format: int = 3,
    layouts: Layouts = Layouts(),  # noqa: B008 (frozen)
) -> ArrayMeta:
    """Return the array of a sharded tensor, the same on every rank.

    Raises:
        DTypeMismatchError: the data type cannot be stored.
        KeyNameError: the key cannot be stored.
    """
    name = stored_name(tensor.key, tensor.dtype, torch.strided)
    size = dtypes.itemsize(name)
    shape = tuple(tensor.global_shape)
    if tensor.axis_fragmentations is not None:
        edges = shard_edges(shape, tuple(tensor.axis_fragmentations))
    else:
        edges = layouts.edges.get(tensor.key, tuple(max(1, n) for n in shape))
    if zarr_format == 2:
        # In Megatron-Core's layout, a shard is a chunk.
        return ArrayMeta(
            tensor.key, node_name(tensor.key), Grid(shape, edges), name, codecs=(), zarr_format=2
        )
    target_chunk_bytes = options.target_chunk_bytes
    ranges = layouts.ranges.get(tensor.key)
    if ranges:
        most = max(len(r) for r in ranges.values())
        share = math.prod(edges) * size // max(1, CHUNKS_PER_RANGE * most)
        target_chunk_bytes = min(target_chunk_bytes, max(MIN_RANGE_CHUNK_BYTES, share))
    grid = plan_grid(shape, edges, size, target_chunk_bytes, leading_only=ranges is not None)
    is_small = options.pack and math.prod(grid.chunk_shape) * size <= SMALL_BYTES
    return ArrayMeta(
        tensor.key,
        node_name(tensor.key),
        grid,
        name,
        codecs=(CRC32C,) if options.compression is None else (options.compression, CRC32C),
        separator=SEPARATOR,
        shard_shape=edges,
        places=Places() if is_small and grid.size else None,
    )


class _Held(NamedTuple):
    """A shard with data of this rank.

    Attributes:
        tensor: the shard.
        meta: its array.
        box: its place in the array.
        whole: index of the chunk that it is, if it is one chunk.
        data: its data, if it was needed before.
    """

    tensor: ShardedTensor
    meta: ArrayMeta
    box: Box
    whole: tuple[int, ...] | None
    data: LocalData | None


def plan_writes(
    tensors: Iterable[ShardedTensor],
    rank: int,
    options: SaveOptions,
    *,
    zarr_format: int = 3,
    layouts: Layouts = Layouts(),  # noqa: B008 (frozen)
    shared: SharedWrites = SharedWrites(),  # noqa: B008 (frozen)
) -> WritePlan:
    """Plan the writes of a rank's sharded tensors. A pure function; it waits for no rank.

    Args:
        tensors: all sharded tensors of this rank, replicas included.
        rank: this rank.
        options: chunk size and compression.
        zarr_format: 3 or 2.
        layouts: layouts of all ranks, from :func:`merge_layouts`.
        shared: the shards whose chunks this rank's group divides; the main replica writes others.

    Returns:
        The arrays of this rank's tensors, the chunks that it writes, and those that it shares.

    Raises:
        AccessPatternError: a shard does not consist of whole chunks of the grid of its sharding.
        CheckpointingException: a main replica has no data.
    """
    plan, finds = WritePlan(), options.constants or options.pack
    held: list[_Held] = []
    in_group: dict[Shard, tuple[ArrayMeta, Box]] = {}
    for tensor in tensors:
        is_shared = bool(shared.shards) and shared.holds(tensor)
        if not is_shared and not is_main_replica(tensor.replica_id):
            continue
        tensor.validate_metadata_integrity()
        meta = array_meta(tensor, options, zarr_format=zarr_format, layouts=layouts)
        box = local_box(tensor)
        if finds and not box.size and meta.grid.size:
            continue  # it could not know that others hold a constant
        data: LocalData | None = None
        if finds and not is_shared and tensor.data is not None:
            is_all = box.shape == tensor.global_shape and tensor.flattened_range is None
            data = data_of(tensor.data, tensor.key, tensor.prepend_axis_num) if is_all else None
            if data is not None and (bits := constant_of(data)) is not None:
                plan.tensors.append(tensor)
                plan.arrays.append(replace(meta, constant=bits, places=None))
                continue
        # A short path, because most tensors are one chunk.
        whole = meta.grid.chunk_at(box) if tensor.flattened_range is None else None
        if whole is None:
            _check_place(tensor, meta, box, rank)
        plan.tensors.append(tensor)
        plan.arrays.append(meta)
        if is_shared:
            if identity(tensor) in in_group:
                continue  # a rank may hold a shard twice
            in_group[identity(tensor)] = (meta, box)
        if box.size:
            held.append(_Held(tensor, meta, box, whole, data))
    mine = shared.own_chunks(in_group) if in_group else set()
    cut: dict[tuple[str, tuple[int, ...]], CutChunk] = {}
    for tensor, meta, box, whole, data in held:
        if tensor.data is None:
            raise _without_data(tensor.key, rank)
        if tensor.flattened_range is not None:
            _plan_flat(plan.writes, cut, tensor, meta, box, layouts.ranges[tensor.key][box])
            continue
        if data is None:
            data = data_of(tensor.data, tensor.key, tensor.prepend_axis_num)
        for index in meta.grid.overlapping(box) if whole is None else (whole,):
            if in_group and (name := identity(tensor)) in in_group and (name, index) not in mine:
                continue
            slices = () if whole else meta.grid.box(index).relative_to(box.offset).slices
            where: tuple[Any, ...] = (..., *slices)
            plan.writes.append(ChunkWrite(meta, index, data[where]))
    plan.cut = [cut[chunk] for chunk in sorted(cut)]
    return plan


def _without_data(key: str, rank: int) -> CheckpointingException:
    text = f"key {key!r} has no data on rank {rank}, which must write it; give every main replica "
    return CheckpointingException(text + "its tensor", key=key, rank=rank)


def _check_place(tensor: ShardedTensor, meta: ArrayMeta, box: Box, rank: int) -> None:
    if not box.size:
        return
    require_inside(tensor, box, rank)
    if not meta.grid.is_aligned(box):
        raise AccessPatternError(
            f"Invalid access pattern: key {tensor.key!r}, offset {box.offset}, shape {box.shape} "
            f"does not match axis_fragmentations={tensor.axis_fragmentations} of global shape "
            f"{tensor.global_shape} (shards of {meta.shard_shape or meta.grid.chunk_shape}); pass "
            "axis_fragmentations=None for an irregular cut",
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
    elements = data_of(tensor.data, tensor.key)
    of_shard = Grid(box.shape, (1,) * len(box.shape))

    def part_of(index: tuple[int, ...]) -> Box:
        return meta.grid.box(index).relative_to(box.offset)

    # The first and the last elements of the chunks ascend: skip chunks before and after the range.
    indices = list(meta.grid.overlapping(box))
    begin = bisect_left(
        indices, start, key=lambda index: of_shard.linear([n - 1 for n in part_of(index).end])
    )
    end = bisect_left(indices, stop, key=lambda index: of_shard.linear(part_of(index).offset))
    for index in indices[begin:end]:
        part = part_of(index)
        # C order within the chunk is the order of the flattened shard, with or without gaps, so
        # that a range of the shard is a range of the chunk.
        positions = _positions(part, of_shard)
        first, last = bisect_left(positions, start), bisect_left(positions, stop)
        if first == last:
            continue
        is_whole = last - first == part.size
        shape = part.shape if is_whole else (last - first,)
        data: Source = partial(_gathered, elements, part, of_shard, start, first, last, shape)
        if isinstance(positions, range):
            low = positions[first] - start
            data = elements[..., low : low + last - first].reshape(shape)
        if is_whole:
            writes.append(ChunkWrite(meta, index, data))
            continue
        pieces = tuple(
            FlatRange(low, high, r.rank)
            for r in ranges
            if (low := bisect_left(positions, r.start)) < (high := bisect_left(positions, r.stop))
        )
        owner = max(pieces, key=lambda piece: (piece.stop - piece.start, -piece.rank)).rank
        shared = CutChunk(meta, index, part.shape, owner, pieces)
        cut.setdefault((meta.key, index), shared).local[first] = data


def _positions(part: Box, of_shard: Grid) -> range | NDArray[np.int64]:
    """Return the positions of a part's elements in the flattened shard, ascending: a range if they
    are contiguous there. The elements of the shard are the chunks of the grid."""
    shape = of_shard.shape
    axis = next((axis for axis, length in enumerate(part.shape) if length != 1), len(shape))
    if part.shape[axis + 1 :] == shape[axis + 1 :]:
        low = of_shard.linear(part.offset)
        return range(low, low + part.size)
    found = np.ravel_multi_index(np.ix_(*map(np.arange, part.offset, part.end)), shape)
    return found.reshape(-1)


def _gathered(
    elements: LocalData,
    part: Box,
    of_shard: Grid,
    start: int,
    first: int,
    last: int,
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """Return elements ``first:last`` of a part with gaps, from a range that begins at ``start``."""
    wanted = np.asarray(_positions(part, of_shard))[first:last] - start
    low = int(wanted[0])
    data = fetched(elements[..., low : int(wanted[-1]) + 1])
    out: NDArray[Any] = data[wanted - low].reshape(shape)
    return out
