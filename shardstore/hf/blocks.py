"""Which rank writes which bytes of safetensors files, and how ranks exchange parts of them. The
plan is a pure function of the layouts of all ranks.

A block is a range of a file that one rank writes. On a disk, blocks end where shards end, so that
most ranks write their own memory. In an object store, they are the parts of an upload. If other
ranks hold parts of a block, they send them to the rank that writes it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shardstore.coverage import (
    ShardReport,
    find_tiling_fault,
    require_alike,
    require_inside,
    shards_of,
)
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import AccessPatternError
from shardstore.hf.files import FileLayout
from shardstore.loading.plan import held_boxes, moved
from shardstore.mapping import ShardedTensor, local_box
from shardstore.saving.plan import stored_name
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta, array_of_one_chunk
from shardstore.storage.format.grid import Box, Grid, flat_range_boxes
from shardstore.storage.movers.chunk_bytes import span

BLOCK_BYTES = 16 * 1024 * 1024
"""Largest size of a block on a disk."""
MIN_RUN_BYTES = 1024 * 1024
"""Contiguous runs of a shard of at least this size are blocks; shorter ones are put together."""
NEAR_MOST = 0.9
"""A rank may write a block if it holds at least this part of what the rank with the most of it
holds: a block that ends within a row has a few elements more of some ranks."""

Holders: TypeAlias = dict[Box, list[int]]
"""Box of a tensor -> the ranks that hold it."""


class Piece(NamedTuple):
    """A part of a block that one rank holds.

    Attributes:
        rank: the rank that brings it.
        key: key of the tensor.
        held: box of the tensor that the rank holds.
        box: the piece, within ``held`` and ``whole``.
        whole: box of the tensor that is a contiguous range of the file.
        start: where this range begins in the block, in bytes.
        itemsize: size of an element in bytes.
    """

    rank: int
    key: str
    held: Box
    box: Box
    whole: Box
    start: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.box.size * self.itemsize

    def within(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the piece in the memory of its block, as a view of unsigned integers: NumPy copies
        the data types that it lacks element by element."""
        dtype = np.dtype(f"u{self.itemsize}")
        whole: NDArray[Any] = np.ndarray(self.whole.shape, dtype, memory, self.start)
        where: tuple[Any, ...] = (..., *self.box.relative_to(self.whole.offset).slices)
        part: NDArray[Any] = whole[where]
        return part


class Block(NamedTuple):
    """Bytes ``start:stop`` of a file.

    Attributes:
        name: name of the file.
        owner: the rank that writes it.
        pieces: what it consists of, besides the header.
    """

    name: str
    start: int
    stop: int
    owner: int
    pieces: list[Piece]

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


class _Range(NamedTuple):
    """Bytes ``start:stop`` of a file, with the pieces and the ranks that hold each."""

    name: str
    start: int
    stop: int
    pieces: list[tuple[Piece, list[int]]]


def exchange_pieces(
    ranks: Ranks,
    blocks: Sequence[Block],
    give: Callable[[Block, Piece], NDArray[np.uint8]],
    take: Callable[[Block, Piece, NDArray[np.uint8]], None],
    *,
    to_owner: bool,
) -> None:
    """Send the pieces of blocks from the ranks that hold them to the owners, or back. All ranks
    pass the same blocks in the same order, so that no two wait for each other.

    Args:
        ranks: the ranks.
        blocks: the blocks.
        give: returns the bytes of a piece that this rank sends, or keeps.
        take: gets the bytes of a piece that was sent to this rank, or kept.
        to_owner: the direction.
    """
    sends, receives, arriving = [], [], []
    for block in blocks:
        for piece in block.pieces:
            giver, taker = (piece.rank, block.owner) if to_owner else (block.owner, piece.rank)
            if ranks.rank == giver == taker:
                take(block, piece, give(block, piece))
            elif ranks.rank == giver:
                sends.append((taker, give(block, piece)))
            elif ranks.rank == taker:
                receives.append((giver, np.empty(piece.nbytes, np.uint8)))
                arriving.append((block, piece, receives[-1][1]))
    if sends or receives:
        ranks.exchange(sends, receives)
    for arrived in arriving:
        take(*arrived)


