"""Attempt and commit on a local or shared file system: a hidden folder, and one rename.

An attempt is a hidden folder beside its target, ``.NAME.attempt-ID``. The commit is one rename to a
new name or onto an empty folder, or one atomic exchange with the replaced checkpoint
(``renameat2(RENAME_EXCHANGE)``, Linux man-pages rename(2)), which stays readable until then. A
reader never sees a folder that is being written.

The ID names the process of the folder, so that the next save and the sweeper find the remains of
dead processes. A folder with the mark of its own ID is an attempt, and all of it can be removed.
Without the mark, it is a checkpoint that a commit replaced or a deletion renamed; files in it that
are not part of the checkpoint (a log, a config) first go back to the target.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
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
from shardstore.storage.stores.location import Location, fsync, store_errors

OWNER_NAME = ".owner.json"
"""Name of the mark in a folder; its content is the last part of an ID."""
DEFAULT_AGE = timedelta(days=1)
"""Time without writes after which an attempt of another host counts as dead."""
SEEN_S, POLL_S = 90.0, 0.2
"""Seconds to wait until a folder of another machine becomes visible."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_ASIDE = ".replaced"
_ATTEMPT = re.compile(
    r"\.(?P<name>.+)\.attempt-(?P<id>(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<started>\w+)-"
    r"(?P<last>[0-9a-f]{16}(?P<aside>\.replaced)?))"
)

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def _is_taken(place: Location) -> bool:
    """Return whether a local place holds a checkpoint or parts of one, which a save must not
    overwrite without being asked to."""
    return any(place.exists(name) for name in COMMITS)


@dataclass(frozen=True)
class FolderAttempt(Attempt):
    """An attempt to write a checkpoint to a local or shared file system."""

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
        """Wait until everything that this rank wrote is on the disk."""
        sync_file_system(self.location)

    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents in order, and move the attempt to its target in one atomic step.
        One process calls it.

        Args:
            documents: names and contents.
            durable: wait until all of it is on the disk.

        Raises:
            CheckpointExistsError: another save has committed a checkpoint there.
            StorageError: the store failed; the target is unchanged.
        """
        self.put_all(documents)
        source, target = self.location.url, self.target.url
        with store_errors("committing", target):
            replaced = os.path.isdir(target) and bool(os.listdir(target))
            if not replaced:  # of what is renamed nothing has to be told from anything later
                os.unlink(f"{source}/{OWNER_NAME}")
        try:
            if durable:
                self.flush()
            with store_errors("committing", target):
                self._replace() if replaced else os.rename(source, target)
        except BaseException as error:
            if not replaced:
                self._mark()
            if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST):
                raise exists_error(self.target, meanwhile=True) from None
            raise
        try:
            if durable:
                fsync(os.path.dirname(target))
        except OSError as error:
            raise StorageError(
                f"{target} is committed and can be loaded, but syncing {os.path.dirname(target)} "
                f"failed ({error.strerror}): after a power cut it may be gone. Check the disk, and "
                "save again elsewhere",
                url=target,
            ) from error
        finally:
            self.abandon(durable=durable)

    def _replace(self) -> None:
        source, target = self.location.url, self.target.url
        if not self.overwrite and _is_taken(self.target):
            raise exists_error(self.target, meanwhile=True)
        _exchange(source, target)
        if not self.overwrite and _is_taken(self.location):
            # Committed by another process between the look and the exchange.
            _exchange(source, target)
            raise exists_error(self.target, meanwhile=True)

    def abandon(self, *, durable: bool = True) -> None:
        """Remove the attempt, or the checkpoint that the commit replaced. One process calls it,
        after all ranks have stopped writing. The next save removes what could not be removed."""
        try:
            self.remove(durable=durable)
        except OSError as error:
            logger.warning(
                "%s, which is no longer needed, could not be removed: %s", self.location.url, error
            )

    def remove(self, *, durable: bool = True) -> None:
        """Remove the folder: the commit first, so that no reader opens what is half gone, and the
        mark last. Of what was replaced, what is no checkpoint's goes back to the target before.

        Args:
            durable: each step is on the disk before the next one destroys what it was taken from.

        Raises:
            OSError, StorageError: the store refused.
        """
        folder, target = self.location, self.target
        if not folder.exists():
            return
        if not _is_marked(folder, self.id):
            ours = _own_entries(folder)
            foreign = [n for n in folder.listing() if n not in ours and not target.exists(n)]
            for name in foreign:
                os.makedirs(target.url, exist_ok=True)
                os.rename(f"{folder.url}/{name}", f"{target.url}/{name}")
            if foreign and durable:
                fsync(target.url)
            # From here on all of it can go, should this process die on the way.
            self._mark()
            if durable:
                with contextlib.suppress(FileNotFoundError):
                    fsync(f"{folder.url}/{OWNER_NAME}")
                fsync(folder.url)
        if _is_marked(target, self.id):
            with contextlib.suppress(FileNotFoundError):  # another save has just replaced it
                os.unlink(f"{target.url}/{OWNER_NAME}")
        for name in (*COMMITS, *folder.listing()):
            if name != OWNER_NAME:
                folder.delete(name)
        folder.delete()

    def taken_over(self) -> FolderAttempt:
        """Make it this process's, in one step; raises :class:`OSError` if another did."""
        mine = replace(self, id=f"{_owner()}-{self.id.rpartition('-')[2]}")
        os.rename(self.location.url, mine.location.url)
        return mine

    def _mark(self) -> None:
        with contextlib.suppress(StorageError):  # a full disk
            if not self.location.is_dir(OWNER_NAME):
                self.location.delete(OWNER_NAME)  # a FIFO, or a link, that is not written to
            self.location.write(OWNER_NAME, _mark_of(self.id))


