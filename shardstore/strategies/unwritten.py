"""Keys that only replicas hold: which of them no rank wrote.

Of such a key no rank has the main replica, so that no manifest speaks of it and the checkpoint
would lack it without a word. Each rank names the keys of which it holds copies alone; ranks that
name the same keys (the replicas of one model part) are known by a digest from the first agreement
of the save, so that one of them tells the names for all. Pure: knows sharded tensors and objects,
nothing of files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

import xxhash

from shardstore.errors import AccessPatternError
from shardstore.mapping import ShardedObject, ShardedTensor, is_main_replica

__all__ = [
    "Copies",
    "check_written",
    "choose_tellers",
    "copies_of",
    "digest_of_copies",
    "without_main_replica",
]

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
