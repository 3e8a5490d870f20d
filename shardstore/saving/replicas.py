"""Replicas share the writing: each rank of a group writes a part of the chunks that all of it hold.

The ranks' first agreement, which every save has anyway, tells whether the ranks of a group hold the
same shards and which of them the group answers for (one of its ranks is the main replica). From
there on each rank computes alone which chunks are its own. That each chunk is written exactly once
is proven by the manifests, as in every save. Groups whose ranks hold different shards are left as
they are: main replicas write.
"""

from __future__ import annotations

import heapq
import json
import pickle
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
import xxhash

from shardstore.errors import AccessPatternError
from shardstore.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardstore.storage.format.documents import ArrayMeta

__all__ = [
    "Copies",
    "SharedWrites",
    "agree",
    "check_written",
    "choose_tellers",
    "copies_of",
    "digest_of_copies",
    "offer",
    "share_out",
    "without_main_replica",
]

Index = tuple[int, ...]


@dataclass
class SharedWrites:
    """What a rank writes of the shards that its group shares.

    Attributes:
        position: this rank's number in the group.
        size: ranks in the group.
        shards: identities of the shards that the group answers for.
    """

    position: int
    size: int
    shards: frozenset[Hashable] = frozenset()
    _mine: dict[Hashable, frozenset[Index]] = field(default_factory=dict)

    def holds(self, tensor: ShardedTensor) -> bool:
        """Whether a tensor is one that the group shares."""
        return tensor.flattened_range is None and identity(tensor) in self.shards

    def plan(self, tensors: Iterable[tuple[ShardedTensor, ArrayMeta, Sequence[Index]]]) -> None:
        """Share the chunks of all shared tensors out; the same on every rank of the group.

        Args:
            tensors: each shared tensor with its array and the chunks that it covers.
        """
        chunks: list[tuple[int, Any, Index]] = []
        for tensor, meta, indices in tensors:
            name = identity(tensor)
            chunks += [(meta.chunk_bytes, name, index) for index in indices]
        mine: dict[Hashable, set[Index]] = {}
        for (_, name, index), owner in zip(
            chunks, share_out([size for size, _, _ in chunks], self.size), strict=True
        ):
            if owner == self.position:
                mine.setdefault(name, set()).add(index)
        self._mine = {name: frozenset(indices) for name, indices in mine.items()}

    def is_mine(self, tensor: ShardedTensor, index: Index) -> bool:
        """Whether this rank writes a chunk of a shared tensor."""
        return index in self._mine.get(identity(tensor), ())


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that each piece goes to: largest first, each to the rank with the least so far.

    Deterministic; the fullest rank has at most 4/3 of the least possible (Graham 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + sizes[number], rank))
        owners[number] = rank
    return owners


def identity(tensor: ShardedTensor) -> Hashable:
    """What tells a shard from all others: its key and its place."""
    return (tensor.key, tensor.global_offset)