def _mark_of(attempt_id: str) -> bytes:
    return attempt_id.rpartition("-")[2].removesuffix(_ASIDE).encode()


def _is_marked(folder: Location, attempt_id: str) -> bool:
    try:
        return folder.read(OWNER_NAME) == _mark_of(attempt_id)
    except OSError:
        return False


def delete(place: Location) -> None:
    """Delete a checkpoint: its commit first. Foreign files, and then the folder, stay.

    It goes in one step to the name of an attempt, so that another save to the place is met whole or
    not at all; the next save or sweep clears it if this process dies on the way. Of a symbolic link
    the link alone is removed.
    """
    if os.path.islink(place.url):
        place.delete()
        return
    doomed = FolderAttempt(place, _fresh_id())
    try:
        os.rename(place.url, doomed.location.url)
    except OSError:  # a mount point, a folder that may not be written to
        for names in deletion_rounds({*_own_entries(place), OWNER_NAME}, 1):
            place.delete(names[0])
        if not place.listing():
            place.delete()
        return
    try:
        with store_errors("deleting", place.url):
            fsync(os.path.dirname(place.url))
            doomed.remove()
    except BaseException:  # an interrupt, too
        doomed.abandon()
        raise


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
    for left in leftovers(*os.path.split(target.url)):
        sweep(left)
    attempt = FolderAttempt(target, _fresh_id(), overwrite)
    try:
        with store_errors("creating", attempt.location.url):
            os.makedirs(attempt.location.url)
            attempt.location.write(OWNER_NAME, _mark_of(attempt.id))
    except BaseException:
        attempt.abandon()
        raise
    return attempt


def join(place: Location, attempt_id: str, *, overwrite: bool = False) -> FolderAttempt:
    """Return the attempt that the coordinator began, on another rank."""
    return FolderAttempt(Location.of(os.path.realpath(place.url)), attempt_id, overwrite)


def resumed(place: Location, attempt_id: str, *, overwrite: bool = False) -> FolderAttempt | None:
    """An attempt of a process that is gone, to be gone on with by this one; ``None``: it has been
    swept."""
    target = Location.of(os.path.realpath(place.url))
    last = attempt_id.rpartition("-")[2]
    for name in Location.of(os.path.dirname(target.url)).listing():
        if (found := _ATTEMPT.fullmatch(name)) and found["last"] == last:
            return FolderAttempt(target, found["id"], overwrite).taken_over()
    return None


def leftovers(
    parent: str, target: str | None = None, older_than: timedelta = DEFAULT_AGE
) -> Iterator[FolderAttempt]:
    """What dead processes left in a folder: attempts of theirs, what their commits replaced, and
    what they were deleting. A symbolic link is none.

    Args:
        parent: the folder.
        target: name of the target; default: of any.
        older_than: what another host left counts once nothing was written to it for so long.
    """
    for entry in Location.of(parent).listing():
        found = _ATTEMPT.fullmatch(entry)
        if found and target in (None, found["name"]):
            attempt = FolderAttempt(Location.of(f"{parent}/{found['name']}"), found["id"])
            if _is_dead(found, attempt.location.url, older_than):
                yield attempt


def sweep(left: FolderAttempt) -> bool:
    """Remove what a dead process left; whether this process did."""
    try:
        if left.id.endswith(_ASIDE) and not left.target.exists():
            # It died between the renames that make an exchange.
            os.rename(left.location.url, left.target.url)
        else:
            left.taken_over().remove()
    except OSError:  # another process was faster, or is needed for it
        return False
    return True


def _is_dead(found: re.Match[str], url: str, older_than: timedelta) -> bool:
    """Whether the process of a folder ran on this host and is gone, or ran elsewhere and has not
    written to it for some time."""
    if os.path.islink(url):
        return False
    if found["machine"] == _machine():
        return _start_of(int(found["pid"])) != found["started"]
    try:
        written = max(os.lstat(path).st_mtime for path in (url, *paths(url)))
    except OSError:  # somebody is at it
        return False
    return written < time.time() - older_than.total_seconds()


def paths(top: str) -> Iterator[str]:
    """Yield the paths of all files and folders below a folder."""
    for above, folders, files in os.walk(top):
        yield from (os.path.join(above, name) for name in (*folders, *files))


def _fresh_id() -> str:
    return f"{_owner()}-{secrets.token_hex(8)}"


def _owner() -> str:
    """Return an identity of this process that is unique among machines and over time."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_start_of(pid)}"


@cache
def _machine() -> str:
    """Return an identity of this machine, boot and pid namespace."""
    about = [socket.gethostname()]
    with contextlib.suppress(OSError):
        about.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        about.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(about).encode()).hexdigest()[:12]


def _start_of(pid: int) -> str:
    """Start time of a process in clock ticks since boot, which tells it from a later one of the
    same number; ``"x"``: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "x"
    fields = stat.rpartition(")")[2].split()
    return fields[19] if fields[0] not in "ZX" else "x"


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
    aside = f"{source}{_ASIDE}"
    os.rename(target, aside)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, source)
