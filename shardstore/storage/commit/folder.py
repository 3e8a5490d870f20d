"""Attempt, publish, sweep: how a checkpoint comes to be there whole or not at all.

On a local file system an attempt is a hidden folder beside its target, ``.NAME.attempt-ID``;
publishing is one rename, onto nothing or onto an empty folder, or one atomic exchange with the
checkpoint that is replaced (``renameat2(RENAME_EXCHANGE)``, Linux man-pages rename(2)), which stays
readable until then. A reader never sees a folder that is being written. Attempts whose process is
gone are swept by the next attempt at the same target.

An object store has no rename: :mod:`~shardstore.storage.commit.objects` has its protocol.

One process begins and publishes an attempt; the others join it.
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
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.identity import is_foreign_node, node_type, what_else
from shardstore.storage.commit.inventory import described_nodes
from shardstore.storage.commit.object_files import is_object_file
from shardstore.storage.format.names import COMMON_STATE_NAME, MANIFEST_NAME
from shardstore.storage.movers.files import sync_file_system
from shardstore.storage.stores.location import Location, store_errors

__all__ = ["FolderAttempt", "begin", "is_checkpoint", "join", "sweep"]

OWNER_NAME = ".owner.json"
MARKERS = ("zarr.json", "metadata.json")
_OWN_NAMES = frozenset({*MARKERS, OWNER_NAME, COMMON_STATE_NAME, MANIFEST_NAME, ".metadata"})
SEEN_S, POLL_S = 90.0, 0.2
"""For how long a folder is waited for that another machine has just made."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)


def is_checkpoint(location: Location) -> bool:
    """Whether a committed checkpoint is there (ours, or one with a ``metadata.json`` of another
    backend).

    An array's folder inside a checkpoint is none, nor is a Zarr group of another program.
    """
    if not location.is_local:
        from shardstore.storage.commit import inventory

        names = location.remote.listing()
        if not inventory.is_committed(location, names):
            return False
        return "metadata.json" in names or what_else(location) is None
    if location.exists("metadata.json"):
        return True
    return location.exists("zarr.json") and what_else(location) is None


def _is_taken(location: Location) -> bool:
    """Whether anything with a checkpoint's marks is at a local place: nothing may lie there that a
    save writes over unasked."""
    return any(location.exists(marker) for marker in MARKERS)


@dataclass(frozen=True)
class FolderAttempt:
    """One try at writing a checkpoint to a local or shared file system.

    Attributes:
        target: where the checkpoint shall be.
        location: where this attempt is written.
        id: its own name, agreed by all ranks.
        overwrite: whether a checkpoint at the target may be replaced.
    """

    target: Location
    location: Location
    id: str
    overwrite: bool = False

    @property
    def defers_documents(self) -> bool:
        """No: nobody opens an attempt's folder."""
        return False

    def announce(self, nodes: Iterable[str], rank: int) -> None:
        """Nothing to say: the folder is the attempt's own."""

    def check(self) -> None:
        """Nothing to check: nobody else writes to an attempt's folder."""

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

    def put_all(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Write documents."""
        for name, data in documents:
            self.put(name, data)

    def flush(self) -> None:
        """Wait until what this rank wrote is on the disk."""
        sync_file_system(self.location)

    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents in order, and publish. Called by one process.

        Raises: as :meth:`publish`.
        """
        self.put_all(documents)
        if durable:
            self.flush()
        self.publish(durable=durable, synced=durable)

    def publish(self, *, durable: bool = True, synced: bool = False) -> None:
        """Put the finished attempt in its target's place, in one atomic step. Called by one
        process.

        Args:
            durable: wait until that is on the disk.
            synced: the whole file system was synchronised since the last write.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused; the target is as it was.
        """
        source, target = self.location.url, self.target.url
        with store_errors("committing", target):
            if durable and not synced:
                _fsync(source)
            if not os.path.isdir(target) or not os.listdir(target):
                try:
                    os.rename(source, target)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    raise self._exists() from None
                replaced = False
            else:
                self._exchange()
                replaced = True
            if durable:
                _fsync(os.path.dirname(target))
        self._clean_up(replaced)

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.target.url} already exists: another checkpoint was committed there while "
            "this one was being "
            "written; pass overwrite=True to replace it, or save elsewhere",
            url=self.target.url,
        )

    def _exchange(self) -> None:
        source, target = self.location.url, self.target.url
        if _is_taken(self.target) and not self.overwrite:
            raise self._exists()
        _exchange(source, target)
        if _is_taken(self.location) and not self.overwrite:
            # Committed by another process between the look and the exchange.
            _exchange(source, target)
            raise self._exists()

    def _clean_up(self, replaced: bool) -> None:
        """After the commit: remove what was replaced. A failure leaves rubbish, and is logged."""
        source, target = self.location.url, self.target.url
        try:
            if not replaced:
                _unlink_soon(f"{target}/{OWNER_NAME}")
                return
            # What is no checkpoint's (a log, a config) stays where its owner put it.
            ours = _own_names(self.location)
            for name in os.listdir(source):
                if name not in ours and not os.path.lexists(os.path.join(target, name)):
                    os.rename(os.path.join(source, name), os.path.join(target, name))
            # From here on the next attempt may sweep it, should this process die on the way.
            os.rename(f"{target}/{OWNER_NAME}", f"{source}/{OWNER_NAME}")
            remove_attempt(self.location)
        except OSError as error:
            logger.warning(
                "%s is committed, but what it replaced could not be removed: %s", target, error
            )

    def abandon(self) -> None:
        """Remove what was written; the target is as it was. Called by one process, once all have
        stopped writing."""
        # Without its owner's note it is what a commit replaced, perhaps with files of others.
        if self.location.exists(OWNER_NAME):
            with contextlib.suppress(StorageError):
                remove_attempt(self.location)


