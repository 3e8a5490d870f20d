"""Attempt and commit on a local or shared file system: a hidden folder, and one rename.

An attempt is a hidden folder beside its target, ``.NAME.attempt-ID``; publishing is one rename,
onto nothing or onto an empty folder, or one atomic exchange with the checkpoint that is replaced
(``renameat2(RENAME_EXCHANGE)``, Linux man-pages rename(2)), which stays readable until then. A
reader never sees a folder that is being written. A note says whose an attempt is: those whose
process is gone are swept by the next attempt at the same target.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.commit.attempt import Attempt, exists_error
from shardstore.storage.commit.inventory import (
    COMMITS,
    deletion_rounds,
    known_nodes,
    names_at,
    own_names,
)
from shardstore.storage.movers.files import sync_file_system
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["FolderAttempt", "begin", "delete", "is_dead", "join", "remove_attempt", "sweep"]

OWNER_NAME = ".owner.json"
SEEN_S, POLL_S = 90.0, 0.2
"""For how long a folder is waited for that another machine has just made."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def _is_taken(place: Location) -> bool:
    """Return whether anything with a checkpoint's marks is at a local place: nothing may lie there
    that a save writes over unasked."""
    return any(place.exists(name) for name in COMMITS)


@dataclass(frozen=True)
class FolderAttempt(Attempt):
    """One try at writing a checkpoint to a local or shared file system."""

    @property
    def location(self) -> Location:
        """The attempt's folder."""
        parent, name = os.path.split(self.target.url)
        return Location.of(f"{parent}/.{name}.attempt-{self.id}")

    def require_seen(self) -> None:
        """See :meth:`Attempt.require_seen`. A network file system may show what another machine
        made half a minute late."""
        deadline = time.monotonic() + SEEN_S
        while not self.location.exists(OWNER_NAME):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self.location.url}, which the coordinator of this save made, is not seen on "
                    f"{socket.gethostname()}: {self.target.url} is not on a file system that all "
                    "ranks share; save to one that is, or to an object store",
                    url=self.target.url,
                )
            time.sleep(POLL_S)

    def put(self, name: str, data: bytes) -> None:
        """Write a document. Errors as :meth:`Location.write`."""
        self.location.write(name, data)

    def flush(self) -> None:
        """Wait until what this rank wrote is on the disk."""
        sync_file_system(self.location)

    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents in order, and put the attempt in its target's place in one
        atomic step. Called by one process.

        Args:
            documents: names and contents.
            durable: wait until all of it is on the disk.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused; the target is as it was.
        """
        self.put_all(documents)
        if durable:
            self.flush()
        source, target = self.location.url, self.target.url
        with store_errors("committing", target):
            replaced = os.path.isdir(target) and bool(os.listdir(target))
            if replaced:
                self._replace()
            else:
                try:
                    os.rename(source, target)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    raise exists_error(self.target, meanwhile=True) from None
            if durable:
                _fsync(os.path.dirname(target))
        try:
            if replaced:
                self._remove_replaced()
            else:
                os.unlink(f"{target}/{OWNER_NAME}")
        except OSError as error:
            logger.warning(
                "%s is committed, but what it replaced could not be removed: %s", target, error
            )

    def _replace(self) -> None:
        source, target = self.location.url, self.target.url
        if not self.overwrite and _is_taken(self.target):
            raise exists_error(self.target, meanwhile=True)
        _exchange(source, target)
        if not self.overwrite and _is_taken(self.location):
            # Committed by another process between the look and the exchange.
            _exchange(source, target)
            raise exists_error(self.target, meanwhile=True)

    def _remove_replaced(self) -> None:
        """What is no checkpoint's (a log, a config) stays where its owner put it."""
        source, target = self.location.url, self.target.url
        ours = _own_entries(self.location)
        for name in os.listdir(source):
            if name not in ours and not os.path.lexists(f"{target}/{name}"):
                os.rename(f"{source}/{name}", f"{target}/{name}")
        # From here on the next attempt may sweep it, should this process die on the way.
        os.rename(f"{target}/{OWNER_NAME}", f"{source}/{OWNER_NAME}")
        remove_attempt(self.location)

    def abandon(self) -> None:
        """Remove what was written; the target is as it was. Called by one process, once all have
        stopped writing."""
        # Without its owner's note it is what a commit replaced, perhaps with files of others.
        if self.location.exists(OWNER_NAME):
            with contextlib.suppress(StorageError):
                remove_attempt(self.location)


def remove_attempt(attempt: Location) -> None:
    """Remove an attempt: the commit first, so that no reader opens what is half gone, the owner's
    note last, so that the next attempt sweeps the rest if this process dies on the way."""
    for name in (*COMMITS, *attempt.listing()):
        if name != OWNER_NAME:
            attempt.delete(name)
    attempt.delete()


