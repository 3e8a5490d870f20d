"""Deleting a checkpoint in an object store, under a claim of its own.

The names that a deletion takes are those that the next save to the place writes. So it claims the
place as a save does (:mod:`object_commit`): it waits for older attempts to settle, leaves a mark
that newer ones wait for, and looks at the claims before each round of requests. Of a deletion and
a save at the same time the one that claimed later goes on, and the other takes nothing of its.
"""

from __future__ import annotations

import contextlib
import logging

from shardstore.errors import StorageError
from shardstore.storage.commit.claims import ATTEMPTS, DELETING
from shardstore.storage.commit.inventory import deletion_rounds, known_nodes, leftovers
from shardstore.storage.commit.objects import claimed, settled_names
from shardstore.storage.movers.parallel import run_together
from shardstore.storage.stores.location import Location

__all__ = ["delete_all"]

logger = logging.getLogger(__name__)


def delete_all(place: Location) -> None:
    """Delete a checkpoint, its commit first; foreign objects stay. Called by one process.

    Until all is gone there are two marks. One has the number of the claim: newer attempts wait for
    it. The other one has none, and stays also where the store refuses: it tells the sweeper what is
    left.

    Raises:
        StorageError: the store refused; or the place was claimed anew before anything was deleted.
            Where that happens later, what is left is cleared by whoever claimed it.
    """
    store = place.remote
    attempt = claimed(place)
    claim, mark = (f"{ATTEMPTS}/{attempt.number:06d}.{kind}" for kind in ("json", "clearing"))
    begun = finished = False
    try:
        names = [name for name in settled_names(attempt) if name != claim]
        own = leftovers(names, known_nodes(place, names))
        run_together(
            lambda: store.write(mark, attempt.id.encode()), lambda: store.write(DELETING, b"")
        )
        for some in deletion_rounds(own, store.deletes_at_once):
            by = attempt.outbid_by()
            if by is not None and not begun:
                raise StorageError(
                    f"{place.url} was not deleted: meanwhile the place was claimed by {by}. Delete "
                    "it again once that one is done",
                    url=place.url,
                )
            if by is not None:
                logger.warning(
                    "%s: deleted; what is left of its data is cleared by %s", place.url, by
                )
                return
            begun = True
            store.delete(some)
        finished = True
    finally:
        if finished:
            attempt.withdraw_all()
        else:
            with contextlib.suppress(StorageError):
                store.delete([mark] if begun else [mark, DELETING])
                attempt.withdraw()
