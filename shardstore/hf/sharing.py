"""Reads blocks of files for several ranks of a host, of which each wants a part of the rows.

A store takes longer for a request than for the bytes between the runs of such a part, as columns
under tensor parallelism. If each rank read its own, all would read the whole tensor. Instead each
block is read once, by one of the ranks that want parts of it, and it sends the others theirs.
"""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardstore.distributed.coordinator import Ranks
from shardstore.hf.blocks import Block, Holders, Piece, exchange_pieces, pieces_of
from shardstore.loading.read import copy_to
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunk_bytes import as_bytes, slabs, span
from shardstore.storage.movers.chunks import ReadDone, RegionRead
from shardstore.storage.movers.ranges import GAP_BYTES, REQUEST_BYTES, REQUESTS, FilePosition
from shardstore.storage.runtime.parallel import in_rounds, local_ranks

MOST_EXCESS = 1.05
"""Regions for which a rank alone would read more than this multiple of their bytes are shared."""
ROUND_BYTES = 4 * REQUEST_BYTES
"""Bytes that a rank reads at a time, while what it has read is sent."""

Wanted: TypeAlias = dict[str, Holders]
"""Name of a stored tensor -> box -> the ranks of a host that want it."""
Coming: TypeAlias = Mapping[int, "Future[NDArray[np.uint8]]"]
"""``id`` of a block that this rank reads -> its bytes."""
ReadRange: TypeAlias = Callable[[str, int, int], bytes | memoryview]
"""Reads bytes of a file: its name, the first byte, and one past the last one."""


class Hosts(NamedTuple):
    """The scattered regions of tensors that several ranks of a host want.

    Attributes:
        size: number of ranks of a host, as the coordinator sees it.
        wanted: by number of the host; its ranks are numbered from 0.
    """

    size: int
    wanted: Mapping[int, Wanted]

    def of(self, rank: int) -> Wanted:
        """Return what the ranks of a rank's host want."""
        host, first = rank // self.size, rank // self.size * self.size
        return {
            name: {box: [first + number for number in numbers] for box, numbers in boxes.items()}
            for name, boxes in self.wanted.get(host, {}).items()
        }


def is_scattered(region: RegionRead) -> bool:
    """Return whether a store would be asked for many more bytes than the region has."""
    size = dtypes.itemsize(region.array.dtype)
    like: NDArray[Any] = np.broadcast_to(np.empty((), f"V{size}"), region.box.shape)
    parts = slabs(like, region.box, region.array.shape, 0, GAP_BYTES)
    return sum(last - first for first, last, _ in parts) > MOST_EXCESS * like.nbytes


