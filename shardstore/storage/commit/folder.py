"""Attempt and commit on a local or shared file system: a hidden folder, and one rename.

An attempt is a hidden folder beside its target, ``.NAME.attempt-ID``. The commit is one rename to a
new name or onto an empty folder, or one atomic exchange with the checkpoint that it replaces
(``renameat2(RENAME_EXCHANGE)``, Linux man-pages rename(2)). The old checkpoint stays readable until
then. A reader never sees a folder that is being written.

The ID identifies the process that owns the folder, so that the next save and the sweeper find the
remains of dead processes. A folder that contains the mark of its own ID is an attempt, and all of
it can be removed. A folder without the mark is a checkpoint that a commit replaced or a deletion
renamed. Files in it that are not part of the checkpoint (a log, a config) move back to the target
before the folder is removed.
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
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.commit.attempt import Attempt, DeadTarget, Leftover, exists_error
from shardstore.storage.commit.identity import has_dcp_metadata
from shardstore.storage.commit.inventory import (
    deletion_rounds,
    folders_of_others,
    known_nodes,
    model_files,
    own_names,
)
from shardstore.storage.format.names import COMMITS, MODEL_COMMITS
from shardstore.storage.movers.chunks import SmallFiles
from shardstore.storage.movers.files import sync_file_system
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.folder import LocalFolder, fsync, store_errors
from shardstore.storage.stores.location import Location

OWNER_NAME = ".owner.json"
"""Name of the mark in an attempt's folder. Its content is the last part of the ID."""
DEFAULT_AGE = timedelta(days=1)
"""Time without writes after which an attempt of another host counts as dead."""
SEEN_S, POLL_S = 90.0, 0.2
"""Seconds to wait for a folder that another machine created, and between two looks for it."""
_DISKS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems of one machine, which show a new file at once."""
_given_up: set[str] = set()  # the IDs of attempts that this process could not remove
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_ASIDE = ".replaced"
_ATTEMPT = re.compile(
    r"\.(?P<name>.+)\.attempt-(?P<id>(?P<machine>[0-9a-f]{12})-(?P<pid>\d+)-(?P<started>\w+)-"
    r"(?P<last>[0-9a-f]{16}(?P<aside>\.replaced)?))"
)

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def is_taken(place: Location, commits: Sequence[str] = COMMITS) -> bool:
    """Return whether a local place has a document that commits a checkpoint, one of these or that
    of PyTorch DCP. A save replaces such a place only if ``overwrite`` is set."""
    return any(place.exists(name) for name in commits) or has_dcp_metadata(place)


@dataclass(frozen=True)
class FolderAttempt(Attempt):
    """An attempt to write a checkpoint to a local or shared file system.

    Attributes:
        overwrite: whether a checkpoint at the target may be replaced.
        commits: names of the documents that tell that there is one.
    """

    overwrite: bool = False
    commits: Sequence[str] = COMMITS

    @cached_property
    def location(self) -> Location:
        """The attempt's folder."""
        parent, name = os.path.split(self.target.url)
        return LocalFolder(f"{parent}/.{name}.attempt-{self.id}")

    def require_seen(self) -> None:
        """See :meth:`Attempt.require_seen`. A network file system may show a new folder of another
        machine half a minute late; a disk of this machine shows it at once, or never."""
        deadline = time.monotonic() + (0 if disk_of(self.target) else SEEN_S)
        while not self.location.exists(OWNER_NAME):
            if time.monotonic() >= deadline:
                raise self.target.error(
                    " is not on a file system that all ranks share: "
                    f"{self.location.url}, which the coordinator of this save created, is missing "
                    f"on {socket.gethostname()}; save to one that is, or to an object store"
                )
            time.sleep(POLL_S)

    def flush(self) -> None:
        """Wait until everything that this rank wrote is on the disk."""
        sync_file_system(self.location)

    def commit(self, documents: SmallFiles, *, durable: bool) -> None:
        """Write the last documents in order, and move the attempt to its target in one atomic step.
        One process calls it.

        Args:
            documents: names and contents.
            durable: wait until the whole checkpoint is on the disk.

        Raises:
            CheckpointExistsError: another save has committed a checkpoint there.
            StorageError: the store failed; the target is unchanged.
        """
        self.put_all(documents)
        source, target = self.location.url, self.target.url
        try:
            with store_errors("committing", target):
                replaced = os.path.isdir(target) and bool(os.listdir(target))
                if not replaced:  # only after an exchange does the mark tell the two folders apart
                    os.unlink(f"{source}/{OWNER_NAME}")
                if durable:
                    self.flush()
                if not replaced:
                    try:
                        os.rename(source, target)
                    except OSError as error:
                        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                            raise
                        # Another program has put a file there since.
                        self.location.write(OWNER_NAME, _mark_of(self.id))
                        replaced = True
                if replaced:
                    self._replace()
        except StorageError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise exists_error(self.target, meanwhile=True) from None
            raise
        try:
            if durable:
                fsync(os.path.dirname(target))
        except OSError as error:
            raise self.target.error(
                f" is committed and can be loaded, but syncing {os.path.dirname(target)} failed "
                f"({error.strerror}): after a power cut it may be gone. Check the disk, and save "
                "again elsewhere"
            ) from error
        finally:
            self.abandon(durable=durable)

    def _replace(self) -> None:
        source, target = self.location.url, self.target.url
        if not self.overwrite and is_taken(self.target, self.commits):
            raise exists_error(self.target, meanwhile=True)
        _require_own(self.target, self.location.listing())
        _exchange(source, target)
        if not self.overwrite and is_taken(self.location, self.commits):
            # Another process committed between the check and the exchange.
            _exchange(source, target)
            raise exists_error(self.target, meanwhile=True)

    def abandon(self, *, durable: bool = True) -> None:
        """Remove the attempt, or the checkpoint that the commit replaced. One process calls it,
        after all ranks have stopped writing. If the removal fails, the next save repeats it."""
        try:
            self.remove(durable=durable)
        except OSError as error:
            _given_up.add(self.id)
            logger.warning(
                "%s, which is no longer needed, could not be removed: %s", self.location.url, error
            )

    def remove(self, *, durable: bool = True) -> None:
        """Remove the mark of this attempt from the target, if it is committed, and the folder: the
        commit first, so that no reader opens a half-deleted checkpoint, and the mark last. If the
        folder holds a replaced checkpoint, its files of other programs first move back to the
        target.

        Args:
            durable: sync the moved files and the mark to disk before anything is deleted.

        Raises:
            OSError, StorageError: the file system failed.
        """
        folder, target = self.location, self.target
        if _is_marked(target, self.id):
            with contextlib.suppress(FileNotFoundError):  # another save has just replaced it
                os.unlink(f"{target.url}/{OWNER_NAME}")
        if not folder.exists():
            return
        if not _is_marked(folder, self.id):
            ours = _own_entries(folder)
            if any(map(target.exists, MODEL_COMMITS)) and not any(map(target.exists, COMMITS)):
                # A model was replaced, of which no file may stay beside the new ones.
                ours.update(model_files(folder, folder.listing()))
            foreign = [n for n in folder.listing() if n not in ours and not target.exists(n)]
            for name in foreign:
                os.makedirs(target.url, exist_ok=True)
                os.rename(f"{folder.url}/{name}", f"{target.url}/{name}")
            if foreign and durable:
                fsync(target.url)
            # With the mark, the next save removes the whole folder if this process dies here.
            with contextlib.suppress(StorageError):  # for example, the disk is full
                folder.delete(OWNER_NAME)  # a FIFO or a link, which is not written into
                folder.write(OWNER_NAME, _mark_of(self.id))
            if durable:
                with contextlib.suppress(FileNotFoundError):
                    fsync(f"{folder.url}/{OWNER_NAME}")
                fsync(folder.url)
        failures = []
        for name in (*COMMITS, *MODEL_COMMITS, *folder.listing()):
            if name != OWNER_NAME:
                try:
                    folder.delete(name)
                except StorageError as error:  # a file in use, which NFS keeps under another name
                    failures.append(error)
        if failures:
            raise failures[0]
        folder.delete()

    def taken_over(self) -> FolderAttempt:
        """Rename the folder to an ID of this process, in one atomic step, and return the attempt.

        Raises:
            OSError: another process took it over first.
        """
        mine = replace(self, id=_own_id(self.id.rpartition("-")[2]))
        os.rename(self.location.url, mine.location.url)
        return mine


