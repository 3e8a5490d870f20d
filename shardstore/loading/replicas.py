"""Share the reading among replicas: one rank of a group reads each chunk and sends it to others.

Every rank of the group reports which chunks it wants (a digest, if all want the same), and computes
which rank reads which chunk. If only one rank wants a chunk, it reads the chunk directly to its
destination. One of the ranks that want another chunk reads and verifies the whole chunk, and
broadcasts it. This happens in rounds within a memory budget; the next round is read while one is
sent.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import torch
import xxhash

from shardstore.distributed.groups import (
    Group,
    broadcast_bytes,
    gathered,
    global_ranks,
    group_rank,
    group_size,
)
from shardstore.errors import ArgumentError
from shardstore.exchange_utils import distribute_shards_to_ranks
from shardstore.loading.context import LoadContext
from shardstore.loading.host import (
    HostRead,
    Piece,
    Read,
    box_of,
    deliver,
    in_batches,
    read_ahead,
    read_through_host,
)
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.device import behind, stream_here
from shardstore.storage.movers.parallel import local_ranks
from shardstore.storage.stores.location import Location

ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of one rank in a round, so that reading and sending overlap."""
BUFFERS = 4
"""Number of buffers of a rank: to send, to receive, to read the next round, and to convert chunks
that only it wants."""

_ChunkId: TypeAlias = tuple[str, int]
"""Key of the array, and the chunk's position in the grid."""
Parts: TypeAlias = dict[_ChunkId, list[ChunkPart]]
"""The parts of each chunk that a rank wants."""
_Round: TypeAlias = list[list[Piece]]
"""The chunks that each rank of the group reads and sends."""


def by_chunk(regions: Iterable[RegionRead]) -> Parts:
    """Split the regions that this rank wants along the chunk grid."""
    parts: Parts = {}
    for region in regions:
        for part in chunk_parts(region):
            parts.setdefault((part.array.key, part.number), []).append(part)
    return parts


def exchange(context: LoadContext, parts: Parts, done: ReadDone | None) -> None:
    """Read regions together with the other ranks of the context's group, and exchange them.

    Every rank of the group calls it and waits for the others. The smallest budget of the group is
    used.

    Args:
        context: the context of the load, with the group.
        parts: result of :func:`by_chunk`.
        done: called as the regions fill.

    Raises:
        RanksError: another rank of the group failed.
    """
    group, read = context.group, context.stored.read
    limit_bytes, holders = _agreed(context, sorted(parts))
    pieces = {chunk: _piece(context, chunk, parts.get(chunk, ())) for chunk in holders}
    rank = group_rank(group)
    alone = [(pieces[chunk], parts[chunk]) for chunk, by in holders.items() if by == [rank]]
    rounds = _rounds(pieces, holders, group_size(group), limit_bytes)
    most = max((sum(p.size_bytes for p in one) for by_rank in rounds for one in by_rank), default=0)
    received = np.empty(most, np.uint8)
    buffers = read_ahead(read, [by_rank[rank] for by_rank in rounds])
    read_alone = partial(_read_alone, read, alone, limit_bytes, done, stream_here())
    failed: Exception | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="shardstore-read") as reader:
        reading_alone = reader.submit(read_alone)
        for by_rank in rounds:
            with context.together():
                if failed is not None:
                    raise failed
                mine = next(buffers)
            for source, batch in enumerate(by_rank):
                if not batch:
                    continue
                size = sum(piece.size_bytes for piece in batch)
                buffer = mine if source == rank else received[:size]
                broadcast_bytes(torch.from_numpy(buffer), source, group)
                try:
                    deliver(buffer, batch, done)
                except Exception as problem:  # continue: the others wait for the next broadcast
                    failed = failed or problem
    with context.together():
        if failed is not None:
            raise failed
        reading_alone.result()