def wanted_by(reports: Mapping[int, Iterable[tuple[str, Box]]]) -> Hosts:
    """Return what the ranks of each host want of the same tensors. The coordinator calls it.

    Launchers set the number of ranks per host (``LOCAL_WORLD_SIZE``), and number ranks by host;
    without it, all ranks count as one host. Hosts that want the same, as replicas do, have one
    object, which is pickled once.

    Args:
        reports: by rank, name and box of each scattered region.
    """
    size = local_ranks() if os.environ.get("LOCAL_WORLD_SIZE") else max(reports) + 1
    hosts: dict[int, Wanted] = {}
    for rank, regions in reports.items():
        for name, box in regions:
            boxes = hosts.setdefault(rank // size, {}).setdefault(name, {})
            if rank % size not in (numbers := boxes.setdefault(box, [])):
                numbers.append(rank % size)
    known: dict[bytes, Wanted] = {}
    for host, wanted in hosts.items():
        several = {
            name: boxes
            for name, boxes in wanted.items()
            if len({number for numbers in boxes.values() for number in numbers}) > 1
        }
        hosts[host] = known.setdefault(pickle.dumps(several), several)
    return Hosts(size, hosts)


def plan_shared(
    wanted: Wanted, arrays: Mapping[str, ArrayMeta], places: Mapping[str, FilePosition]
) -> list[Block]:
    """Divide the reading of a host's wanted regions among its ranks, by size. A pure function.

    Returns:
        The blocks; the owner reads, and the rank of a piece wants it.
    """
    load = Counter[int]()
    blocks = []
    for name, boxes in wanted.items():
        meta, (file, start) = arrays[name], places[name]
        size = dtypes.itemsize(meta.dtype)
        spans = _united(span(box, meta.shape, size) for box in boxes)
        step = REQUEST_BYTES // size * size
        cuts = [(at, min(at + step, high)) for low, high in spans for at in range(low, high, step)]
        for (begin, end), found in zip(cuts, pieces_of(meta, boxes, cuts), strict=True):
            pieces = [piece._replace(rank=one) for piece, ranks in found for one in ranks]
            if not pieces:  # a gap
                continue
            owner = min({piece.rank for piece in pieces}, key=lambda one: (load[one], one))
            load[owner] += end - begin
            blocks.append(Block(file, start + begin, start + end, owner, pieces))
    return blocks


def _united(spans: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the ranges that overlapping ranges form."""
    united: list[list[int]] = []
    for first, last in sorted(spans):
        if united and first < united[-1][1]:
            united[-1][1] = max(united[-1][1], last)
        else:
            united.append([first, last])
    return united


def read_shared(
    ranks: Ranks,
    blocks: Sequence[Block],
    regions: Sequence[RegionRead],
    read: ReadRange,
    done: ReadDone,
) -> None:
    """Read the blocks of a host, and exchange their parts. Every rank that owns a block or wants a
    piece calls it, and waits for its partners.

    Args:
        ranks: the ranks of the load.
        blocks: the blocks of the host, the same on all of its ranks.
        regions: the regions that this rank wants.
        read: reads bytes of a file; several threads call it.
        done: called as the regions fill.

    Raises:
        CheckpointingException: the error of ``read``, after all pieces were exchanged.
    """
    rank = ranks.rank
    wanted: dict[tuple[str, Box], list[RegionRead]] = {}
    for region in regions:
        wanted.setdefault((region.array.key, region.box), []).append(region)
    pairs = {(block.owner, piece.rank) for block in blocks for piece in block.pieces}
    ranks.connect({other for pair in pairs if rank in pair for other in pair} - {rank})
    failures: list[Exception] = []

    def fetch(block: Block) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(read(block.name, block.start, block.stop), np.uint8)
        except Exception as problem:  # the other ranks wait for their pieces
            failures.append(problem)
            return np.zeros(block.size, np.uint8)

    most = ROUND_BYTES * len({block.owner for block in blocks})
    rounds = list(in_rounds(blocks, lambda block: block.size, most))
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="shardstore-host") as readers:

        def begin(some: Sequence[Block]) -> Coming:
            return {id(one): readers.submit(fetch, one) for one in some if one.owner == rank}

        following = begin(rounds[0])
        for number, some in enumerate(rounds, 1):
            coming, following = following, begin(rounds[number] if number < len(rounds) else ())
            _send(ranks, some, coming, wanted, done)
    if failures:
        raise failures[0]


def _send(
    ranks: Ranks,
    blocks: Sequence[Block],
    coming: Coming,
    wanted: Mapping[tuple[str, Box], Sequence[RegionRead]],
    done: ReadDone,
) -> None:
    """Exchange the pieces of some blocks, and copy those of this rank to their destinations."""

    def take(_: Block, piece: Piece, values: NDArray[np.uint8]) -> None:
        for region in wanted[piece.key, piece.held]:
            dtype = dtypes.numpy_dtype(region.array.dtype)
            where: tuple[Any, ...] = (..., *piece.box.relative_to(piece.held.offset).slices)
            out = region.out[where]
            copy_to(out, values.view(dtype).reshape(piece.box.shape))
            done(out.nbytes, 0)

    def give(block: Block, piece: Piece) -> NDArray[np.uint8]:
        return as_bytes(piece.within(coming[id(block)].result()).copy())

    exchange_pieces(ranks, blocks, give, take, to_owner=False)
