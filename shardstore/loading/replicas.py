"""Replicas share the reading: each chunk is read once in a group of ranks, and sent on.

Every rank of the group says which chunks it wants (numbers; a digest, where all want the same), and
computes by itself which rank reads which. A chunk that one rank alone wants is read by it, straight
to its place. All others are read whole, verified, by one of those that want them, and broadcast in
rounds within a memory budget; while one round travels the next is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from shardstore.distributed.groups import (
    Group,
    exchange_device,
    global_rank,
    global_ranks,
    group_rank,
    group_size,
    raise_together,
)
from shardstore.errors import ArgumentError
from shardstore.exchange_utils import distribute_shards_to_ranks
from shardstore.loading.host import (
    HostRead,
    box_of,
    carved,
    carved_bytes,
    fill,
    read_through_host,
)
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.device import behind, stream_here
from shardstore.storage.movers.parallel import local_ranks
from shardstore.storage.stores.location import Location

__all__ = ["Exchange", "Members", "Offer", "agree", "members_of", "offer", "sharing_group"]

ROUND_BYTES = 16 * 1024 * 1024
"""Of one rank in a round at the most, budget or not: the next is read while one travels."""
BUFFERS = 4
"""A rank holds at a time: what it sends, what it receives, what it reads for the next round, and
what it reads alone to convert."""


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the checkpoint, numbered across all arrays in the order of their keys."""

    number: int
    array: ArrayMeta
    index: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.array.grid.box(self.index)

    @property
    def size_bytes(self) -> int:
        """Bytes in a round's buffer."""
        return carved_bytes(self.array, self.box)


_Round = list[list[_Chunk]]
"""The chunks that each rank of the group reads and sends."""


