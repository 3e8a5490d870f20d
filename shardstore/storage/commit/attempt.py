"""What a save needs of an attempt, whether it is a folder or lies in an object store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from shardstore.errors import StorageError
from shardstore.storage.stores.location import Location

__all__ = ["Attempt", "SupersededError"]


class SupersededError(StorageError):
    """A newer attempt owns the target."""


class Attempt(Protocol):
    """One try at writing a checkpoint."""

    @property
    def target(self) -> Location:
        """Where the checkpoint shall be."""

    @property
    def location(self) -> Location:
        """Where this attempt is written."""

    @property
    def id(self) -> str:
        """Its own name, agreed by all ranks."""

    @property
    def defers_documents(self) -> bool:
        """Whether it is written at its target, so that the documents of arrays, which others could
        open, have to wait until all manifests are checked."""

    def check(self) -> None:
        """Raise :class:`StorageError` if a newer attempt took the target over."""

    def require_seen(self) -> None:
        """Called by every other rank before it writes, with the attempt that the coordinator began.

        Raises:
            StorageError: it is not where this rank would write: another store, or another disk.
        """

    def announce(self, nodes: Iterable[str], rank: int) -> None:
        """Before chunks of layout 1 are written: leave word whose they are, where they lie at the
        target already. Called by each rank, once.

        Raises:
            StorageError: the store refused.
        """

    def put(self, name: str, data: bytes) -> None:
        """Write a small document or object of this attempt.

        Raises:
            StorageError: the store refused, or a newer attempt took the target over.
        """

    def put_all(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Write many, in parallel where that helps; errors as :meth:`put`."""

    def flush(self) -> None:
        """Wait until what this rank wrote is durable."""

    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents, the one that commits last of all. Called by one process.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused; the target is as it was. Or an object store did not
                say whether it committed, which the text says then.
        """

    def abandon(self) -> None:
        """Give up. Called by one process, once all have stopped writing. Nothing goes where the
        commit may still come."""
