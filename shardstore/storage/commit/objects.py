"""Attempt and commit in an object store, without rename or locks: the newest claim owns the target.

A save writes directly to its target. It first claims the target: it creates the document
``.attempts/NNNNNN.json``, only if absent, with a number above all others. The attempt with the
highest number owns the target. An older attempt, dead or late, cannot damage it: attempts create
objects only if absent, and read the claims before they replace an existing object. The commit is
one conditional PUT of the last document, which contains the ID of its attempt. If the answer is
lost or is an error, the attempt reads the document back. No clock, lease or rename is involved.
(Create-if-absent: Amazon S3 user guide, "Conditional writes".)

Claims alone leave two races open: a new claim may come between the last read of the claims and the
commit, or between that read and a deletion of old objects. Two marks close them. The older attempt
sets ``NNNNNN.committing`` or ``NNNNNN.clearing`` before it reads the claims. The newer attempt
first claims, and then waits until these marks are gone. So at least one of the two sees the other.

If the store gives no clear answer to the commit's PUT, and reading back does not show the document,
the store may still carry out the PUT later. Then nothing is removed, and the mark
``NNNNNN.committing`` stays. The checkpoint is whole if the document appears, and the next attempt
waits for it before it deletes anything.

One process calls the functions of this module, unless a docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from shardstore.errors import CheckpointExistsError, CheckpointingException, StorageError
from shardstore.storage.checkpoint import ReplacedError
from shardstore.storage.commit.attempt import (
    Attempt,
    DeadTarget,
    Leftover,
    SupersededError,
    exists_error,
)
from shardstore.storage.commit.identity import (
    ATTEMPTS,
    has_dcp_metadata,
    is_checkpoint,
    is_committed,
)
from shardstore.storage.commit.inventory import (
    DELETING,
    deletion_rounds,
    known_nodes,
    numbers,
    own_names,
    remains,
)
from shardstore.storage.format.names import DCP_METADATA_NAME, MANIFEST_NAME
from shardstore.storage.movers.chunks import SmallFiles
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.parallel import run_together
from shardstore.storage.stores.errors import is_refusal
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix

SETTLE_S = 30.0
"""Seconds that a new claim waits for an older attempt that is about to commit: more than one PUT
with all its retries usually takes. If it is too short, the older save fails, but no data is
lost."""
POLL_S = 0.2
DELETED_AT_ONCE = 1000
"""Number of objects that are deleted between two looks at the claims."""

logger = logging.getLogger(__name__)

_honest: set[str] = set()
"""Stores that refused to create an existing object when this process tested them."""


class _UndecidedError(StorageError):
    """The store may have carried out the commit, or may do so later."""


@dataclass(frozen=True)
class ObjectAttempt(Attempt):
    """An attempt to write a checkpoint to an object store.

    It writes directly to its target. ``id`` is the number of the claim and a random part; the
    commit record contains it too.
    """

    target: ObjectPrefix

    @property
    def number(self) -> int:
        """The number of the claim."""
        return int(self.id.partition("-")[0])

    def mark(self, kind: str) -> str:
        """Return the name of the claim (``json``) or of a mark of this attempt."""
        return f"{ATTEMPTS}/{self.number:06d}.{kind}"

    # -- who owns the target -------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless this attempt still owns its target. Any rank may call it.

        Raises:
            SupersededError: a newer attempt owns the target or has finished there.
            StorageError: the store failed.
        """
        if by := self.outbid_by():
            raise self._superseded(by)

    def outbid_by(self) -> str | None:
        """Describe the attempt that owns the target instead of this one; ``None`` if this attempt
        still owns it.

        Raises:
            StorageError: the store failed.
        """
        there, own = run_together(
            lambda: self.target.remote.listing(ATTEMPTS),
            lambda: _read_claim(self.target, self.number),
        )
        newest = max(numbers(there, "json"), default=0)
        if newest > self.number:
            return _described(self.target, newest)
        if newest < self.number or own.get("id") != self.id:
            return "another attempt, which is finished"
        return None

    def _superseded(self, by: str) -> CheckpointingException:
        return self.target.error(
            f": the save or deletion (attempt {self.id}) was given up: the place belongs to {by}. "
            "If several saves or deletions are at one place, only the newest continues; save "
            "elsewhere, or one after the other",
            SupersededError,
        )

    def require_seen(self) -> None:
        """See :meth:`Attempt.require_seen`."""
        found = _read_claim(self.target, self.number).get("id")
        if found != self.id:
            there = "another claim" if found else "no claim"
            raise self.target.error(
                f": the coordinator began this save with claim {self.number:06d} of attempt "
                f"{self.id}, but this rank finds {there} of that number: the ranks' stores differ. "
                "Compare endpoint and credentials of the ranks (storage_options, AWS_ENDPOINT_URL "
                "and other variables of the environment)"
            )

    # -- what ranks write ----------------------------------------------------------------------

    def announce(self, nodes: Iterable[str], rank: int) -> None:
        """See :meth:`Attempt.announce`. Without a document, chunks of layout 1 (``w/0.1``) could
        belong to any program."""
        text = json.dumps(sorted(set(nodes))).encode()
        self.target.remote.write(self.mark(f"nodes-{rank}.json"), text)

    # -- commit --------------------------------------------------------------------------------

    def commit(self, documents: SmallFiles, *, durable: bool) -> None:
        """Write the last documents. The conditional PUT of the last one is the commit.

        Args:
            documents: names and contents.
            durable: ignored, because acknowledged objects are durable.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused, or a newer attempt took the target over; or the store
                gave no clear answer, and the text says that the commit is uncertain. In that case
                :meth:`abandon` removes nothing.
        """
        if not documents:
            raise self.target.error(" has no document to commit")
        name, data = documents[-1]
        try:
            # These writes come before the check, so that the commit follows it at once.
            self.put_all([*documents[:-1], (self.mark("committing"), self.id.encode())])
            self.check()
        except BaseException:
            self._settle_commit()
            raise
        try:
            if not self._publish(name, data) and not self._take_over(name, data):
                raise exists_error(self.target, meanwhile=True)
            names = self._look_once_more(name, data)
        except _UndecidedError as open_:
            raise self.target.error(
                f": whether the save was committed is not known: {open_.message}. The store may "
                "have committed it or may still do so; the checkpoint is then complete, because "
                "nothing was removed. Look for it (shardstore ls). If it is not there, save again; "
                "overwrite=True replaces it if it is"
            ) from open_.__cause__
        except CheckpointingException:
            self._settle_commit()
            raise
        self.withdraw_all(names)

    def _settle_commit(self) -> None:
        """Remove the mark ``committing``, so that newer attempts do not wait. It is certain that
        this attempt has not committed and will not commit."""
        with contextlib.suppress(StorageError):
            self.target.remote.delete([self.mark("committing")])

    def _publish(self, name: str, data: bytes) -> bool:
        """Send the conditional PUT that commits. Return whether the stored commit is this one.

        Raises:
            SupersededError: a newer attempt owns the target.
            StorageError: the store refused the commit.
            _UndecidedError: the store may have carried out the commit, or may do so later.
        """
        store = self.target.remote
        failure: StorageError | None = None
        try:
            if store.create(name, data):
                return True
        except StorageError as error:
            failure = error
        there = None
        try:
            there = store.read_range(name, 0, None)
        except StorageError as error:
            failure = failure or error
        if there == data:
            return True
        if failure is not None and there is None:
            if is_refusal(failure):
                raise failure
            raise _UndecidedError(failure.message) from failure
        # Another attempt committed, or a newer attempt has already deleted this commit.
        self.check()
        return False

    def _take_over(self, name: str, data: bytes) -> bool:
        """Replace the late commit of an older attempt. Return whether the commit is now this one.

        This attempt waited for the older one, took it for dead and deleted its data. The older save
        has not reported success. A commit of any other attempt stays.
        """
        store = self.target.remote
        there = store.read_range(name, 0, None)
        late = [
            store.read_range(f"{ATTEMPTS}/{number:06d}.committing", 0, None)
            for number in numbers(store.listing(ATTEMPTS), "committing")
            if number < self.number
        ]
        if there is not None and not any(id_ and id_ in there for id_ in late):
            return False
        logger.warning(
            "%s: the commit of an older attempt came too late and is replaced", self.target.url
        )
        store.delete([name])
        return self._publish(name, data)

    def _look_once_more(self, name: str, data: bytes) -> list[str]:
        """Wait until no newer claim competes with this commit.

        A newer attempt that claimed before the commit either sees the commit and withdraws its
        claim, or has deleted the commit.

        Returns:
            Names of the claims and marks.

        Raises:
            SupersededError: the newer attempt deleted the commit, or did not withdraw in time and
                the commit was taken back.
        """
        store = self.target.remote
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                names = store.listing(ATTEMPTS)
                newest = max(numbers(names, "json"), default=0)
                if newest <= self.number:
                    return names
                ours = store.read_range(name, 0, None) == data
            except StorageError as error:
                raise _UndecidedError(error.message) from error
            if not ours or time.monotonic() > deadline:
                by = _described(self.target, newest)
                if ours:
                    self._take_back(name, data)
                raise self._superseded(by)
            time.sleep(POLL_S)

    def _take_back(self, name: str, data: bytes) -> None:
        """Delete this commit, because a newer attempt has not seen it and may have deleted its
        data. A new claim protects the deletion, so that it does not delete a newer commit."""
        claim = claimed(self.target)
        try:
            claim.settled_names()
            if self.target.remote.read_range(name, 0, None) == data:
                self.target.remote.delete([name])
        finally:
            claim.withdraw()

    # -- clearing ------------------------------------------------------------------------------

    def settled_names(self) -> list[str]:
        """Wait until no older attempt is committing or clearing. Return the names of all objects
        at the target, without this attempt's own claim."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            names = [name for name in self.target.remote.walk() if name != self.mark("json")]
            clearing, committing = (
                min(numbers(names, kind), default=self.number) < self.number
                for kind in ("clearing", "committing")
            )
            if not clearing and (not committing or is_committed(self.target, names)):
                return names
            if time.monotonic() > deadline:
                logger.warning(
                    "%s: an older attempt has stopped before its commit; it is taken for dead",
                    self.target.url,
                )
                return names
            time.sleep(POLL_S)

    def clear(self, names: Sequence[str]) -> str | None:
        """Delete the objects of other attempts, or a checkpoint.

        Returns:
            A description of the newer attempt that took the target over in the meantime and deletes
            the rest; ``None`` if everything was deleted.

        Raises:
            SupersededError: a newer attempt took the target over before anything was deleted.
        """
        store, begun = self.target.remote, False
        if not names:
            return None
        store.write(self.mark("clearing"), self.id.encode())
        try:
            for some in deletion_rounds(names, DELETED_AT_ONCE):
                if by := self.outbid_by():
                    if begun:
                        return by
                    raise self._superseded(by)
                begun = True
                store.delete(some)
        finally:
            store.delete([self.mark("clearing")])
        return None

    def abandon(self) -> None:
        """Remove the objects and the claim of this attempt. If that fails, the claim stays and
        shows that the remaining objects belong to a save; the next attempt removes them. If the
        store may still carry out the commit, nothing is removed."""
        with contextlib.suppress(StorageError, FileNotFoundError):
            names = self.target.remote.walk()
            if self.mark("committing") not in names and not self.clear(remains(self.target, names)):
                self.withdraw([name for name in names if name.startswith(self.mark("nodes-"))])

    def withdraw(self, marks: Sequence[str] = ()) -> None:
        """Remove this claim, its mark ``committing`` and the given marks. Other claims stay."""
        if _read_claim(self.target, self.number).get("id") == self.id:
            self.target.remote.delete([*marks, self.mark("committing"), self.mark("json")])

    def withdraw_all(self, names: Sequence[str] | None = None) -> None:
        """Remove the claims and marks of this attempt and of older attempts, in the order of their
        numbers.

        Args:
            names: the names below :data:`ATTEMPTS`, if the caller has listed them.
        """
        try:
            store = self.target.remote
            names = store.listing(ATTEMPTS) if names is None else names
            done = sorted((n for n in names if _number_of(n) <= self.number), key=_number_of)
            store.delete([f"{ATTEMPTS}/{name}" for name in done])
        except StorageError as error:
            logger.warning(
                "%s: claims of finished attempts could not be removed: %s", self.target.url, error
            )


def _number_of(name: str) -> int:
    """Return the number that a claim's or mark's name begins with; 0 for other names."""
    found = re.match(r"\d+", name)
    return int(found.group()) if found else 0


def _read_claim(target: Location, number: int) -> dict[str, object]:
    """Return the content of a claim; empty if the claim is gone or cannot be parsed."""
    try:
        about = json.loads(target.read_range(f"{ATTEMPTS}/{number:06d}.json") or b"")
    except (ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _described(target: Location, number: int) -> str:
    """Describe the attempt of a claim for an error text."""
    about = _read_claim(target, number)
    return (
        f"the newer attempt {about.get('id', f'{number:06d}')} of process {about.get('pid', '?')} "
        f"on {about.get('host', '?')}"
    )


def claimed(place: ObjectPrefix, names: Sequence[str] | None = None) -> ObjectAttempt:
    """Claim a target with the next free number. Nothing at the target is deleted.

    Args:
        place: the target.
        names: the names below :data:`ATTEMPTS`, if the caller has listed them.

    Raises:
        StorageError: the store failed, or does not list an existing claim.
    """
    token = secrets.token_hex(8)
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = place.remote.listing(ATTEMPTS) if names is None else names
        number = max(numbers(names, "json", "committing", "clearing"), default=0) + 1
        names = None
        attempt = ObjectAttempt(place, f"{number:06d}-{token}")
        about = {
            "id": attempt.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if place.remote.create(attempt.mark("json"), json.dumps(about).encode()):
            return attempt
        # Another attempt has this number, or this claim was created and the answer was lost.
        if _read_claim(place, number).get("id") == attempt.id:
            return attempt
        if time.monotonic() > deadline:
            raise place.error(
                f": the store says that {attempt.mark('json')} exists, but does not list it; saves "
                "need a store whose listings are up to date (with Ceph's gateway, a bucket that "
                "never had versioning)"
            )


def begin(place: ObjectPrefix, options: SaveOptions) -> ObjectAttempt:
    """Claim a target, and delete the objects of dead attempts. One process calls it.

    With ``overwrite``, a checkpoint at the target is deleted here, its commit first. Until the new
    commit the target holds no checkpoint, and never a mixed one.

    Raises:
        CheckpointExistsError: the target holds a checkpoint and ``overwrite`` is false.
        StorageError: the store refused, did not answer, or ignores create-if-absent.
    """
    claims, committed = run_together(
        lambda: place.remote.listing(ATTEMPTS),
        lambda: not options.overwrite and is_committed(place),
    )
    if committed:
        raise exists_error(place)
    if not options.allow_unconditional:
        _require_conditions(place)
    attempt = claimed(place, claims)
    try:
        names = attempt.settled_names()
        if not options.overwrite and (is_committed(place, names) or _is_of_dcp(place, names)):
            raise exists_error(place)
        if attempt.clear(remains(place, names)):
            attempt.check()
    except BaseException:
        with contextlib.suppress(StorageError):
            attempt.withdraw()
        raise
    return attempt


def _is_of_dcp(place: Location, names: Sequence[str]) -> bool:
    """Return whether a place holds a checkpoint of PyTorch DCP, and no remains of a dead save that
    wrote one."""
    dead = any(name.startswith(f"{ATTEMPTS}/") for name in names)
    return DCP_METADATA_NAME in names and not dead and has_dcp_metadata(place)


def _require_conditions(place: ObjectPrefix) -> None:
    """Create a probe object twice, by the client for documents and by the one for chunks. The store
    must refuse the second creation.

    Raises:
        StorageError: the store did not refuse it, or the two clients use different stores.
    """
    store = place.remote
    # The key stands for one endpoint and bucket.
    known = f"{id(store.fs)} {'/'.join(place.url.split('/')[:3])}"
    if known in _honest:
        return
    probe = f"{ATTEMPTS}/probe-{secrets.token_hex(8)}"
    try:
        first = store.create(probe, b"first")
        second = place.io().put(probe, [b"second"], create=True)
        apart = first and second and store.read_range(probe, 0, None) == b"first"
    finally:
        with contextlib.suppress(StorageError):
            store.delete([probe])
    if apart:
        raise place.error(
            ": documents and chunks go to different stores, because two clients use different "
            "endpoints: give the endpoint in storage_options, and look for AWS_* variables and "
            "profiles that name another"
        )
    if second:
        condition, but = "the condition that an object must be new", ""
        if place.driver == "s3":
            condition = "If-None-Match"
            but = " (Ceph's gateway honours it only in a bucket without versioning)"
        raise place.error(
            f": the store ignores {condition} (it created one object twice), so that two saves to "
            f"one place could mix their data; use a store that honours it{but}, or pass "
            "allow_unconditional=True if two saves never write to one place"
        )
    if first:
        _honest.add(known)


def delete(place: ObjectPrefix) -> None:
    """Delete a checkpoint, its commit first. Objects of other programs stay. One process calls it.

    Two marks exist until everything is deleted. Newer attempts wait for the mark with the number of
    the claim. The mark without a number stays if the store fails, so that the sweeper finds the
    rest.

    Raises:
        StorageError: the store failed, or another process claimed the place before anything was
            deleted. A process that claims the place later deletes the rest.
    """
    attempt = claimed(place)
    try:
        names = remains(place, attempt.settled_names())
        place.remote.write(DELETING, b"")
        by = attempt.clear(names)
    except BaseException as error:
        with contextlib.suppress(StorageError):
            if isinstance(error, SupersededError):
                place.remote.delete([DELETING])
            attempt.withdraw()
        if not isinstance(error, SupersededError):
            raise
        raise place.error(f" was not deleted: {error.message}") from error
    if by is None:
        attempt.withdraw_all()
    else:
        logger.warning("%s: deleted; the rest of its data is deleted by %s", place.url, by)
        attempt.withdraw()


def join(place: ObjectPrefix, attempt_id: str, options: SaveOptions) -> ObjectAttempt:
    """See :meth:`Commits.join`."""
    return ObjectAttempt(place, attempt_id)


def resumed(place: ObjectPrefix, attempt_id: str, options: SaveOptions) -> ObjectAttempt | None:
    """See :meth:`Commits.resumed`."""
    attempt = ObjectAttempt(place, attempt_id)
    try:
        attempt.check()
    except StorageError:
        return None
    return attempt


def dead_targets(root: ObjectPrefix, older_than: timedelta) -> Iterator[DeadTarget]:
    """See :meth:`Commits.dead_targets`."""

    def remove(place: ObjectPrefix) -> list[str]:
        if is_checkpoint(place):
            return []
        return [left.url for left in sweep_below(place, older_than, False)]

    for name in root.listing():
        place = ObjectPrefix(f"{root.url}/{name}", root.options)
        yield place, partial(remove, place)


def sweep_below(place: ObjectPrefix, older_than: timedelta, dry_run: bool) -> list[Leftover]:
    """See :meth:`Commits.sweep_below`."""
    before = datetime.now(UTC) - older_than
    return _sweep_targets(place, before, dry_run) + _sweep_uploads(place, before, dry_run)


def _sweep_targets(place: ObjectPrefix, before: datetime, dry_run: bool) -> list[Leftover]:
    """Find targets in an object store that have no commit, and remove their objects if asked to.

    It finds them by claims and marks, which are created first and removed last, or by a manifest.
    Other programs may use all other names. Chunks of layout 1 belong to a checkpoint only if a mark
    or a document lists them.
    """
    known = {name: (size, when) for name, size, when in place.remote.details()}
    targets = set()
    for name in known:
        above, _, last = f"/{name}".rpartition("/")
        if last == MANIFEST_NAME or above.endswith(f"/{ATTEMPTS}"):
            targets.add(above.removesuffix(f"/{ATTEMPTS}").lstrip("/"))
    found = []
    for path in sorted(targets):
        prefix = f"{path}/" if path else ""
        target = ObjectPrefix(f"{place.url}/{path}".rstrip("/"), place.options)
        # Another process may commit, replace or delete it in the meantime.
        with contextlib.suppress(CheckpointExistsError, ReplacedError, SupersededError):
            if is_committed(target):
                continue
            names = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
            own = [known[prefix + name] for name in own_names(names, *known_nodes(target, names))]
            if not own or any(when is not None and when > before for _, when in own):
                continue
            if not dry_run:
                begin(target, SaveOptions(allow_unconditional=True)).withdraw_all()
            found.append(Leftover(target.url, len(own), sum(size for size, _ in own), "attempt"))
    return found


def _sweep_uploads(place: ObjectPrefix, before: datetime, dry_run: bool) -> list[Leftover]:
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
