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
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    box_of,
    deliver,
    in_batches,
    read_ahead,
    read_through_host,
)
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.device import behind, stream_of
from shardstore.storage.movers.parallel import local_ranks
from shardstore.storage.stores.location import Location

ROUND_BYTES = 16 * 1024 * 1024
"""Largest number of bytes of one rank in a round, so that reading and sending overlap."""
BUFFERS = 4
"""Number of buffers of a rank: to send, to receive, to read the next round, and to convert chunks
that only it wants."""

_ChunkId: TypeAlias = tuple[str, int]
"""Key of the array, and the chunk's position in the grid."""
_Round: TypeAlias = list[list[Piece]]
"""The chunks that each rank of the group reads and sends."""


class Exchange:
    """The shared reading of one rank of a group.

    Args:
        context: the context of the load, with the group. Each rank of the group makes an exchange
            and runs it. The smallest budget of the group is used.
        regions: the regions that this rank wants.
        done: called as the regions fill.
    """

    def __init__(
        self, context: LoadContext, regions: Sequence[RegionRead], done: ReadDone | None
    ) -> None:
        self._context = context
        self._stored, self._group = context.stored, context.group
        self._done = done
        self._stream = stream_of()
        self._limit_bytes = max(1, min(ROUND_BYTES, context.budget_bytes // BUFFERS))
        self._parts: dict[_ChunkId, list[ChunkPart]] = {}
        for region in regions:
            for part in chunk_parts(region):
                self._parts.setdefault((part.array.key, part.number), []).append(part)

    def run(self) -> None:
        """Read and exchange. Every rank of the group calls it and waits for the others.

        Raises:
            RanksError: another rank of the group failed.
        """
        rank = group_rank(self._group)
        alone, rounds = self._plan(self._wanted_by_rank(), rank)
        most = max(
            (sum(p.size_bytes for p in one) for by_rank in rounds for one in by_rank), default=0
        )
        received = np.empty(most, np.uint8)
        reads = read_ahead(self._stored.read, [by_rank[rank] for by_rank in rounds])
        failed: Exception | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="shardstore-read") as reader:
            reading_alone = reader.submit(self._read_alone, alone)
            for by_rank in rounds:
                with self._context.together():
                    if failed is not None:
                        raise failed
                    mine = next(reads)
                for source, batch in enumerate(by_rank):
                    if not batch:
                        continue
                    size = sum(piece.size_bytes for piece in batch)
                    buffer = mine if source == rank else received[:size]
                    broadcast_bytes(torch.from_numpy(buffer), source, self._group)
                    try:
                        deliver(buffer, batch, self._done)
                    except Exception as problem:  # continue: the others wait for the next broadcast
                        failed = failed or problem
        with self._context.together():
            if failed is not None:
                raise failed
            reading_alone.result()

    def _wanted_by_rank(self) -> list[list[_ChunkId]]:
        """Gather the chunks that each rank wants, and the smallest limit, so that all ranks form
        the same rounds. If all want the same chunks, every entry is the same object."""
        wanted = sorted(self._parts)
        about = pickle.dumps((self._stored.location.url, wanted))
        told = gathered((xxhash.xxh3_64_intdigest(about), self._limit_bytes), self._group)
        self._limit_bytes = min(limit for _, limit in told)
        if len({digest for digest, _ in told}) == 1:
            return [wanted] * len(told)
        return gathered(wanted, self._group)

    def _plan(
        self, wanted: Sequence[Sequence[_ChunkId]], mine: int
    ) -> tuple[list[_ChunkId], list[_Round]]:
        """Return the chunks that only this rank wants, and the rounds, the same on every rank."""
        ranks = list(range(len(wanted)))
        holders: dict[_ChunkId, list[int]] = {}
        if all(other is wanted[0] for other in wanted):
            holders = dict.fromkeys(wanted[0], ranks)
        else:
            for rank, chunks in enumerate(wanted):
                for chunk in chunks:
                    holders.setdefault(chunk, []).append(rank)
        pieces = {chunk: self._piece(chunk) for chunk in holders}
        sizes = {chunk: piece.size_bytes for chunk, piece in pieces.items()}
        by_rank: list[list[_ChunkId]] = [[] for _ in ranks]
        for chunk, rank in distribute_shards_to_ranks(holders, sizes, len(ranks), set()).items():
            if len(holders[chunk]) > 1:
                by_rank[rank].append(chunk)
        cut = [
            in_batches((pieces[chunk] for chunk in sorted(chunks)), self._limit_bytes)
            for chunks in by_rank
        ]
        rounds = [list(one) for one in zip_longest(*cut, fillvalue=[])]
        return [chunk for chunk, holding in holders.items() if holding == [mine]], rounds

    def _piece(self, chunk: _ChunkId) -> Piece:
        """Return a whole chunk with the parts that this rank wants."""
        key, number = chunk
        array = self._stored.arrays[key]
        parts = self._parts.get(chunk, ())
        targets = [((..., *part.within.slices), part.out) for part in parts]
        return Piece(array, array.grid.box(array.grid.index_at(number)), targets)

    def _read_alone(self, chunks: Sequence[_ChunkId]) -> None:
        """Read the chunks that no other rank wants. It runs in another thread; copies to a device
        wait for work that the caller has queued there."""
        reads: list[RegionRead] = []
        several: list[Piece] = []
        for chunk in chunks:
            part, *others = self._parts[chunk]
            if others:  # boxes of a flat range may share a chunk, which is read once
                several.append(self._piece(chunk))
                continue
            kind = HostRead if isinstance(part.out, torch.Tensor) else RegionRead
            reads.append(kind(part.array, box_of(part), part.out))
        with behind(self._stream):
            read_through_host(self._stored.read, reads, self._limit_bytes, self._done)
            batches = in_batches(several, self._limit_bytes)
            buffers = read_ahead(self._stored.read, batches)
            for batch, buffer in zip(batches, buffers, strict=True):
                deliver(buffer, batch, self._done)


# -- which groups share ----------------------------------------------------------------------------


def sharing_group(group: Group, share: str, place: Location) -> Group:
    """Return the group that this rank wants to share its reading with, ``None`` for none.

    All ranks of the group must want it, see :func:`agree`.

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
    if group is None or share == "never" or group_size(group) < 2:
        return None
    if share == "auto" and place.is_local and not _is_on_several_hosts(group):
        return None
    return group


def _is_on_several_hosts(group: Group) -> bool:
    """Return whether a group spans hosts; ``False`` if unknown.

    Launchers set the number of ranks per host (``LOCAL_WORLD_SIZE``), and number ranks by host.
    """
    if not os.environ.get("LOCAL_WORLD_SIZE"):
        return False
    on_each = local_ranks()
    return len({rank // on_each for rank in global_ranks(group)}) > 1


Members: TypeAlias = range | tuple[int, ...]
"""Global numbers of a group's ranks; a range, if they are evenly spaced, to send few bytes."""

Offer: TypeAlias = tuple[Members, str, bool] | None
"""A rank's group, its ``share_replicas``, and whether it would share. ``None``: it gave no group,
or is not a member of it."""

_NAMED = 8


def offer(group: Group, share: str, shares: bool) -> Offer:
    """Return this rank's report about its group for the coordinator.

    Args:
        group: a process group, ``None`` for none.
        share: ``share_replicas``.
        shares: whether this rank wants to share.
    """
    members = () if group is None else global_ranks(group)
    return (members_of(members), share, shares) if members else None


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