def held_by(
    reports: Sequence[ShardReport], ranks: Sequence[int]
) -> tuple[list[ArrayMeta], dict[str, Holders]]:
    """Return the tensors of all ranks, in the order of their first appearance, and who holds them.

    Args:
        reports: results of :func:`.report_shards`, in the order of ``ranks``; some may be joined.
        ranks: the ranks.

    Raises:
        AccessPatternError: ranks describe a tensor differently, or their shards overlap or leave a
            gap. Equal shards are replicas.
        DTypeMismatchError: a data type cannot be stored.
    """
    arrays: list[ArrayMeta] = []
    holders: dict[str, Holders] = {}
    whole = set[tuple[Any, ...]]()  # most tensors of a model are cut as others are
    agreed = dict.fromkeys(("global_shape", "dtype"), AccessPatternError)
    for key, held in shards_of(reports, ranks).items():
        require_alike(held, agreed)
        _, first = held[0]
        assert isinstance(first, ShardedTensor)
        boxes: Holders = defaultdict(list)
        for rank, tensor in held:
            assert isinstance(tensor, ShardedTensor)
            require_inside(tensor, local_box(tensor), rank)
            for box in held_boxes(tensor):
                if box.size and rank not in boxes[box]:
                    boxes[box].append(rank)
        cut = first.global_shape, *boxes
        if cut not in whole and (fault := find_tiling_fault(list(boxes), first.global_shape)):
            who = sorted(rank for number in fault.shards for rank in list(boxes.values())[number])
            many = f"is in different shards of ranks {who[:16]}" if who else "is on no rank"
            raise AccessPatternError(
                f"key {key!r} of shape {first.global_shape}: the region at offset {fault.offset} "
                f"of shape {fault.shape} {many}; ranks must hold each element once, or replicas",
                key=key,
                rank=who[0] if who else None,
            )
        whole.add(cut)
        name = stored_name(key, first.dtype, torch.strided)
        arrays.append(array_of_one_chunk(key, first.global_shape, name))
        holders[key] = boxes
    return arrays, holders


def plan_blocks(
    layout: FileLayout,
    arrays: Sequence[ArrayMeta],
    holders: Mapping[str, Holders],
    ranks: Sequence[int],
    part_bytes: int | None,
    in_order: bool = False,
) -> list[Block]:
    """Divide the writing of the files among the ranks, by size.

    Args:
        layout: the files.
        arrays: the tensors in them.
        holders: see :func:`held_by`.
        ranks: the ranks.
        part_bytes: size of the parts that files are cut into, a multiple of
            :data:`~shardstore.hf.files.ALIGNMENT`; ``None``: they are cut where shards end.
        in_order: one rank writes each file, from its beginning to its end.
    """
    # An empty tensor is held by no rank, and begins where another does.
    arrays = sorted((m for m in arrays if holders[m.key]), key=lambda m: layout.places[m.key])
    if part_bytes is None:
        ranges = _where_shards_end(layout, arrays, holders)
    else:
        ranges = _parts(layout, arrays, holders, part_bytes)
    return _owned(ranges, ranks, in_order)


def _parts(
    layout: FileLayout,
    arrays: Sequence[ArrayMeta],
    holders: Mapping[str, Holders],
    part_bytes: int,
) -> Iterator[_Range]:
    """Yield the parts of uploads."""
    by_file: dict[str, list[tuple[int, int, _Sweep]]] = {name: [] for name in layout.heads}
    for meta in arrays:
        name, start = layout.places[meta.key]
        sweep = _Sweep(meta, holders[meta.key])
        by_file[name].append((start, start + sweep.total * sweep.itemsize, sweep))
    for name, tensors in by_file.items():
        size = layout.sizes[name]
        for begin, end in pairwise([*range(0, size, part_bytes), size]):
            pieces = list(_pieces(tensors, begin, end))
            while tensors and tensors[0][1] <= end:
                tensors.pop(0)
            yield _Range(name, begin, end, pieces)


def _where_shards_end(
    layout: FileLayout, arrays: Sequence[ArrayMeta], holders: Mapping[str, Holders]
) -> Iterator[_Range]:
    """Yield the ranges of files that are cut where shards end. Tensors that are cut as another one
    have its pieces."""
    known: dict[tuple[Any, ...], list[tuple[int, int, list[tuple[Piece, list[int]]]]]] = {}
    for meta in arrays:
        cut = meta.shape, meta.dtype, *((box, *who) for box, who in holders[meta.key].items())
        if cut not in known:
            ranges = list(pairwise([0, *_Sweep(meta, holders[meta.key]).cuts()]))
            pieces = pieces_of(meta, holders[meta.key], ranges)
            known[cut] = [(*ends, some) for ends, some in zip(ranges, pieces, strict=True)]
        name, start = layout.places[meta.key]
        for begin, end, some in known[cut]:
            own = [(piece._replace(key=meta.key), who) for piece, who in some]
            yield _Range(name, start + begin, start + end, own)


