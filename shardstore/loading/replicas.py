"""Decide which replica groups share the reading of a load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardstore.distributed.groups import Group, global_ranks
from shardstore.errors import ArgumentError
from shardstore.storage.movers.parallel import local_ranks
from shardstore.storage.stores.location import Location

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
        group = told and f"the group of ranks {_shown(told[0])} with share_replicas={told[1]!r}"
        yield f"rank(s) {_shown(same)} gave {group or 'none'}"


def _shown(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:_NAMED]))
    return f"[{first}, and {len(ranks) - _NAMED} more]" if len(ranks) > _NAMED else f"[{first}]"