def _unlink_soon(path: str) -> None:
    """Take a file's name away, and give its space back in a while.

    A file system in the middle of writing much else can hold up who frees an inode (50 ms were
    seen, a tenth of a save). The last one to close the file frees it: a thread that nobody waits
    for, or this one where none is to be had, as while the interpreter ends.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.unlink(path)
    finally:
        try:
            threading.Thread(target=os.close, args=(fd,), daemon=True).start()
        except RuntimeError:
            os.close(fd)


def remove_attempt(attempt: Location) -> None:
    """Remove an attempt: the commit first, so that no reader opens what is half gone, the owner's
    note last, so that the next attempt sweeps the rest if this process dies on the way."""
    for name in (*MARKERS, *attempt.listing()):
        if name != OWNER_NAME:
            attempt.delete(name)
    attempt.delete()


def delete_folder(location: Location) -> None:
    """Delete a checkpoint: its commit first. Foreign files, and then the folder, stay.

    Where all of it is ours it goes in one step to the name of an attempt, which the next save or
    sweep clears if this process dies on the way. Of a symbolic link the link alone is removed.
    """
    if os.path.islink(location.url):
        location.delete()
        return
    ours = _own_names(location)
    if ours.issuperset(location.listing()):
        doomed = _attempt_location(location, f"{_fresh_id()}.deleted")
        try:
            location.write(OWNER_NAME, json.dumps(_owner()).encode())
            os.rename(location.url, doomed.url)
        except OSError:  # a full disk, a mount point
            pass
        else:
            remove_attempt(doomed)
            return
    # Last what tells, without the root, which folders are ours.
    last = (COMMON_STATE_NAME, MANIFEST_NAME)
    for name in (*MARKERS, OWNER_NAME, *sorted(ours.difference(last)), *last):
        location.delete(name)
    if not location.listing():
        location.delete()


def _own_names(location: Location) -> set[str]:
    """Names of the files and folders directly below a checkpoint that are parts of it.

    Zarr arrays and groups of other programs, which may lie there too, are none.
    """
    ours: set[str] = set()
    folders: dict[str, list[str]] = {}
    for name in location.listing():
        path = os.path.join(location.url, name)
        if name in _OWN_NAMES or name.endswith(".distcp"):
            ours.add(name)
        elif os.path.isdir(path) and not os.path.islink(path):
            entries = os.listdir(path)
            if "metadata.json" not in entries:  # else a checkpoint of its own
                folders[name] = entries
    remains = not ours.isdisjoint((*MARKERS, COMMON_STATE_NAME, MANIFEST_NAME))
    described = described_nodes(location, folders)
    for name, entries in folders.items():
        if name in described or _is_marked(location, name, entries, remains):
            ours.add(name)
    return ours


def _is_marked(location: Location, name: str, entries: list[str], remains: bool) -> bool:
    """Whether what is in a folder says that it is an array of ours, or of sharded objects.

    Args:
        location: what the folder is in.
        name: of the folder.
        entries: in it.
        remains: there are documents of a checkpoint beside it: without any, what has no mark of
            ours is not touched.
    """
    if "zarr.json" in entries:
        try:
            return not is_foreign_node(location.read(f"{name}/zarr.json"))
        except FileNotFoundError:  # a folder of that name
            return False
    if ".zarray" in entries:
        return remains and not location.exists("zarr.json")
    return remains and any(map(is_object_file, entries))


def _attempt_location(target: Location, attempt_id: str) -> Location:
    parent, name = os.path.split(target.url)
    return Location.of(f"{parent}/.{name}.attempt-{attempt_id}")


def begin(
    place: Location, *, overwrite: bool = False, allow_unconditional: bool = False
) -> Attempt:
    """Begin an attempt at a target. Called by one process, the coordinator.

    Args:
        place: the target.
        overwrite: a checkpoint that is there may be replaced.
        allow_unconditional: see :attr:`SaveOptions.allow_unconditional`.

    Raises:
        CheckpointExistsError: a checkpoint, or a file, is there and may not be replaced.
        StorageError: the folder can not be created.
    """
    if overwrite and node_type(place) == "array":
        raise CheckpointExistsError(
            f"{place.url} is a single array, not a checkpoint, and is not written over: give the "
            "folder of a checkpoint, or save elsewhere",
            url=place.url,
        )
    if not place.is_local:
        from shardstore.storage.commit import objects as object_commit

        return object_commit.begin(
            place, overwrite=overwrite, allow_unconditional=allow_unconditional
        )
    target = Location.of(os.path.realpath(place.url))
    if target.exists() and not target.is_dir():
        raise CheckpointExistsError(
            f"{target.url} is a file; give a folder's path to save to", url=target.url
        )
    if os.path.ismount(target.url):
        raise StorageError(
            f"{target.url} is a mount point, which nothing can take the place of in one step; save "
            "to a folder below it",
            url=target.url,
        )
    if target.exists() and os.path.samefile(target.url, os.curdir):
        raise StorageError(
            f"{target.url} is the working directory, which would be replaced under this process; "
            "save to a folder below it",
            url=target.url,
        )
    if _is_taken(target) and not overwrite:
        raise CheckpointExistsError(
            f"{target.url} already exists and holds a checkpoint; pass overwrite=True to replace "
            "it, or save "
            "elsewhere",
            url=target.url,
        )
    sweep(target)
    attempt_id = _fresh_id()
    location = _attempt_location(target, attempt_id)
    # Under another name until its owner's note is there: an attempt without one is a dead one's
    # last remains.
    fresh = Location.of(f"{location.url}.begin")
    with store_errors("creating", location.url):
        os.makedirs(fresh.url)
        fresh.write(OWNER_NAME, json.dumps(_owner()).encode())
        os.rename(fresh.url, location.url)
    return FolderAttempt(target, location, attempt_id, overwrite)


def join(place: Location, attempt_id: str, *, overwrite: bool = False) -> Attempt:
    """The attempt that the coordinator began, on another rank."""
    if not place.is_local:
        from shardstore.storage.commit import objects as object_commit

        return object_commit.join(place, attempt_id, overwrite=overwrite)
    target = Location.of(os.path.realpath(place.url))
    return FolderAttempt(target, _attempt_location(target, attempt_id), attempt_id, overwrite)


def sweep(target: Location) -> list[str]:
    """Remove attempts at a target whose process is gone; those of other hosts are left alone.
    Returns their paths."""
    parent, name = os.path.split(target.url)
    swept = []
    for entry in Location.of(parent).listing():
        if not entry.startswith(f".{name}.attempt-"):
            continue
        attempt = Location.of(f"{parent}/{entry}")
        if is_dead(attempt):
            with contextlib.suppress(StorageError):
                remove_attempt(attempt)
                swept.append(attempt.url)
    return swept


def _fresh_id() -> str:
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def _owner() -> dict[str, object]:
    return {**_host(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def _host() -> dict[str, object]:
    """What tells this machine, boot and pid namespace from any other."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
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
    """Whether the process of an attempt ran on this host and is gone. A symbolic link is no
    attempt."""
    if os.path.islink(attempt.url):
        return False
    if attempt.is_dir() and not attempt.listing():
        return not attempt.name.endswith(".begin")
    try:
        owner = json.loads(attempt.read(OWNER_NAME))
        here = {name: owner.get(name) for name in ("host", "boot", "pids")} == _host()
        return here and _start_of(int(owner["pid"])) != owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _exchange(source: str, target: str) -> None:
    """Swap two folders atomically; where the file system can not, in two renames with a moment
    without a target."""
    try:
        renameat2 = _libc.renameat2
    except AttributeError:
        renameat2 = None
    if renameat2 is not None:
        paths = (os.fsencode(source), os.fsencode(target))
        if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
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