def pieces_of(
    meta: ArrayMeta, holders: Holders, cuts: Iterable[tuple[int, int]]
) -> Iterator[list[tuple[Piece, list[int]]]]:
    """Yield for each range of a tensor's bytes its pieces, with their ranks. The ranges ascend."""
    sweep = _Sweep(meta, holders)
    for begin, end in cuts:
        yield list(_pieces([(0, sweep.total * sweep.itemsize, sweep)], begin, end))


def _pieces(
    tensors: Sequence[tuple[int, int, _Sweep]], begin: int, end: int
) -> Iterator[tuple[Piece, list[int]]]:
    """Yield the pieces of a range of a file, each with the ranks that hold it."""
    for start, stop, sweep in tensors:
        if start >= end:
            return
        low, high = max(start, begin), min(stop, end)
        at, size = low - begin, sweep.itemsize
        first, last = (low - start) // size, (high - start) // size
        active = sweep.overlapping(first, last)
        for whole in flat_range_boxes(sweep.meta.shape, first, last):
            for _, _, held, ranks in active:
                if box := whole.intersect(held):
                    yield Piece(-1, sweep.meta.key, held, box, whole, at, size), ranks
            at += whole.size * size


def _owned(ranges: Iterable[_Range], ranks: Sequence[int], in_order: bool) -> list[Block]:
    """Return the ranges as blocks. The rank that holds the most of one writes it. Those of which
    several ranks hold about the most come last, and the one with the least to write gets each."""
    found: list[tuple[_Range, Counter[int], Sequence[int]]] = []
    for one in ranges:
        held = Counter[int]()
        for piece, who in one.pieces:
            for rank in who:
                held[rank] += piece.nbytes
        least = NEAR_MOST * max(held.values(), default=0)
        writers = ranks if in_order else [r for r in held if held[r] >= least] or ranks
        found.append((one, held, writers))
    load, of_file, blocks = Counter(dict.fromkeys(ranks, 0)), dict[str, int](), list[Block]()
    for one, held, writers in sorted(found, key=lambda each: len(each[2])):
        # In order, the first of them, which completes the only file at the commit.
        owner = min(writers, key=lambda rank: (load[rank], not in_order and rank))
        if in_order:
            owner = of_file.setdefault(one.name, owner)
        load[owner] += one.stop - one.start
        pieces = [
            piece._replace(
                rank=owner if owner in who else min(who, key=lambda rank: (-held[rank], rank))
            )
            for piece, who in one.pieces
        ]
        blocks.append(Block(one.name, one.start, one.stop, owner, pieces))
    return sorted(blocks, key=itemgetter(0, 1))


class _Sweep:
    """The shards of a tensor, for ascending ranges of its elements."""

    def __init__(self, meta: ArrayMeta, holders: Holders) -> None:
        self.meta, self.itemsize = meta, dtypes.itemsize(meta.dtype)
        self.total = math.prod(meta.shape)
        spans = ((*span(box, meta.shape, 1), box, held) for box, held in holders.items())
        self._coming = sorted(spans, key=lambda span: span[0], reverse=True)
        self._active: list[tuple[int, int, Box, list[int]]] = []

    def overlapping(self, first: int, last: int) -> list[tuple[int, int, Box, list[int]]]:
        """Return the shards that may overlap a range: first and last element, box, and ranks."""
        while self._coming and self._coming[-1][0] < last:
            self._active.append(self._coming.pop())
        self._active = [span for span in self._active if span[1] > first]
        return self._active

    def cuts(self) -> Iterator[int]:
        """Yield where blocks of the tensor end, in bytes from its beginning."""
        marks = {self.total}
        for _, _, box, _ in self._coming:
            marks.update(_run_bounds(self.meta.shape, box, MIN_RUN_BYTES // self.itemsize))
        step = BLOCK_BYTES // self.itemsize
        for low, high in pairwise(sorted({0, *marks})):
            for element in [*range(low + step, high, step), high]:
                yield element * self.itemsize


def _run_bounds(shape: tuple[int, ...], box: Box, least: int) -> Iterator[int]:
    """Yield the first and last elements of a box's contiguous runs in the flattened tensor, if they
    have at least ``least`` elements or there is one alone."""
    axis = len(shape)
    while axis and box.shape[axis - 1] == shape[axis - 1]:
        axis -= 1
    axis = max(0, axis - 1)
    runs = Grid(box.shape, (1,) * axis + box.shape[axis:])
    if runs.size == 1 or math.prod(runs.chunk_shape) >= least:
        for number in range(runs.size):
            yield from span(moved(runs.box(runs.index_at(number)), box.offset), shape, 1)