def _shareable(tensors: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Shards that any holder could write alone, in an order of their own; each once."""
    found = {}
    for tensor in tensors:
        regular = tensor.flattened_range is None and tensor.axis_fragmentations is not None
        if regular and tensor.data is not None:
            name = identity(tensor)
            if name not in found or is_main_replica(tensor.replica_id):
                found[name] = tensor
    return [found[name] for name in sorted(found)]  # type: ignore[type-var]


def offer(tensors: Iterable[ShardedTensor], group: Any) -> bytes:
    """What this rank tells for the agreement: its group, what it holds, what it is main replica of.

    Args:
        tensors: all of this rank's sharded tensors.
        group: a process group; ``None``: no sharing.

    Returns:
        Nothing where there is nothing to share.
    """
    if group is None or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return b""
    members = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in members:
        return b""
    shared = _shareable(tensors)
    told = [
        (t.key, t.global_shape, t.global_offset, t.local_shape, t.axis_fragmentations, str(t.dtype))
        for t in shared
    ]
    digest = xxhash.xxh3_128(repr(told).encode()).digest()
    main = np.packbits(np.array([is_main_replica(t.replica_id) for t in shared], bool)).tobytes()
    return pickle.dumps((members, digest, main))


def agree(offers: Sequence[bytes]) -> dict[tuple[int, ...], bytes]:
    """Group -> which of its shards it answers for, of the groups whose ranks hold the same ones.

    Called by the coordinator, with the offers by rank.
    """
    by_group: dict[tuple[int, ...], list[tuple[bytes, bytes]]] = {}
    for told in offers:
        if told:
            members, digest, main = pickle.loads(told)
            by_group.setdefault(members, []).append((digest, main))
    found = {}
    for members, told_of in by_group.items():
        if len(told_of) != len(members) or len({digest for digest, _ in told_of}) != 1:
            continue
        bits = np.array([np.frombuffer(main, np.uint8) for _, main in told_of], np.uint8)
        mains = np.unpackbits(bits, axis=1).sum(axis=0)
        if bits.size and mains.max(initial=0) <= 1:  # two main replicas are an error to be found
            found[members] = np.packbits(mains.astype(np.uint8)).tobytes()
    return found


def accepted(
    tensors: Iterable[ShardedTensor],
    mine: bytes,
    agreed: Mapping[tuple[int, ...], bytes],
    rank: int,
) -> SharedWrites | None:
    """What follows from the agreement for this rank; ``None`` if its group shares nothing.

    Args:
        tensors: as given to :func:`offer`.
        mine: what :func:`offer` returned.
        agreed: what :func:`agree` returned.
        rank: this rank.
    """
    if not mine:
        return None
    members, _, _ = pickle.loads(mine)
    if members not in agreed:
        return None
    answered = np.unpackbits(np.frombuffer(agreed[members], np.uint8))
    shared = [t for t, bit in zip(_shareable(tensors), answered, strict=False) if bit]
    names = frozenset(identity(tensor) for tensor in shared)
    return SharedWrites(members.index(rank), len(members), names)


Copies = dict[str, list[str]]
"""``{"tensors": keys, "objects": unique keys}`` that a rank holds, and never as main replica."""


def copies_of(shards: Iterable[object], *, objects: bool) -> Copies:
    """What of a rank's shards it holds as a copy alone.

    Args:
        shards: of this rank; what is neither a sharded tensor nor a sharded object is left out.
        objects: whether those who write the objects note them in the manifest.
    """
    main: set[tuple[str, str]] = set()
    copied: set[tuple[str, str]] = set()
    for item in shards:
        if isinstance(item, ShardedTensor):
            name = ("tensors", item.key)
        elif isinstance(item, ShardedObject) and objects:
            name = ("objects", item.unique_key)
        else:
            continue
        (main if is_main_replica(item.replica_id) else copied).add(name)
    found: Copies = {}
    for kind, key in sorted(copied - main):
        found.setdefault(kind, []).append(key)
    return found


def digest_of_copies(copies: Copies) -> str:
    """Which copies, in 128 bits as text; empty for none."""
    if not copies:
        return ""
    return xxhash.xxh3_128_hexdigest(json.dumps(copies, sort_keys=True).encode())


def choose_tellers(digests: Sequence[str]) -> list[int]:
    """One rank for each set of copies that ranks hold: the first with each digest."""
    first: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        if digest:
            first.setdefault(digest, rank)
    return list(first.values())


def check_written(
    told: Mapping[int, Copies], tensors: Collection[str], objects: Collection[str]
) -> None:
    """Raise unless of everything that ranks hold copies of some rank wrote the original.

    Args:
        told: rank -> its copies, of the ranks that tell.
        tensors: keys that were written.
        objects: unique keys that were written.

    Raises:
        AccessPatternError: a tensor or object has no main replica on any rank.
    """
    for rank, copies in told.items():
        for kind, written in (("tensors", tensors), ("objects", objects)):
            lost = [key for key in copies.get(kind, ()) if key not in written]
            if lost:
                raise without_main_replica(lost, rank)


def without_main_replica(keys: Sequence[str], rank: int) -> AccessPatternError:
    """The error for what a rank holds copies of and no rank would write."""
    more = "" if len(keys) == 1 else f" (and {len(keys) - 1} more)"
    return AccessPatternError(
        f"Invalid access pattern: {keys[0]!r}{more} has no main replica on any rank, so that "
        f"nobody would write it; rank {rank} holds a copy; give exactly one rank's replica_id=0",
        key=keys[0],
        rank=rank,
    )