def _mark_of(attempt_id: str) -> bytes:
    return attempt_id.rpartition("-")[2].removesuffix(_ASIDE).encode()


def _is_marked(folder: Location, attempt_id: str) -> bool:
    try:
        return folder.read(OWNER_NAME) == _mark_of(attempt_id)
    except OSError:
        return False


def delete(place: Location) -> None:
    """Delete a checkpoint. Files of other programs stay, and with them the folder.

    One atomic rename first gives the checkpoint the name of an attempt. A save to the place that
    runs at the same time is thus deleted whole or not at all. If this process dies, the next save
    or sweep removes the rest. If the place is a symbolic link, only the link is removed.
    """
    if os.path.islink(place.url):
        place.delete()
        return
    doomed = FolderAttempt(place, _own_id(secrets.token_hex(8)))
    try:
        os.rename(place.url, doomed.location.url)
    except OSError:  # a mount point, or a parent folder without write permission
        for names in deletion_rounds({*_own_entries(place), OWNER_NAME}, 1):
            place.delete(names[0])
        if not place.listing():
            place.delete()
        return
    try:
        with store_errors("deleting", place.url):
            fsync(os.path.dirname(place.url))
            doomed.remove()
    except BaseException:  # including an interrupt
        doomed.abandon()
        raise


