"""Replicas share the reading: each chunk is read once in a group of ranks, and sent on.

Every rank of the group says which chunks it wants (numbers; one hash, where all want the same), and
computes alone which rank reads which. A chunk that one rank alone wants is read by it, straight to
its place. All others are read whole, verified, by one of those that want them, and broadcast over
the group in rounds within a memory budget; while one round travels the next is read.

It knows regions and one stored checkpoint; not what they are parts of.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from shardstore.loading.casting import CastRead, budget_of, converted, read_converting
from shardstore.loading.context import LoadContext
from shardstore.progress import Meter
from shardstore.saving.staging import copy_bits
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box
from shardstore.storage.movers.chunks import ChunkPart, ReadDone, RegionRead, chunk_parts
from shardstore.storage.movers.device import behind, stream_here
from shardstore.storage.movers.parallel import local_ranks
from shardstore.storage.stores.location import Location

__all__ = [
    "Members",
    "Offer",
    "agree",
    "members_of",
    "offer",
    "read_regions",
    "sharing_group",
]

ALIGNMENT = 64
ROUND_BYTES = 16 * 1024 * 1024
"""Of one rank in a round at the most, budget or not: the next is read while one travels."""
BUFFERS = 4
"""A rank holds at a time: what it sends, what it receives, what it reads for the next round, and
what it reads alone to convert."""


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


def _is_on_several_hosts(group: Any) -> bool:
    """Whether a group's ranks are of more than one host, as far as the launcher tells how many
    ranks a host has (``LOCAL_WORLD_SIZE``). Ranks are numbered host by host, as torchrun does."""
    if not os.environ.get("LOCAL_WORLD_SIZE"):
        return False
    on_each = local_ranks()
    return len({rank // on_each for rank in global_ranks(group)}) > 1


def read_regions(
    context: LoadContext, regions: Sequence[RegionRead], error: Exception | None = None
) -> None:
    """Read regions into their destinations, together with the load's group if there is one.

    Args:
        context: the load.
        regions: what this rank wants.
        error: what went wrong on this rank before; it is raised on every rank of the group.

    Raises:
        RanksError: another rank of the group failed.
        ChunkMissingError, ChunkCorruptError: as :meth:`StoredCheckpoint.read`.
    """
    stored, group = context.stored, context.group
    done = _expected(context.meter, regions)
    if group is None:
        if error is not None:
            raise error
        read_converting(stored.read, regions, budget_of(context), done)
        return
    what = f"loading {stored.location.url} together"
    exchange = None
    if error is None:
        try:
            exchange = _Exchange(stored, regions, group, context.budget_bytes, done)
        except Exception as problem:
            error = problem
    raise_together(error, group, what)
    assert exchange is not None
    exchange.run(what)


def _expected(meter: Meter | None, regions: Sequence[RegionRead]) -> ReadDone | None:
    """Tell a meter what is to come; returns what is to be told of regions that were read."""
    if meter is None:
        return None
    chunks = 0
    if meter.is_watched:
        chunks = sum(1 for region in regions for _ in chunk_parts(region))
    meter.expect(sum(region.out.nbytes for region in regions), chunks)
    return meter.add


@dataclass(frozen=True)
class _Chunk:
    number: int
    array: ArrayMeta
    index: tuple[int, ...]

    @property
    def box(self) -> Box:
        return self.array.grid.box(self.index)

    @property
    def size(self) -> int:
        """Bytes in a round's buffer."""
        return -(-self.box.size * dtypes.itemsize(self.array.dtype) // ALIGNMENT) * ALIGNMENT


@dataclass
class _Plan:
    """Who reads what: own chunks go straight to their place, shared ones in rounds."""

    alone: list[int] = field(default_factory=list)
    rounds: list[list[list[_Chunk]]] = field(default_factory=list)


class _Exchange:
    """One load of one rank of the group."""

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
        self._limit = max(1, min(ROUND_BYTES, budget_bytes // BUFFERS))
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
        wanted = np.array(sorted(self._parts), np.int64)
        everybodys, self._limit = _everybodys(
            wanted, self._limit, self._stored.location.url, self._group
        )
        plan = self._plan(everybodys)
        device = exchange_device(self._group)
        most = max((sum(c.size for c in r) for rs in plan.rounds for r in rs), default=0)
        received = np.empty(most, np.uint8)
        with ThreadPoolExecutor(1, thread_name_prefix="shardstore-read") as reader:
            alone = reader.submit(self._read_behind, plan.alone)
            coming = reader.submit(self._read_round, plan.rounds, 0)
            for number, by_rank in enumerate(plan.rounds):
                error, mine = None, np.empty(0, np.uint8)
                try:
                    mine = coming.result()
                except Exception as problem:
                    error = problem
                raise_together(error, self._group, what)
                coming = reader.submit(self._read_round, plan.rounds, number + 1)
                for rank, chunks in enumerate(by_rank):
                    size = sum(chunk.size for chunk in chunks)
                    if size:
                        buffer = mine if rank == self._rank else received[:size]
                        self._broadcast(buffer, rank, device)
                        self._scatter(buffer, chunks)
            error = None
            try:
                alone.result()
            except Exception as problem:
                error = problem
        raise_together(error, self._group, what)

    def _plan(self, wanted: Sequence[NDArray[np.int64]]) -> _Plan:
        """The same on every rank, but for what it reads alone."""
        plan = _Plan()
        if all(other is wanted[0] for other in wanted):
            holders = dict.fromkeys(wanted[0].tolist(), tuple(range(self._size)))
        else:
            found: dict[int, list[int]] = {}
            for rank, numbers in enumerate(wanted):
                for number in numbers.tolist():
                    found.setdefault(number, []).append(rank)
            holders = {number: tuple(ranks) for number, ranks in found.items()}
        loads = [0] * self._size
        shared: list[_Chunk] = []
        for number, ranks in holders.items():
            chunk = self._chunk(number)
            if len(ranks) > 1:
                shared.append(chunk)
            else:
                loads[ranks[0]] += chunk.size
                if ranks[0] == self._rank:
                    plan.alone.append(number)
        # Fewest candidates first, then the largest: the choice is free at the end.
        shared.sort(key=lambda c: (len(holders[c.number]), -c.size, c.number))
        by_rank: list[list[_Chunk]] = [[] for _ in range(self._size)]
        for chunk in shared:
            rank = min(holders[chunk.number], key=lambda r: (loads[r], r))
            loads[rank] += chunk.size
            by_rank[rank].append(chunk)
        plan.rounds = self._rounds(by_rank)
        return plan

    def _rounds(self, by_rank: Sequence[list[_Chunk]]) -> list[list[list[_Chunk]]]:
        cut = [self._batches(sorted(chunks, key=lambda c: c.number)) for chunks in by_rank]
        count = max(map(len, cut))
        return [[b[i] if i < len(b) else [] for b in cut] for i in range(count)]

    def _batches(self, chunks: Sequence[_Chunk]) -> list[list[_Chunk]]:
        """Cut into batches that fit into one of the buffers, or are a single chunk."""
        batches: list[list[_Chunk]] = []
        size = self._limit + 1
        for chunk in chunks:
            if size + chunk.size > self._limit:
                batches.append([])
                size = 0
            batches[-1].append(chunk)
            size += chunk.size
        return batches

    def _chunk(self, number: int) -> _Chunk:
        place = int(np.searchsorted(self._starts, number, side="right")) - 1
        meta = self._metas[place]
        return _Chunk(number, meta, meta.grid.index(number - int(self._starts[place])))

    def _read_behind(self, numbers: Sequence[int]) -> None:
        """Read in another thread: onto a device behind what the caller has queued there."""
        with behind(self._stream):
            self._read_alone(numbers)

    def _read_alone(self, numbers: Sequence[int]) -> None:
        reads, several = [], []
        for number in numbers:
            parts = self._parts[number]
            if len(parts) > 1:
                several.append(self._chunk(number))
                continue
            (part,) = parts
            corner = part.array.grid.box(part.index).offset
            offset = tuple(a + b for a, b in zip(corner, part.within.offset, strict=True))
            kind = CastRead if isinstance(part.out, torch.Tensor) else RegionRead
            reads.append(kind(part.array, Box(offset, part.within.shape), part.out))
        read_converting(self._stored.read, reads, self._limit, self._done)
        # Boxes of a flat range may meet in a chunk: it is read once all the same.
        for chunks in self._batches(several):
            self._scatter(self._read_whole(chunks), chunks)

    def _read_round(
        self, rounds: Sequence[Sequence[Sequence[_Chunk]]], number: int
    ) -> NDArray[np.uint8]:
        """This rank's chunks of a round, one after the other."""
        if number >= len(rounds):
            return np.empty(0, np.uint8)
        return self._read_whole(rounds[number][self._rank])

    def _read_whole(self, chunks: Sequence[_Chunk]) -> NDArray[np.uint8]:
        buffer = np.empty(sum(chunk.size for chunk in chunks), np.uint8)
        self._stored.read([RegionRead(c.array, c.box, v) for c, v in _views(buffer, chunks)])
        return buffer

    def _broadcast(self, buffer: NDArray[np.uint8], rank: int, device: torch.device) -> None:
        host = torch.from_numpy(buffer)
        wire = host.to(device) if device.type != "cpu" else host
        source = global_rank(self._group, rank)
        dist.broadcast(wire, src=source, group=self._group)
        if wire is not host and rank != self._rank:
            host.copy_(wire)

    def _scatter(self, buffer: NDArray[np.uint8], chunks: Sequence[_Chunk]) -> None:
        for chunk, view in _views(buffer, chunks):
            for part in self._parts.get(chunk.number, ()):
                where: tuple[Any, ...] = (..., *part.within.slices)
                if isinstance(part.out, torch.Tensor):
                    converted(part.out, view[where])
                else:
                    copy_bits(part.out, view[where])
                if self._done is not None:
                    self._done(part.out.nbytes, 1)


def _views(
    buffer: NDArray[np.uint8], chunks: Sequence[_Chunk]
) -> Iterator[tuple[_Chunk, NDArray[Any]]]:
    """Where in a round's buffer each chunk is."""
    position = 0
    for chunk in chunks:
        dtype, box = dtypes.numpy_dtype(chunk.array.dtype), chunk.box
        raw = buffer[position : position + box.size * dtype.itemsize]
        yield chunk, raw.view(dtype).reshape(box.shape)
        position += chunk.size


def _everybodys(
    wanted: NDArray[np.int64], limit: int, url: str, group: Any
) -> tuple[Sequence[NDArray[np.int64]], int]:
    """The chunks that each rank of the group wants, the same object where all want the same; and
    the smallest of all limits: ranks cut the same rounds."""
    size, device = group_size(group), exchange_device(group)
    digest = xxhash.xxh3_64_intdigest(wanted.tobytes() + url.encode()) >> 1
    mine = torch.tensor([digest, len(wanted), limit], dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    numbers = torch.stack(found).tolist()
    told = [(their_digest, count) for their_digest, count, _ in numbers]
    smallest: int = min(their_limit for _, _, their_limit in numbers)
    if len(set(told)) == 1:
        return [wanted] * size, smallest
    longest = max(count for _, count in told)
    padded = torch.zeros(longest, dtype=torch.int64)
    padded[: len(wanted)] = torch.from_numpy(wanted)
    padded = padded.to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    each = [t[:count].cpu().numpy() for t, (_, count) in zip(gathered, told, strict=True)]
    return each, smallest


Members: TypeAlias = range | tuple[int, ...]
"""Global numbers of a group's ranks: of most groups few bytes, however many ranks there are."""

Offer: TypeAlias = tuple[Members, str, bool] | None
"""A rank's group, its ``share_replicas``, and whether it would share; ``None``: it gave no group,
or one that it is no member of."""

_NAMED = 8


def offer(group: Any, share: str, shares: bool) -> Offer:
    """What this rank tells.

    Args:
        group: a process group, ``None`` for none.
        share: ``share_replicas``.
        shares: whether it would share.
    """
    members = () if group is None else global_ranks(group)
    return (members_of(members), share, shares) if members else None


def members_of(ranks: tuple[int, ...]) -> Members:
    """The shortest form of a group's ranks, the same for the same ranks."""
    if len(ranks) > 1 and ranks[0] < ranks[1]:
        regular = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if tuple(regular) == ranks:
            return regular
    return ranks


def agree(offers: Sequence[Offer], url: str) -> frozenset[Members]:
    """The groups that share nothing although some of their ranks would: by ``"auto"``, of which the
    others see no need. Called by the coordinator.

    Args:
        offers: by rank.
        url: of the checkpoint, for the error text.

    Raises:
        ArgumentError: a rank would share with others that did not give the same group, or that
            asked for something else.
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
    """What the ranks of a group told, those that told the same together."""
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
