"""Decide which replica groups share the reading of a load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardstore.distributed.groups import Group, Members, first_of, global_ranks
from shardstore.errors import ArgumentError
from shardstore.storage.runtime.parallel import local_ranks
from shardstore.storage.stores.location import Location

SHARES = ("auto", "always", "never")
"""Values of ``share_replicas``."""


class ReadGroup(NamedTuple):
    """A rank's report about its group.

    Attributes:
        members: the global ranks of the group.
        share: the ``share_replicas`` of the rank.
        shares: whether the rank wants to share.
    """

    members: Members
    share: str
    shares: bool


def read_group(group: Group, share: str, place: Location) -> ReadGroup | None:
    """Return this rank's report about its group for the coordinator; ``None`` if it is not in it.

    Args:
        group: the group, ``None`` for none.
        share: ``"always"``, ``"never"`` or ``"auto"``: share if the checkpoint is in an object
            store or the group spans hosts. For a local disk on one host, reading from the page
            cache is faster than sending.
        place: the checkpoint.
    """
    ranks = () if group is None else global_ranks(group)
    if not ranks:
        return None
    # Launchers set the number of ranks per host (``LOCAL_WORLD_SIZE``), and number ranks by host.
    of_host = local_ranks() if os.environ.get("LOCAL_WORLD_SIZE") else 0
    is_far = not place.is_local or len({rank // of_host for rank in ranks if of_host}) > 1
    shares = share == "always" or (share == "auto" and is_far)
    return ReadGroup(ranks, share, shares and len(ranks) > 1)


def groups_reading_alone(reports: Mapping[int, ReadGroup | None], url: str) -> frozenset[Members]:
    """Return the groups that do not share, because with ``"auto"`` some of their ranks do not want
    it. The coordinator calls it.

    Args:
        reports: by rank; a rank of a group that does not load has none.
        url: URL of the checkpoint, for the error text.

    Raises:
        ArgumentError: a rank would share, and another rank of its group gave another group or
            another ``share_replicas``.
    """
    alone: set[Members] = set()
    for members in dict.fromkeys(one.members for one in reports.values() if one and one.shares):
        theirs = [reports.get(rank) for rank in members]
        if all(one is not None and one.members == members and one.shares for one in theirs):
            continue
        if any(one is None or (one.members, one.share) != (members, "auto") for one in theirs):
            listed = ", ".join(_listed(members, theirs))
            raise ArgumentError(
                f"loading {url}: {listed}; the ranks of a replica_group share their reading, so "
                "give the same group and share_replicas on each of them, or none",
                url=url,
            )
        alone.add(members)
    return frozenset(alone)


def _listed(members: Members, theirs: Sequence[ReadGroup | None]) -> Iterator[str]:
    """Yield descriptions of the ranks' reports; ranks with equal reports are named together."""
    ranks: dict[ReadGroup | None, list[int]] = {}
    for rank, one in zip(members, theirs, strict=True):
        ranks.setdefault(one, []).append(rank)
    for one, same in ranks.items():
        group = one and f"the group of ranks {_list(one.members)} with share_replicas={one.share!r}"
        yield f"rank(s) {_list(same)} gave {group or 'none'}"


def _list(ranks: Sequence[int]) -> str:
    return f"[{first_of(ranks, between=', ')}]"
