"""Divide the writing among replicas.

At the beginning of a save, the ranks of a group report a digest of their shards, and which shards
have their main replica on this rank. Each rank then computes which chunks it writes. As in every
save, the manifests prove that each chunk is written exactly once. If the ranks of a group hold
different shards, the main replicas write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import xxhash

from shardstore.distributed.groups import Members, global_ranks
from shardstore.dtensor.layout import is_claimed
from shardstore.exchange_utils import distribute_shards_to_ranks
from shardstore.mapping import ShardedTensor, is_main_replica
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box

Index = tuple[int, ...]
Shard = tuple[str, tuple[int, ...]]
"""Key and global offset."""


@dataclass(frozen=True)
class SharedWrites:
    """The shards that the ranks of a group divide.

    Attributes:
        position: number of this rank in the group.
        size: number of ranks in the group.
        shards: shards that have their main replica in the group.
    """

    position: int = 0
    size: int = 1
    shards: frozenset[Shard] = frozenset()

    def holds(self, tensor: ShardedTensor) -> bool:
        """Return whether the group divides the chunks of a tensor."""
        return tensor.flattened_range is None and identity(tensor) in self.shards

    def own_chunks(self, shards: Mapping[Shard, tuple[ArrayMeta, Box]]) -> set[tuple[Shard, Index]]:
        """Return the chunks that this rank writes, by shard and index.

        Args:
            shards: shards of the group, each with its array and its box.
        """
        sizes = {
            (shard, index): meta.chunk_bytes
            for shard, (meta, box) in shards.items()
            for index in (meta.grid.overlapping(box) if box.size else ())
        }
        everyone = list(range(self.size))
        candidates = dict.fromkeys(sizes, everyone)
        owners = distribute_shards_to_ranks(candidates, sizes, self.size, set())
        return {chunk for chunk, owner in owners.items() if owner == self.position}


def identity(tensor: ShardedTensor) -> Shard:
    """Return the identity of a shard: its key and its offset."""
    return (tensor.key, tensor.global_offset)


class GroupReport(NamedTuple):
    """A rank's report about its group.

    Attributes:
        members: global ranks of the group.
        digest: digest of the shards that the rank holds.
        main: one bit per shard: whether the rank holds its main replica. Claimed shards have none.
    """

    members: Members
    digest: bytes
    main: int


def _shareable(tensors: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """Return the distinct shards that any holder can write alone, sorted."""
    found: dict[Shard, ShardedTensor] = {}
    for tensor in tensors:
        regular = tensor.flattened_range is None and tensor.axis_fragmentations is not None
        if regular and tensor.data is not None:
            name = identity(tensor)
            if name not in found or is_main_replica(tensor.replica_id):
                found[name] = tensor
    return [found[name] for name in sorted(found)]


def report_group(tensors: Iterable[ShardedTensor], group: Any) -> GroupReport | None:
    """Return this rank's report about its group.

    Args:
        tensors: all sharded tensors of this rank.
        group: a process group; ``None``: no sharing.

    Returns:
        ``None`` if there is nothing to share.
    """
    members = () if group is None else global_ranks(group)
    if len(members) < 2:
        return None
    shared = _shareable(tensors)
    described = [
        (t.key, t.global_shape, t.global_offset, t.local_shape, t.axis_fragmentations, str(t.dtype))
        for t in shared
    ]
    digest = xxhash.xxh3_128(repr(described).encode()).digest()
    is_main = [is_main_replica(t.replica_id) and not is_claimed(t) for t in shared]
    return GroupReport(
        members, digest, sum(1 << number for number, main in enumerate(is_main) if main)
    )


def agree_on_groups(reports: Iterable[GroupReport | None]) -> dict[Members, int]:
    """Return group -> one bit per shard (whether the group writes it), for groups whose ranks hold
    the same shards.

    The coordinator calls it with the reports of all ranks.
    """
    groups: dict[Members, list[GroupReport]] = {}
    for one in reports:
        if one is not None:
            groups.setdefault(one.members, []).append(one)
    found = {}
    for members, of_group in groups.items():
        if len(of_group) != len(members) or len({one.digest for one in of_group}) != 1:
            continue
        written = reduce(or_, (one.main for one in of_group))
        # Two main replicas are an error, found at the commit.
        if written.bit_count() == sum(one.main.bit_count() for one in of_group):
            found[members] = written
    return found


def accepted(
    tensors: Iterable[ShardedTensor], group: Any, agreed: Mapping[Members, int], rank: int
) -> SharedWrites:
    """Return the shards that this rank's group divides, if there are any.

    Args:
        tensors: the argument of :func:`report_group`, with claims applied.
        group: the argument of :func:`report_group`.
        agreed: the result of :func:`agree_on_groups`.
        rank: this rank.
    """
    members = () if group is None else global_ranks(group)
    if members not in agreed:
        return SharedWrites()
    shared = frozenset(
        identity(tensor)
        for number, tensor in enumerate(_shareable(tensors))
        if agreed[members] >> number & 1 or (is_claimed(tensor) and tensor.writer in members)
    )
    return SharedWrites(members.index(rank), len(members), shared)
