"""Before ranks share their reading: whether all ranks of each group are about to.

Each rank tells, with the first report of a load, which group it gave and whether it would share;
the coordinator judges for all. A rank that shares waits for all of its group, so that one which
does not must be found before. Knows numbers of ranks, no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from shardstore.errors import ArgumentError
from shardstore.process_groups import global_ranks

__all__ = ["Members", "Offer", "agree", "members_of", "offer"]

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