class Exchange:
    """One load of one rank of a group.

    Args:
        stored: the checkpoint.
        regions: what this rank wants.
        group: the ranks that share the reading; each of them makes an exchange and runs it.
        budget_bytes: host memory for chunks under way, on each rank; the smallest of the group
            counts.
        done: told as the regions fill.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        regions: Sequence[RegionRead],
        group: Group,
        budget_bytes: int,
        done: ReadDone | None,
    ) -> None:
        self._stored = stored
        self._done = done
        self._stream = stream_here()
        self._group = group
        self._rank, self._size = group_rank(group), group_size(group)
        self._limit_bytes = max(1, min(ROUND_BYTES, budget_bytes // BUFFERS))
        self._metas = [stored.arrays[key] for key in sorted(stored.arrays)]
        sizes = [meta.grid.size for meta in self._metas]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        start = {m.key: int(s) for m, s in zip(self._metas, self._starts[:-1], strict=True)}
        self._parts: dict[int, list[ChunkPart]] = {}
        for region in regions:
            for part in chunk_parts(region):
                number = start[part.array.key] + part.number
                self._parts.setdefault(number, []).append(part)

    def run(self, what: str) -> None:
        """Read and exchange. Called by every rank of the group.

        Args:
            what: what the ranks are doing, for error texts.

        Raises:
            RanksError: another rank of the group failed.
        """
        alone, rounds = self._plan(self._wanted_by_rank())
        most = max((sum(c.size_bytes for c in r) for one in rounds for r in one), default=0)
        received = np.empty(most, np.uint8)
        with ThreadPoolExecutor(1, thread_name_prefix="shardstore-read") as reader:
            reading_alone = reader.submit(self._read_alone, alone)
            coming = reader.submit(self._read_round, rounds, 0)
            for number, by_rank in enumerate(rounds):
                raise_together(coming.exception(), self._group, what)
                mine = coming.result()
                coming = reader.submit(self._read_round, rounds, number + 1)
                for rank, chunks in enumerate(by_rank):
                    if chunks:
                        size = sum(chunk.size_bytes for chunk in chunks)
                        buffer = mine if rank == self._rank else received[:size]
                        self._broadcast(buffer, rank)
                        self._scatter(buffer, chunks)
            failed = reading_alone.exception()
        raise_together(failed, self._group, what)

    # -- who reads what ------------------------------------------------------------------------

    def _wanted_by_rank(self) -> list[NDArray[np.int64]]:
        """Gather the chunks that each rank wants, and the smallest of all limits: ranks cut the
        same rounds. Where all want the same, every entry is the same object."""
        wanted = np.array(sorted(self._parts), np.int64)
        url = self._stored.location.url
        digest = xxhash.xxh3_64_intdigest(wanted.tobytes() + url.encode())
        told = self._gathered((digest, self._limit_bytes))
        self._limit_bytes = min(limit for _, limit in told)
        if len({digest for digest, _ in told}) == 1:
            return [wanted] * self._size
        return self._gathered(wanted)

    def _gathered(self, mine: Any) -> list[Any]:
        found = [None] * self._size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def _plan(self, wanted: Sequence[NDArray[np.int64]]) -> tuple[list[int], list[_Round]]:
        """Return the chunks that this rank reads for itself, and the rounds, which are the same on
        every rank."""
        holders: dict[int, list[int]] = {}
        if all(other is wanted[0] for other in wanted):
            everyone = list(range(self._size))
            holders = dict.fromkeys(wanted[0].tolist(), everyone)
        else:
            for rank, numbers in enumerate(wanted):
                for number in numbers.tolist():
                    holders.setdefault(number, []).append(rank)
        chunks = {number: self._chunk(number) for number in holders}
        sizes = {number: chunk.size_bytes for number, chunk in chunks.items()}
        by_rank: list[list[_Chunk]] = [[] for _ in range(self._size)]
        for number, rank in distribute_shards_to_ranks(holders, sizes, self._size, set()).items():
            if len(holders[number]) > 1:
                by_rank[rank].append(chunks[number])
        cut = [self._batches(sorted(mine, key=lambda chunk: chunk.number)) for mine in by_rank]
        rounds = [
            [batches[i] if i < len(batches) else [] for batches in cut]
            for i in range(max(map(len, cut)))
        ]
        return [n for n, ranks in holders.items() if ranks == [self._rank]], rounds

    def _batches(self, chunks: Sequence[_Chunk]) -> list[list[_Chunk]]:
        """Cut into batches that fit into one of the buffers, or are a single chunk."""
        batches: list[list[_Chunk]] = []
        size = self._limit_bytes + 1
        for chunk in chunks:
            if size + chunk.size_bytes > self._limit_bytes:
                batches.append([])
                size = 0
            batches[-1].append(chunk)
            size += chunk.size_bytes
        return batches

    def _chunk(self, number: int) -> _Chunk:
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        meta = self._metas[place]
        return _Chunk(number, meta, meta.grid.index(number - int(self._starts[place])))

    # -- bytes ---------------------------------------------------------------------------------

    def _read_alone(self, numbers: Sequence[int]) -> None:
        """Read what no other rank wants. In another thread than the caller's: onto a device behind
        what the caller has queued there."""
        reads, several = [], []
        for number in numbers:
            parts = self._parts[number]
            if len(parts) > 1:
                several.append(self._chunk(number))
                continue
            (part,) = parts
            kind = HostRead if isinstance(part.out, torch.Tensor) else RegionRead
            reads.append(kind(part.array, box_of(part), part.out))
        with behind(self._stream):
            read_through_host(self._stored.read, reads, self._limit_bytes, self._done)
            # Boxes of a flat range may meet in a chunk: it is read once all the same.
            for chunks in self._batches(several):
                self._scatter(self._read_whole(chunks), chunks)

    def _read_round(self, rounds: Sequence[_Round], number: int) -> NDArray[np.uint8]:
        """Read this rank's chunks of a round into one buffer."""
        return self._read_whole(rounds[number][self._rank] if number < len(rounds) else [])

    def _read_whole(self, chunks: Sequence[_Chunk]) -> NDArray[np.uint8]:
        buffer = np.empty(sum(chunk.size_bytes for chunk in chunks), np.uint8)
        pairs = zip(chunks, _views(buffer, chunks), strict=True)
        self._stored.read([RegionRead(chunk.array, chunk.box, view) for chunk, view in pairs])
        return buffer

    def _broadcast(self, buffer: NDArray[np.uint8], rank: int) -> None:
        device = exchange_device(self._group)
        host = torch.from_numpy(buffer)
        wire = host.to(device)
        dist.broadcast(wire, src=global_rank(self._group, rank), group=self._group)
        if wire is not host and rank != self._rank:
            host.copy_(wire)

    def _scatter(self, buffer: NDArray[np.uint8], chunks: Sequence[_Chunk]) -> None:
        for chunk, view in zip(chunks, _views(buffer, chunks), strict=True):
            for part in self._parts.get(chunk.number, ()):
                where: tuple[Any, ...] = (..., *part.within.slices)
                fill(part.out, view[where])
                if self._done is not None:
                    self._done(part.out.nbytes, 1)


