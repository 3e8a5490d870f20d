"""What a save needs of an attempt, whether it is a folder or lies in an object store.

One process begins an attempt and commits it; the others join it. A place holds a checkpoint or
none, and beside that attempts, each of which is being written, committed (then it is the
checkpoint), or remains of a dead one, which the next attempt clears.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.stores.location import Location


class SupersededError(StorageError):
    """A newer attempt owns the target.

    Attributes:
        by: that attempt, in words.
    """

    by = ""


def exists_error(place: Location, *, meanwhile: bool = False) -> CheckpointExistsError:
    """Return the error for a target that holds a checkpoint, or got one during the save."""
    what = (
        "another checkpoint was committed there while this one was being written;"
        if meanwhile
        else "and holds a checkpoint;"
    )
    return CheckpointExistsError(
        f"{place.url} already exists{':' if meanwhile else ''} {what} pass overwrite=True to "
        "replace it, or save elsewhere",
        url=place.url,
    )


@dataclass(frozen=True)
class Attempt(ABC):
    """One try at writing a checkpoint.

    Attributes:
        target: where the checkpoint shall be.
        id: its own name, agreed by all ranks.
        overwrite: whether a checkpoint at the target may be replaced.
        defers_documents: whether it is written at its target, so that the documents of arrays,
            which others could open, have to wait until all manifests are checked.
    """

    target: Location
    id: str
    overwrite: bool = False
    defers_documents: ClassVar[bool] = False

    @property
    @abstractmethod
    def location(self) -> Location:
        """Where this attempt is written."""

    def check(self) -> None:  # noqa: B027 (nobody else writes to a folder of an attempt)
        """Raise :class:`SupersededError` if a newer attempt took the target over."""

    @abstractmethod
    def require_seen(self) -> None:
        """Called by every other rank before it writes, with the attempt that the coordinator began.

        Raises:
            StorageError: it is not where this rank would write: another store, or another disk.
        """

    def announce(self, nodes: Iterable[str], rank: int) -> None:  # noqa: B027 (as above)
        """Before chunks of layout 1 are written: leave word whose they are, where they lie at the
        target already. Called by each rank, once.

        Raises:
            StorageError: the store failed.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small document or object of this attempt. Any rank may call it.

        Raises:
            StorageError: the store refused, or a newer attempt took the target over.
        """

    def put_all(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Write many, in parallel where that helps; errors as :meth:`put`."""
        for name, data in documents:
            self.put(name, data)

    def flush(self) -> None:  # noqa: B027 (what a store acknowledged is durable)
        """Wait until what this rank wrote is durable."""

    @abstractmethod
    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents, the one that commits last of all. Called by one process.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused; the target is as it was. Or an object store did not
                say whether it committed, which the text says then.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Give up. Called by one process, once all have stopped writing. Nothing goes where the
        commit may still come."""