def _agreed(context: LoadContext, wanted: list[_ChunkId]) -> tuple[int, dict[_ChunkId, list[int]]]:
    """Return the bytes of one rank in a round, and the ranks that want each chunk; the same on
    every rank. The ranks send their chunks only if not all of them want the same."""
    limit_bytes = max(1, min(ROUND_BYTES, context.budget_bytes // BUFFERS))
    digest = xxhash.xxh3_64_intdigest(pickle.dumps((context.stored.location.url, wanted)))
    told = gathered((digest, limit_bytes), context.group)
    limit_bytes = min(limit for _, limit in told)
    if len({digest for digest, _ in told}) == 1:
        everyone = list(range(len(told)))
        return limit_bytes, dict.fromkeys(wanted, everyone)
    holders: dict[_ChunkId, list[int]] = {}
    for rank, chunks in enumerate(gathered(wanted, context.group)):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    return limit_bytes, holders


def _piece(context: LoadContext, chunk: _ChunkId, parts: Sequence[ChunkPart]) -> Piece:
    """Return a whole chunk with the parts that this rank wants."""
    key, number = chunk
    array = context.stored.arrays[key]
    targets = [((..., *part.within.slices), part.out) for part in parts]
    return Piece(array, array.grid.box(array.grid.index_at(number)), targets)


def _rounds(
    pieces: Mapping[_ChunkId, Piece],
    holders: dict[_ChunkId, list[int]],
    ranks: int,
    limit_bytes: int,
) -> list[_Round]:
    """Return the rounds in which the chunks are sent that several ranks want."""
    sizes = {chunk: piece.size_bytes for chunk, piece in pieces.items()}
    by_rank: list[list[_ChunkId]] = [[] for _ in range(ranks)]
    for chunk, rank in distribute_shards_to_ranks(holders, sizes, ranks, set()).items():
        if len(holders[chunk]) > 1:
            by_rank[rank].append(chunk)
    cut = [
        in_batches((pieces[chunk] for chunk in sorted(chunks)), limit_bytes) for chunks in by_rank
    ]
    return [list(one) for one in zip_longest(*cut, fillvalue=[])]


def _read_alone(
    read: Read,
    alone: Sequence[tuple[Piece, list[ChunkPart]]],
    limit_bytes: int,
    done: ReadDone | None,
    stream: torch.cuda.Stream | None,
) -> None:
    """Read the chunks that no other rank wants. It runs in another thread; copies to a device wait
    for work that the caller has queued on the stream."""
    reads: list[RegionRead] = []
    several: list[Piece] = []
    for piece, (part, *others) in alone:
        if others:  # boxes of a flat range may share a chunk, which is read once
            several.append(piece)
            continue
        kind = HostRead if isinstance(part.out, torch.Tensor) else RegionRead
        reads.append(kind(part.array, box_of(part), part.out))
    with behind(stream):
        read_through_host(read, reads, limit_bytes, done, several)


# -- which groups share ----------------------------------------------------------------------------


Members: TypeAlias = range | tuple[int, ...]
"""Global numbers of a group's ranks; a range, if they are evenly spaced, to send few bytes."""

Offer: TypeAlias = tuple[Members, str, bool] | None
"""A rank's group, its ``share_replicas``, and whether it wants to share. ``None``: it gave no
group, or is not a member of it."""

_NAMED = 8


def offer(group: Group, share: str, place: Location) -> Offer:
    """Return this rank's report about its group for the coordinator.

    Args:
        group: the group, ``None`` for none.
        share: ``"always"``, ``"never"`` or ``"auto"``: share if the checkpoint is in an object
            store or the group spans hosts. For a local disk on one host, reading from the page
            cache is faster than sending.
        place: the checkpoint.

    Raises:
        ArgumentError: ``share`` is another value.
    """
    if share not in ("auto", "always", "never"):
        raise ArgumentError(f"share_replicas={share!r} must be 'auto', 'always' or 'never'")
    ranks = () if group is None else global_ranks(group)
    if not ranks:
        return None
    # Launchers set the number of ranks per host (``LOCAL_WORLD_SIZE``), and number ranks by host.
    of_host = local_ranks() if os.environ.get("LOCAL_WORLD_SIZE") else 0
    is_far = not place.is_local or len({rank // of_host for rank in ranks if of_host}) > 1
    shares = share == "always" or (share == "auto" and is_far)
    return members_of(ranks), share, shares and len(ranks) > 1


def members_of(ranks: tuple[int, ...]) -> Members:
    """Return the shortest form of a group's ranks; equal for equal ranks."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        regular = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(regular) == ranks:
            return regular
    return ranks


def agree(offers: Sequence[Offer], url: str) -> frozenset[Members]:
    """Return the groups that do not share, because with ``"auto"`` some of their ranks do not want
    it. The coordinator calls it.

    Args:
        offers: by rank.
        url: URL of the checkpoint, for the error text.

    Raises:
        ArgumentError: a rank would share, and another rank of its group gave another group or
            another ``share_replicas``.
    """
    apart: set[Members] = set()
    for members in dict.fromkeys(told[0] for told in offers if told is not None and told[2]):
        theirs = [offers[rank] for rank in members]
        if all(told is not None and told[0] == members and told[2] for told in theirs):
            continue
        if any(told is None or told[:2] != (members, "auto") for told in theirs):
            listed = ", ".join(_listed(members, theirs))
            raise ArgumentError(
                f"loading {url}: {listed}; the ranks of a replica_group share their reading, so "
                "give the same group and share_replicas on each of them, or none",
                url=url,
            )
        apart.add(members)
    return frozenset(apart)


def _listed(members: Members, theirs: Sequence[Offer]) -> Iterator[str]:
    """Yield descriptions of the ranks' offers; ranks with equal offers are named together."""
    ranks: dict[Offer, list[int]] = {}
    for rank, told in zip(members, theirs, strict=True):
        ranks.setdefault(told, []).append(rank)
    for told, same in ranks.items():
        if told is None:
            what = "none"
        else:
            what = f"the group of ranks {_shown(told[0])} with share_replicas={told[1]!r}"
        yield f"rank(s) {_shown(same)} gave {what}"


def _shown(ranks: Collection[int]) -> str:
    if len(ranks) <= _NAMED:
        return str(list(ranks))
    first = ", ".join(str(rank) for _, rank in zip(range(_NAMED), ranks, strict=False))
    return f"[{first}, and {len(ranks) - _NAMED} more]"