def _own_entries(place: Location) -> set[str]:
    """Return the names of the files and folders directly below a checkpoint that are parts of it.

    Zarr arrays and groups of other programs in the same folder are left out.
    """
    names = place.walk(strict=False)
    own = own_names(names, *known_nodes(place, names))
    return {name.partition("/")[0] for name in own} | {OWNER_NAME}.intersection(names)


def _require_own(target: Location, names: Iterable[str]) -> None:
    """Raise :class:`CheckpointExistsError` if the target has a folder of another program with one
    of these names."""
    both = set(target.listing()).intersection(names)
    if others := both and folders_of_others(target, both):
        raise target.error(
            f" has a folder {min(others)!r} that no save wrote, and an array or object of the "
            "checkpoint has this name; move it away, or save elsewhere",
            CheckpointExistsError,
        )


def begin(
    place: Location,
    options: SaveOptions,
    commits: Sequence[str] = COMMITS,
    nodes: Iterable[str] = (),
) -> FolderAttempt:
    """Begin an attempt at a target. Only the coordinator calls it. ``commits`` are the names of the
    documents that tell that it is taken, ``nodes`` the known names of arrays. The attempt has the
    mode and the group of an existing folder, which it replaces.

    Raises:
        CheckpointExistsError: the target is a file, holds a checkpoint and ``overwrite`` is false,
            or has another program's folder in the place of an array.
        StorageError: the target is a mount point or the working directory, or the attempt's folder
            cannot be created.
    """
    target = LocalFolder(os.path.realpath(place.url))
    if os.path.lexists(target.url):
        _require_replaceable(target, options, commits, nodes)
    for left in leftovers(*os.path.split(target.url)):
        sweep(left)
    last = secrets.token_hex(8)
    attempt = FolderAttempt(target, _own_id(last), options.overwrite, commits)
    try:
        with store_errors("creating, beside the target,", attempt.location.url):
            os.makedirs(attempt.location.url)
            with contextlib.suppress(OSError):  # there is none, or it has another user's group
                there = os.stat(target.url)
                os.chmod(attempt.location.url, 0o700 | stat.S_IMODE(there.st_mode))
                os.chown(attempt.location.url, -1, there.st_gid)
            Path(attempt.location.url, OWNER_NAME).write_text(last)
    except BaseException:
        attempt.abandon()
        raise
    return attempt


def _require_replaceable(
    target: Location, options: SaveOptions, commits: Sequence[str], nodes: Iterable[str]
) -> None:
    """Raise the errors of :func:`begin` if a save cannot replace what exists at a target."""
    if not target.is_dir():
        raise target.error(" is a file; give a folder's path to save to", CheckpointExistsError)
    if os.path.ismount(target.url):
        raise target.error(
            " is a mount point, which cannot be replaced in one step; save to a folder below it"
        )
    if os.path.samefile(target.url, os.curdir):
        raise target.error(
            " is the working directory of this process, which the save would replace; save to a "
            "folder below it"
        )
    if not is_taken(target, commits):  # else only the commit looks, because it takes long
        _require_own(target, nodes)
    elif not options.overwrite:
        raise exists_error(target, "a checkpoint" if is_taken(target) else "a model")


def join(place: Location, attempt_id: str, options: SaveOptions) -> FolderAttempt:
    """See :meth:`Commits.join`."""
    return FolderAttempt(LocalFolder(os.path.realpath(place.url)), attempt_id, options.overwrite)


def resumed(place: Location, attempt_id: str, options: SaveOptions) -> FolderAttempt | None:
    """See :meth:`Commits.resumed`."""
    target = LocalFolder(os.path.realpath(place.url))
    last = attempt_id.rpartition("-")[2]
    for name in LocalFolder(os.path.dirname(target.url)).listing():
        if (found := _ATTEMPT.fullmatch(name)) and found["last"] == last:
            return FolderAttempt(target, found["id"], options.overwrite).taken_over()
    return None


def leftovers(
    parent: str, target: str | None = None, older_than: timedelta = DEFAULT_AGE
) -> Iterator[FolderAttempt]:
    """Yield the remains of dead processes in a folder: their attempts, the checkpoints that their
    commits replaced, and the checkpoints that they were deleting. Symbolic links are skipped.

    Args:
        parent: the folder.
        target: name of the target; ``None`` for all targets.
        older_than: remains of another host are yielded once nothing was written to them for this
            time.
    """
    for entry in LocalFolder(parent).listing():
        found = _ATTEMPT.fullmatch(entry)
        if found and target in (None, found["name"]):
            attempt = FolderAttempt(LocalFolder(f"{parent}/{found['name']}"), found["id"])
            if _is_dead(found, attempt.location.url, older_than):
                yield attempt