def _views(buffer: NDArray[np.uint8], chunks: Sequence[_Chunk]) -> list[NDArray[Any]]:
    """Where in a round's buffer each chunk is."""
    return carved(buffer, [(chunk.array, chunk.box) for chunk in chunks])


# -- which groups share ----------------------------------------------------------------------------


def sharing_group(group: Group, share: str, place: Location) -> Group:
    """Return the group that this rank would share its reading with, ``None`` for none.

    All ranks of the group have to want it, see :func:`agree`.

    Args:
        group: the group, ``None`` for none.
        share: ``"always"``, ``"never"``, or ``"auto"``: where bytes come over a network, from an
            object store or to more than this host. From a local disk they do not: the page cache
            hands a chunk to a second rank of the host faster than the first rank could send it.
        place: the checkpoint.

    Raises:
        ArgumentError: no such choice.
    """
    if share not in ("auto", "always", "never"):
        raise ArgumentError(f"share_replicas={share!r} must be 'auto', 'always' or 'never'")
    if group is None or share == "never" or group_size(group) < 2:
        return None
    if share == "auto" and place.is_local and not _is_on_several_hosts(group):
        return None
    return group


def _is_on_several_hosts(group: Group) -> bool:
    """Whether a group spans hosts; unknown counts as no.

    Launchers tell the ranks of a host (``LOCAL_WORLD_SIZE``) and number ranks host by host.
    """
    if not os.environ.get("LOCAL_WORLD_SIZE"):
        return False
    on_each = local_ranks()
    return len({rank // on_each for rank in global_ranks(group)}) > 1


Members: TypeAlias = range | tuple[int, ...]
"""Global numbers of a group's ranks; evenly spaced ones take few bytes."""

Offer: TypeAlias = tuple[Members, str, bool] | None
"""A rank's group, its ``share_replicas``, and whether it would share. ``None``: it gave no group,
or is not a member of it."""

_NAMED = 8


def offer(group: Group, share: str, shares: bool) -> Offer:
    """Return what the coordinator is told of this rank's group.

    Args:
        group: a process group, ``None`` for none.
        share: ``share_replicas``.
        shares: whether it would share.
    """
    members = () if group is None else global_ranks(group)
    return (members_of(members), share, shares) if members else None


def members_of(ranks: tuple[int, ...]) -> Members:
    """Return the shortest form of a group's ranks, the same for the same ranks."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        regular = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(regular) == ranks:
            return regular
    return ranks


def agree(offers: Sequence[Offer], url: str) -> frozenset[Members]:
    """Return the groups that do not share: with ``"auto"``, if some of their ranks would not.

    Called by the coordinator.

    Args:
        offers: by rank.
        url: of the checkpoint, for the error text.

    Raises:
        ArgumentError: a rank would share, and another one of its group gave another group or
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
    """Yield what the ranks of a group gave; ranks that gave the same are named together."""
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
