"""Begin, find and delete checkpoints on disks and in object stores, and sweep dead attempts.

A place holds a checkpoint if the document that commits it is there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from shardstore.errors import CheckpointExistsError, NotACheckpointError
from shardstore.storage.commit import folder, identity, objects
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.inventory import known_nodes, own_names
from shardstore.storage.format.names import MANIFEST_NAME
from shardstore.storage.options import SaveOptions, require_bool
from shardstore.storage.stores.location import Location


def begin(place: Location, options: SaveOptions) -> Attempt:
    """Begin an attempt at a place. The coordinator calls it.

    Raises:
        CheckpointExistsError: the place is an array or a file, or holds a checkpoint and
            ``overwrite`` is false.
        StorageError: the store failed.
    """
    if options.overwrite and identity.node_type(place) == "array":
        raise place.error(
            " is a single array, not a checkpoint, and is not overwritten: give the folder of a "
            "checkpoint, or save elsewhere",
            CheckpointExistsError,
        )
    return folder.begin(place, options) if place.is_local else objects.begin(place, options)


def join(place: Location, attempt_id: str, options: SaveOptions) -> Attempt:
    """Return the attempt that the coordinator began. Every other rank calls it."""
    if place.is_local:
        return folder.FolderAttempt(folder.real(place), attempt_id, options.overwrite)
    return objects.ObjectAttempt(place, attempt_id)


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
        older_than: keep remains with a write within this time (by the store's clock).
        storage_options: options of an object store.

    Returns:
        The remains. Unless ``dry_run`` is set, they have been removed.

    Raises:
        StorageError: the store failed.
    """
    require_bool("dry_run", dry_run)
    place = Location.of(root, storage_options)
    place.require_no_file()
    if place.is_local:
        return _sweep_folders(place, older_than, dry_run)
    before = datetime.now(UTC) - older_than
    return _sweep_targets(place, before, dry_run) + _sweep_uploads(place, before, dry_run)


def latest(
    root: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """Return the committed checkpoint directly below a root whose name has the highest numbers
    (``step-1000`` after ``step-200``); ``None`` if there is none. Any process may call it.

    It compares only the names. If a training run went back to an earlier step, use
    :meth:`CheckpointManager.latest`.

    Raises:
        StorageError: the store failed.
    """
    place = Location.of(root, storage_options)
    place.require_no_file()
    names = [([*map(int, re.findall(r"\d+", name))], name) for name in place.listing()]
    for _, name in sorted(names, reverse=True):
        if not name.startswith(".") and identity.is_checkpoint(place.child(name)):
            return place.child(name).url
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
    location = Location.of(place, storage_options)
    require_checkpoint(location)
    (folder if location.is_local else objects).delete(location)


def require_checkpoint(location: Location) -> None:
    """Raise :class:`NotACheckpointError` if a place holds no checkpoint to delete."""
    if not identity.is_checkpoint(location):
        other = identity.what_else(location)
        found = f"is {other}, not a checkpoint" if other else "is not a checkpoint"
        raise location.error(f" {found}; nothing was deleted", NotACheckpointError)


def _sweep_targets(place: Location, before: datetime, dry_run: bool) -> list[Leftover]:
    """Find targets in an object store that have no commit, and remove their objects if asked to.

    It finds them by claims and marks, which are created first and removed last, or by a manifest.
    Other programs may use all other names. Chunks of layout 1 belong to a checkpoint only if a mark
    or a document lists them.
    """
    known = {name: (size, when) for name, size, when in place.remote.details()}
    targets = set()
    for name in known:
        above, _, last = f"/{name}".rpartition("/")
        if last == MANIFEST_NAME or above.endswith(f"/{identity.ATTEMPTS}"):
            targets.add(above.removesuffix(f"/{identity.ATTEMPTS}").lstrip("/"))
    found = []
    for path in sorted(targets):
        target, prefix = (place.child(path), f"{path}/") if path else (place, "")
        if identity.is_committed(target):
            continue
        names = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
        own = [known[prefix + name] for name in own_names(names, *known_nodes(target, names))]
        if not own or any(when is not None and when > before for _, when in own):
            continue
        found.append(Leftover(target.url, len(own), sum(size for size, _ in own), "attempt"))
        if not dry_run:
            with contextlib.suppress(CheckpointExistsError):  # it was committed in the meantime
                objects.begin(target, SaveOptions(allow_unconditional=True)).withdraw_all()
    return found


def _sweep_uploads(place: Location, before: datetime, dry_run: bool) -> list[Leftover]:
    """Find multipart uploads that were never completed (Amazon S3 API, ListMultipartUploads), and
    abort them if asked to."""
    store = place.remote
    if not hasattr(store.fs, "_call_s3"):
        return []
    bucket, _, prefix = place.url.partition("://")[2].partition("/")
    # The slash excludes places whose names only begin with the same letters.
    asked: dict[str, Any] = {"Bucket": bucket, "Prefix": f"{prefix}/" if prefix else ""}
    found: list[Leftover] = []
    with store.errors("sweeping uploads below", ""):
        while True:
            listed = store.call("call_s3", "list_multipart_uploads", **asked)
            for upload in listed.get("Uploads") or []:
                if upload["Initiated"] > before:
                    continue
                one = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                found.append(Leftover(f"s3://{bucket}/{upload['Key']}", 1, 0, "upload"))
                if not dry_run:
                    store.call("call_s3", "abort_multipart_upload", **one)
            if not listed.get("IsTruncated"):
                return found
            asked["KeyMarker"] = listed["NextKeyMarker"]
            asked["UploadIdMarker"] = listed["NextUploadIdMarker"]


def _sweep_folders(place: Location, older_than: timedelta, dry_run: bool) -> list[Leftover]:
    found = []
    for top, names, _ in os.walk(place.url):
        lefts = list(folder.leftovers(top, older_than=older_than))
        names[:] = {*names} - {left.location.name for left in lefts}
        for left in lefts:
            files = [path for path in left.location.path.rglob("*") if not path.is_dir()]
            size = sum(path.lstat().st_size for path in files)
            found.append(Leftover(left.location.url, len(files), size, "attempt"))
            if not dry_run:
                folder.sweep(left)
    return found