def dead_targets(root: Location, older_than: timedelta) -> Iterator[DeadTarget]:
    """See :meth:`Commits.dead_targets`."""

    def remove(left: FolderAttempt) -> list[str]:
        return [left.location.url] if sweep(left) else []

    for left in leftovers(root.url, older_than=older_than):
        yield left.target, partial(remove, left)


def sweep_below(place: Location, older_than: timedelta, dry_run: bool) -> list[Leftover]:
    """See :meth:`Commits.sweep_below`."""
    found = []
    place.listing()  # raises the error that os.walk passes over
    for top, names, _ in os.walk(place.url):
        lefts = list(leftovers(top, older_than=older_than))
        names[:] = {*names} - {left.location.name for left in lefts}
        for left in lefts:
            files = [path for path in left.location.path.rglob("*") if not path.is_dir()]
            size = sum(path.lstat().st_size for path in files)
            if dry_run or sweep(left):
                found.append(Leftover(left.location.url, len(files), size, "attempt"))
    return found


def sweep(left: FolderAttempt) -> bool:
    """Remove the remains of a dead process. Return whether this process removed them."""
    try:
        if left.id.endswith(_ASIDE) and not left.target.exists():
            # The process died between the two renames that replace an exchange.
            os.rename(left.location.url, left.target.url)
        else:
            left.taken_over().remove()
    except FileNotFoundError:  # another process took them over
        return False
    except OSError as error:
        logger.warning(
            "%s, the remains of a dead save, could not be removed: %s", left.location.url, error
        )
        return False
    return True


def _is_dead(found: re.Match[str], url: str, older_than: timedelta) -> bool:
    """Return whether the process that owns a folder is dead: it ran on this host and has ended, or
    it ran on another host, or is hidden on this one, and nothing was written to the folder for
    ``older_than``. An attempt that this process could not remove is dead too."""
    if os.path.islink(url):
        return False
    if found["id"] in _given_up:
        return True
    if found["machine"] == _machine() and not _is_hidden(pid := int(found["pid"])):
        with contextlib.suppress(OSError):  # else unknown, for example with too many open files
            return _start_of(pid) != found["started"]
        return False
    try:
        top = Path(url)
        written = max(path.lstat().st_mtime for path in (top, *top.rglob("*")))
    except OSError:  # another process is changing the folder
        return False
    return written < time.time() - older_than.total_seconds()


def disk_of(place: Location) -> str:
    """Return the boot ID of this machine if a place is on a disk of its own, which other machines
    see through a network file system only; empty if it is not, or if that is unknown."""
    with contextlib.suppress(OSError):
        if (device := place.device()) is None:
            return ""
        name = f" {os.major(device)}:{os.minor(device)} "
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()  # Linux man-pages, proc(5)
        kinds = {mount.partition(" - ")[2].split()[0] for mount in mounts if name in mount}
        if kinds and kinds <= _DISKS:
            return _boot_id()
    return ""


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _own_id(last: str) -> str:
    """Return an ID that ends in ``last``, after an identity of this process that is unique among
    machines and over time."""
    return f"{_owner(os.getpid())}-{last}"


@cache
def _owner(pid: int) -> str:
    """Return this identity. ``pid`` is the number of this process, another one after a fork."""
    return f"{_machine()}-{pid}-{_start_of(pid)}"


@cache
def _machine() -> str:
    """Return an identity of this machine, boot and pid namespace."""
    about = [socket.gethostname()]
    with contextlib.suppress(OSError):
        about.append(_boot_id())
        about.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256(" ".join(about).encode()).hexdigest()[:12]


def _is_hidden(pid: int) -> bool:
    """Return whether another user's process has this number, and /proc does not show it (Linux
    man-pages proc(5), hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{pid}")
    except (OSError, OverflowError):
        pass
    return False


def _start_of(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot, ``"x"`` if no such process
    runs. The start time distinguishes the process from a later one with the same number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "x"
    fields = stat.rpartition(")")[2].split()
    return fields[19] if fields[0] not in "ZX" else "x"


def _exchange(source: str, target: str) -> None:
    """Swap two folders atomically. If the file system cannot, use renames; the target is then
    absent for a moment."""
    if hasattr(_libc, "renameat2"):
        paths = (os.fsencode(source), os.fsencode(target))
        if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number), source)
    aside = f"{source}{_ASIDE}"
    os.rename(target, aside)
    try:
        os.rename(source, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, source)
