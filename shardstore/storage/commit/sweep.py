"""Cleaning up below a root: what no commit covers, the latest checkpoint, deleting a checkpoint.

A checkpoint is what has its commit, whatever else is beside it. The same calls work on local
folders and object stores.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fsspec.asyn import sync  # type: ignore[import-untyped]

from shardstore.errors import CheckpointExistsError, NotACheckpointError
from shardstore.storage.commit import folder as commit
from shardstore.storage.commit import inventory
from shardstore.storage.commit import objects as object_commit
from shardstore.storage.commit import objects as object_deletion
from shardstore.storage.commit.claims import ATTEMPTS
from shardstore.storage.commit.identity import what_else
from shardstore.storage.format.names import MANIFEST_NAME
from shardstore.storage.stores.errors import explained
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.remote import DEADLINE_S

__all__ = ["Leftover", "delete_checkpoint", "latest", "sweep"]

DEFAULT_AGE = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that no commit covers.

    Attributes:
        url: target of the attempt, or the upload.
        objects: how many objects or files it has.
        stored_bytes: their size, where the store tells.
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
    older_than: timedelta = DEFAULT_AGE,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Leftover]:
    """List, and remove if asked to, what saves that did not finish left below a root. Called by one
    process.

    Checkpoints that are committed, and everything that is not ours, stay. In an object store a
    target is claimed before it is cleared, so that a save which is still going on there fails
    instead of committing what is gone. On local disks only attempts whose process ran on this host
    and is gone count, whatever their age.

    Args:
        root: folder or URL.
        dry_run: list only.
        older_than: leave alone what was written to since (by the store's clock).
        storage_options: of an object store.

    Returns:
        What was found, and removed unless ``dry_run``.

    Raises:
        StorageError: the store refused.
    """
    place = Location.given(root, storage_options)
    place.require_no_file()
    if place.is_local:
        return _sweep_folders(place, dry_run)
    before = datetime.now(UTC) - older_than
    found = []
    for target, objects in _uncovered(place).items():
        if any(when is not None and when > before for _, when in objects):
            continue
        size = sum(size for size, _ in objects)
        found.append(Leftover(_below(place, target).url, len(objects), size, "attempt"))
        if not dry_run:
            _clear(_below(place, target))
    return found + _sweep_uploads(place, before, dry_run)


def latest(
    root: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> str | None:
    """The committed checkpoint directly below a root whose name has the highest numbers
    (``step-1000`` after ``step-200``); ``None`` if there is none. Any process may call it. It goes
    by the names alone: where a run went back, see :meth:`CheckpointManager.latest`.

    Raises:
        StorageError: the store refused.
    """
    place = Location.given(root, storage_options)
    place.require_no_file()
    for name in sorted(place.listing(), key=_natural, reverse=True):
        below = place.child(name)
        if name.startswith(".") or not place.is_dir(name):
            continue
        if commit.is_checkpoint(below):
            return below.url
    return None


def delete_checkpoint(
    place: str | os.PathLike[str] | Location, *, storage_options: Mapping[str, Any] | None = None
) -> None:
    """Delete a checkpoint: its commit first, so that no reader opens what is half gone, then its
    data. Foreign files stay. Of a symbolic link the link alone is removed. Called by one process.

    In an object store the place is claimed before, as by a save. Of a deletion and a save at the
    same time the one that claimed later goes on.

    Raises:
        NotACheckpointError: there is none; what is there instead (an array of a checkpoint, a group
            of another program) is left as it is.
        StorageError: the store refused, or the place was claimed anew before anything was deleted.
    """
    location = Location.given(place, storage_options)
    if not commit.is_checkpoint(location):
        instead = what_else(location)
        found = f"is {instead}, not a checkpoint" if instead else "is not a distributed checkpoint"
        raise NotACheckpointError(f"{location.url} {found}; nothing was deleted", url=location.url)
    if location.is_local:
        commit.delete_folder(location)
    else:
        object_deletion.delete_all(location)


def _natural(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _below(place: Location, name: str) -> Location:
    return place.child(name) if name else place


# -- object stores -----------------------------------------------------------------------------


def _uncovered(place: Location) -> dict[str, list[tuple[int, datetime | None]]]:
    """Targets without a commit, relative to the root -> size and age of what is there.

    Told by claims and marks, which are there before anything else and go last, or by a manifest. No
    other name is certainly ours; chunks of layout 1 are where a mark or a document says so.
    """
    known = {name: (size, when) for name, size, when in place.remote.details()}
    names = list(known)
    targets: set[str] = set()
    for name in names:
        folder, _, last = name.rpartition("/")
        parent, _, above = folder.rpartition("/")
        if above == ATTEMPTS:
            targets.add(parent)
        elif last == MANIFEST_NAME:
            targets.add(folder)
    found = {}
    for target in sorted(targets):
        if inventory.is_committed(_below(place, target)):
            continue
        prefix = f"{target}/" if target else ""
        below = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        own = inventory.own_names(below, inventory.known_nodes(_below(place, target), below))
        if own:
            found[target] = [known[prefix + name] for name in own]
    return found


def _clear(target: Location) -> None:
    with contextlib.suppress(CheckpointExistsError):  # it was committed in the meantime
        object_commit.begin(target, allow_unconditional=True).withdraw_all()


def _sweep_uploads(place: Location, before: datetime, dry_run: bool) -> list[Leftover]:
    """Multipart uploads that were never completed (Amazon S3 API, ListMultipartUploads)."""
    fs = place.remote.fs
    if not hasattr(fs, "_call_s3"):
        return []
    bucket, _, prefix = place.url.partition("://")[2].partition("/")
    if prefix:
        prefix += "/"  # not those below names that only begin alike
    found = []
    more: dict[str, Any] = {}
    try:
        while True:
            listed = _s3(fs, "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            for upload in listed.get("Uploads") or []:
                if upload["Initiated"] > before:
                    continue
                key = upload["Key"]
                found.append(Leftover(f"s3://{bucket}/{key}", 1, 0, "upload"))
                if not dry_run:
                    _s3(
                        fs,
                        "abort_multipart_upload",
                        Bucket=bucket,
                        Key=key,
                        UploadId=upload["UploadId"],
                    )
            if not listed.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": listed["NextKeyMarker"],
                "UploadIdMarker": listed["NextUploadIdMarker"],
            }
    except Exception as error:
        raise explained("sweeping uploads below", place.url, error) from error


def _s3(fs: Any, method: str, **kwargs: Any) -> Any:
    return sync(fs.loop, fs._call_s3, method, timeout=DEADLINE_S, **kwargs)


# -- local folders -----------------------------------------------------------------------------


def _sweep_folders(place: Location, dry_run: bool) -> list[Leftover]:
    found = []
    for folder, names, _ in os.walk(place.url):
        attempts = [name for name in names if re.fullmatch(r"\..+\.attempt-.+", name)]
        names[:] = [name for name in names if name not in attempts]
        for name in attempts:
            attempt = Location.of(os.path.join(folder, name))
            if not commit.is_dead(attempt):
                continue
            files = _files(attempt.url)
            sizes = [os.path.getsize(path) for path in files if os.path.isfile(path)]
            found.append(Leftover(attempt.url, len(files), sum(sizes), "attempt"))
            if not dry_run:
                with contextlib.suppress(FileNotFoundError):
                    commit.remove_attempt(attempt)
    return found


def _files(folder: str) -> Sequence[str]:
    return [os.path.join(top, name) for top, _, names in os.walk(folder) for name in names]
