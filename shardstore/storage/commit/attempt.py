"""The interface of an attempt, in a folder or in an object store.

One process begins an attempt and commits it; the others join it. A place holds at most one
checkpoint. It may also hold attempts that are still being written, and attempts of dead processes,
which the next attempt removes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardstore.errors import CheckpointExistsError, CheckpointingException, StorageError
from shardstore.storage.commit.identity import what_else
from shardstore.storage.movers.chunks import SmallFiles
from shardstore.storage.movers.mover import Mover
from shardstore.storage.stores.location import Location


@dataclass(frozen=True, slots=True)
class Leftover:
    """The remains of one dead save: a dead attempt, or an upload that was never completed.

    Attributes:
        url: target of the attempt, or URL of the upload.
        objects: number of its objects or files.
        stored_bytes: their size in bytes; 0 for an upload, whose size the store does not report.
        kind: ``"attempt"`` or ``"upload"``.
    """

    url: str
    objects: int
    stored_bytes: int
    kind: str


DeadTarget = tuple[Location, Callable[[], list[str]]]
"""The target of a dead save, and a function that removes its remains and returns their URLs."""


class SupersededError(StorageError):
    """A newer attempt owns the target."""


def exists_error(
    place: Location, holds: str = "a checkpoint", *, meanwhile: bool = False
) -> CheckpointingException:
    """Return the error for a target that holds a checkpoint, or got one during the save."""
    what = (
        ": another process committed a checkpoint there while this one was being written (ranks "
        "that save one checkpoint need init_process_group())"
    )
    if not meanwhile:
        what = f" and holds {what_else(place) or holds}"
    text = f" already exists{what}; pass overwrite=True to replace it, or save elsewhere"
    return place.error(text, CheckpointExistsError)


@dataclass(frozen=True)
class Attempt(ABC):
    """An attempt to write a checkpoint.

    Attributes:
        target: the target of the save.
        id: unique name of the attempt, the same on all ranks.
    """

    target: Location
    id: str

    @property
    def location(self) -> Location:
        """The folder or prefix that this attempt is written to."""
        return self.target

    def check(self) -> None:  # noqa: B027 (no other attempt writes to this attempt's folder)
        """Raise :class:`SupersededError` if a newer attempt took the target over."""

    @abstractmethod
    def require_seen(self) -> None:
        """Check that this rank sees the coordinator's attempt. Every rank but the coordinator calls
        it before it writes.

        Raises:
            StorageError: this rank would write to another store or disk.
        """

    def announce(self, nodes: Iterable[str], rank: int) -> None:  # noqa: B027 (as above)
        """Store the names of this rank's arrays before it writes their chunks and documents in
        layout 1 directly to the target. Each rank calls it once.

        Raises:
            StorageError: the store failed.
        """

    def put_all(self, documents: SmallFiles) -> None:
        """Write small documents and objects of this attempt in parallel. Any rank may call it.

        Raises:
            StorageError: the store failed, or a newer attempt owns the target.
        """
        if documents:
            Mover.of(self.location, check=self.check).write((), lambda *_: None, documents)

    def flush(self) -> None:  # noqa: B027 (what a store acknowledged is durable)
        """Wait until everything that this rank wrote is durable."""

    @abstractmethod
    def commit(self, documents: SmallFiles, *, durable: bool) -> None:
        """Write the last documents. The last one of them commits the checkpoint. One process calls
        it.

        Raises:
            CheckpointExistsError: another save has committed a checkpoint there.
            StorageError: the store failed and the target is unchanged, or an object store gave no
                answer and the text says that the commit is uncertain.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Remove the attempt, unless the store may still carry out its commit. One process calls
        it, after all ranks have stopped writing."""