def delete(place: Location) -> None:
    """Delete a checkpoint: its commit first. Foreign files, and then the folder, stay.

    Where all of it is ours it goes in one step to the name of an attempt, which the next save or
    sweep clears if this process dies on the way. Of a symbolic link the link alone is removed.
    """
    if os.path.islink(place.url):
        place.delete()
        return
    ours = _own_entries(place)
    if ours.issuperset(place.listing()):
        doomed = FolderAttempt(place, f"{_fresh_id()}.deleted").location
        try:
            place.write(OWNER_NAME, owner_note())
            os.rename(place.url, doomed.url)
        except OSError:  # a full disk, a mount point
            pass
        else:
            remove_attempt(doomed)
            return
    for names in deletion_rounds({*ours, OWNER_NAME}, 1):
        place.delete(names[0])
    if not place.listing():
        place.delete()


def _own_entries(place: Location) -> set[str]:
    """Return the names of the files and folders directly below a checkpoint that are parts of it.

    Zarr arrays and groups of other programs, which may lie there too, are none.
    """
    names = names_at(place)
    own = own_names(names, *known_nodes(place, names))
    return {name.partition("/")[0] for name in own} | {OWNER_NAME}.intersection(names)


def begin(place: Location, *, overwrite: bool = False) -> FolderAttempt:
    """Begin an attempt at a target. Called by one process, the coordinator.

    Args:
        place: the target.
        overwrite: a checkpoint that is there may be replaced.

    Raises:
        CheckpointExistsError: a checkpoint, or a file, is there and may not be replaced.
        StorageError: the folder cannot be created.
    """
    target = Location.of(os.path.realpath(place.url))
    there = target.exists()
    if there and not target.is_dir():
        raise CheckpointExistsError(
            f"{target.url} is a file; give a folder's path to save to", url=target.url
        )
    wrong = ""
    if os.path.ismount(target.url):
        wrong = "a mount point, which nothing can take the place of in one step"
    elif there and os.path.samefile(target.url, os.curdir):
        wrong = "the working directory, which would be replaced under this process"
    if wrong:
        raise StorageError(f"{target.url} is {wrong}; save to a folder below it", url=target.url)
    if _is_taken(target) and not overwrite:
        raise exists_error(target)
    sweep(target)
    attempt = FolderAttempt(target, _fresh_id(), overwrite)
    location = attempt.location
    # Under another name until its owner's note is there: an attempt without one is a dead one's
    # last remains.
    fresh = Location.of(f"{location.url}.begin")
    with store_errors("creating", location.url):
        os.makedirs(fresh.url)
        fresh.write(OWNER_NAME, owner_note())
        os.rename(fresh.url, location.url)
    return attempt


def join(place: Location, attempt_id: str, *, overwrite: bool = False) -> FolderAttempt:
    """Return the attempt that the coordinator began, on another rank."""
    return FolderAttempt(Location.of(os.path.realpath(place.url)), attempt_id, overwrite)


def sweep(target: Location) -> list[str]:
    """Remove attempts at a target whose process is gone; those of other hosts are left alone.
    Returns their paths."""
    parent, name = os.path.split(target.url)
    swept = []
    for entry in Location.of(parent).listing():
        attempt = Location.of(f"{parent}/{entry}")
        if entry.startswith(f".{name}.attempt-") and is_dead(attempt):
            with contextlib.suppress(StorageError):
                remove_attempt(attempt)
                swept.append(attempt.url)
    return swept


def _fresh_id() -> str:
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def owner_note() -> bytes:
    """What tells whose an attempt is: this process's."""
    pid = os.getpid()
    return json.dumps({**_host(), "pid": pid, "started": _start_of(pid)}).encode()


def _host() -> dict[str, object]:
    """What tells this machine, boot and pid namespace from any other."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "pids": namespace}


def _start_of(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, which tells it from a later one of the
    same number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return fields[19] if fields[0] not in "ZX" else None


def is_dead(attempt: Location) -> bool:
    """Return whether the process of an attempt ran on this host and is gone. A symbolic link is no
    attempt."""
    if os.path.islink(attempt.url):
        return False
    if attempt.is_dir() and not attempt.listing():
        return not attempt.name.endswith(".begin")
    try:
        owner = json.loads(attempt.read(OWNER_NAME))
        here = {name: owner.get(name) for name in ("host", "boot", "pids")} == _host()
        return here and _start_of(int(owner["pid"])) != owner["started"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _exchange(source: str, target: str) -> None:
    """Swap two folders atomically; where the file system cannot, in two renames with a moment
    without a target."""
    if hasattr(_libc, "renameat2"):
        paths = (os.fsencode(source), os.fsencode(target))
        if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), source)
    aside = f"{source}.replaced"
    os.rename(target, aside)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, source)


def _fsync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
