"""Decide which replica groups share the reading of a load."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from shardstore.distributed.groups import Group, Members, first_of, global_ranks
from shardstore.errors import ArgumentError
from shardstore.storage.runtime.parallel import local_ranks
from shardstore.storage.stores.location import Location

Offer: TypeAlias = tuple[Members, str, bool] | None
"""A rank's group, its ``share_replicas``, and whether it wants to share. ``None``: it gave no
group, or is not a member of it."""


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
    return ranks, share, shares and len(ranks) > 1


def agree(offers: Mapping[int, Offer], url: str) -> frozenset[Members]:
    """Return the groups that do not share, because with ``"auto"`` some of their ranks do not want
    it. The coordinator calls it.

    Args:
        offers: by rank; a rank of a group that does not load has none.
        url: URL of the checkpoint, for the error text.

    Raises:
        ArgumentError: a rank would share, and another rank of its group gave another group or
            another ``share_replicas``.
    """
    apart: set[Members] = set()
    for members in dict.fromkeys(told[0] for told in offers.values() if told and told[2]):
        theirs = [offers.get(rank) for rank in members]
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
    return f"[{first_of(ranks, between=', ')}]"
