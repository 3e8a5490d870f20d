"""Begin, find and delete checkpoints on disks and in object stores, and sweep dead attempts.

A place holds a checkpoint if the document that commits it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from shardstore.errors import CheckpointExistsError, NotACheckpointError, StorageError
from shardstore.storage.checkpoint import settled
from shardstore.storage.commit import folder, identity, objects
from shardstore.storage.commit.attempt import Attempt, DeadTarget, Leftover
from shardstore.storage.options import SaveOptions, require_bool, require_duration
from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix

P = TypeVar("P", bound=Location, contravariant=True)


class Commits(Protocol[P]):
    """How attempts begin and end, in folders (:mod:`.folder`) or in object stores
    (:mod:`.objects`). The functions of this module say what each does."""

    def begin(self, place: P, options: SaveOptions) -> Attempt: ...

    def join(self, place: P, attempt_id: str, options: SaveOptions) -> Attempt: ...

    def resumed(self, place: P, attempt_id: str, options: SaveOptions) -> Attempt | None: ...

    def delete(self, place: P) -> None: ...

    def dead_targets(self, root: P, older_than: timedelta) -> Iterator[DeadTarget]: ...

    def sweep_below(self, place: P, older_than: timedelta, dry_run: bool) -> list[Leftover]: ...


_COMMITS: Mapping[type[Location], Commits[Any]] = {LocalFolder: folder, ObjectPrefix: objects}


def begin(place: Location, options: SaveOptions, nodes: Iterable[str] = ()) -> Attempt:
    """Begin an attempt at a place. The coordinator calls it. ``nodes``: the names of the arrays, as
    far as they are known.

    Raises:
        CheckpointExistsError: the place is an array or a file, or holds a checkpoint and
            ``overwrite`` is false; or another program's folder has the name of an array.
        StorageError: the store failed.
    """
    if options.overwrite and identity.node_type(place) == "array":
        raise place.error(
            " is a single array, not a checkpoint, and is not overwritten: give the folder of a "
            "checkpoint, or save elsewhere",
            CheckpointExistsError,
        )
    if isinstance(place, LocalFolder):
        return folder.begin(place, options, nodes=nodes)
    return _COMMITS[type(place)].begin(place, options)


def join(place: Location, attempt_id: str, options: SaveOptions) -> Attempt:
    """Return the attempt that the coordinator began. Every other rank calls it."""
    return _COMMITS[type(place)].join(place, attempt_id, options)


def resumed(place: Location, attempt_id: str, options: SaveOptions) -> Attempt | None:
    """Take over the attempt of a dead process, so that this process continues it. Return ``None``
    if the attempt has been swept, or no longer owns its target."""
    return _COMMITS[type(place)].resumed(place, attempt_id, options)


def dead_targets(
    root: Location, older_than: timedelta = folder.DEFAULT_AGE
) -> Iterator[DeadTarget]:
    """Yield the targets directly below a root that may hold remains of dead saves, each with a
    function that removes them. ``older_than``: as for :func:`sweep`.

    Raises:
        StorageError: the store failed.
    """
    return _COMMITS[type(root)].dead_targets(root, older_than)


def sweep(
    root: str | os.PathLike[str] | Location,
    *,
    dry_run: bool = True,
    older_than: timedelta = folder.DEFAULT_AGE,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Leftover]:
    """List the remains of dead saves below a root, and remove them if asked to. One process calls
    it.

    Committed checkpoints and files of other programs stay. In an object store, the sweep claims a
    target before it clears it. A save that is still running there then fails and does not commit
    missing chunks. On local disks, the sweep finds remains of dead processes of this host at any
    age, and moves files of other programs in them back to the target's folder.

    Args:
        root: folder or URL.
        dry_run: only list the remains.
        older_than: keep remains with a write within this time (by the store's clock). On local
            disks, this holds for those of other hosts.
        storage_options: options of an object store.

    Returns:
        The remains. Unless ``dry_run`` is set, they have been removed.

    Raises:
        ArgumentError: ``older_than`` is no timedelta, or ``dry_run`` no bool.
        StorageError: the store failed.
    """
    require_bool("dry_run", dry_run)
    require_duration("older_than", older_than)
    place = Location.of(root, storage_options)
    place.require_no_file()
    return _COMMITS[type(place)].sweep_below(place, older_than, dry_run)


def latest(
    root: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return the committed checkpoint directly below a root whose name has the highest numbers
    (``step-1000`` after ``step-200``); ``None`` if there is none. Any process may call it.

    It compares only the names. If a training run went back to an earlier step, use
    :meth:`CheckpointManager.latest`.

    Raises:
        ArgumentError: the root is a checkpoint itself, without others below it.
        StorageError: the root is a file, or the store failed.
    """
    place = Location.of(root, storage_options)
    names = place.listing()
    numbered = sorted((([*map(int, re.findall(r"\d+", one))], one) for one in names), reverse=True)
    for numbers, name in numbered:
        try:
            if not name.startswith(".") and identity.is_checkpoint(place.child(name)):
                return place.child(name).url
        except StorageError:
            if numbers:  # others are no steps, such as lost+found, which only root may read
                raise
    identity.require_root(place, names, [name for numbers, name in numbered if numbers])
    return None


def delete_checkpoint(
    place: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Delete a checkpoint. One process calls it.

    It deletes the commit first, so that no reader opens a half-deleted checkpoint. Files of other
    programs stay. If the place is a symbolic link, only the link is removed. In an object store, it
    first claims the place, as a save does. If a deletion and a save run at the same time, the one
    with the later claim continues.

    Raises:
        NotACheckpointError: the place holds no checkpoint; nothing was deleted.
        StorageError: the store failed, or another process claimed the place before anything was
            deleted.
    """
    location = settled(Location.of(place, storage_options))
    require_checkpoint(location)
    _COMMITS[type(location)].delete(location)


def require_checkpoint(location: Location) -> None:
    """Raise :class:`NotACheckpointError` if a place holds no checkpoint to delete."""
    if not identity.is_checkpoint(location):
        other = identity.what_else(location)
        found = f"is {other}, not a checkpoint" if other else "is not a checkpoint"
        raise location.error(f" {found}; nothing was deleted", NotACheckpointError)


class CheckpointStorage:
    """Path operations on disks and object stores, for trainers whose managers name places by
    strings: torchtitan's ``CheckpointStorage``.

    Args:
        storage_options: options of an object store, see :func:`shardstore.save`.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._options = storage_options

    def at(self, path: str) -> Location:
        """Return the location of a path or URL."""
        return Location.of(path, self._options)

    def isdir(self, path: str) -> bool:
        """Return whether there is a folder, or a prefix with objects below it."""
        place = self.at(path)
        return place.is_dir() if place.is_local else bool(place.listing())

    def isfile(self, path: str) -> bool:
        """Return whether there is a file or an object of this name, with nothing below it."""
        return self.at(path).exists() and not self.isdir(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names directly below a folder or prefix; empty if there is none."""
        return self.at(path).listing()

    def remove(self, path: str) -> None:
        """Delete a folder or prefix with everything below it; the commit of a checkpoint first, so
        that no reader opens a half-deleted one.

        Raises:
            StorageError: the store failed, or a save of another process runs there.
        """
        place = self.at(path)
        if identity.is_checkpoint(place):
            delete_checkpoint(place)
        place.delete()
