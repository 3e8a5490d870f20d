"""Attempt and commit in an object store, which has neither rename nor locks: the newest claim owns.

A save writes straight to its target. It claims the target first: a document
``.attempts/NNNNNN.json``, created only if absent, with a number above all others. Whoever holds the
highest number owns the target; an older attempt, dead or late, is fenced off, because objects are
created and not replaced, and because it asks for the claims wherever there is one already. The
commit is one conditional PUT of the last document, whose own content says whose it is: where the
answer is lost, or is an error, it is read back. No clock, lease or rename is involved.
(Create-if-absent: Amazon S3 user guide, "Conditional writes".)

The races that claims alone leave open (a new claim between the last look at the claims and the
commit, or the deletion of leftovers) are closed by marks ``NNNNNN.committing`` and
``NNNNNN.clearing`` which the older attempt sets before it looks, and which the newer one, having
claimed, waits for to be settled: one of the two always sees the other.

Where the commit's PUT has no answer that decides it, and reading back does not show it, it may
still be carried out. Then nothing is removed, and the mark ``NNNNNN.committing`` stays, which says
so: the checkpoint is whole if it comes, and the next attempt waits for it before it clears
anything.

One process calls what is here, unless a docstring says otherwise.
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from shardstore.errors import CheckpointingException, StorageError
from shardstore.storage.commit.attempt import Attempt, SupersededError, exists_error
from shardstore.storage.commit.inventory import (
    ATTEMPTS,
    DELETING,
    deletion_rounds,
    is_committed,
    numbers,
    remains,
)
from shardstore.storage.movers.parallel import run_together
from shardstore.storage.stores.errors import is_refusal
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import object_io, put_objects

SETTLE_S = 30.0
"""How long a new claim waits for an older attempt that is about to commit: longer than one PUT with
all its retries usually takes. Too short costs the older attempt its success, never anybody's
data."""
POLL_S = 0.2

logger = logging.getLogger(__name__)

_honest: set[str] = set()
"""Stores of this process that were seen to refuse a second creation."""


class _UndecidedError(StorageError):
    """The commit may be there, or come later."""


@dataclass(frozen=True)
class ObjectAttempt(Attempt):
    """One try at writing a checkpoint to an object store.

    It is written at its target. ``id`` is the number of the claim and a random part; it is in the
    commit record too.
    """

    defers_documents: ClassVar[bool] = True

    @property
    def location(self) -> Location:
        """The target itself."""
        return self.target

    @property
    def number(self) -> int:
        """Of the claim."""
        return int(self.id.partition("-")[0])

    def mark(self, kind: str) -> str:
        """Name of the claim (``json``) or of a mark of this attempt."""
        return f"{ATTEMPTS}/{self.number:06d}.{kind}"

    # -- who owns the target -------------------------------------------------------------------

    def check(self) -> None:
        """Raise unless this attempt still owns its target. Any rank may call it.

        Raises:
            SupersededError: names the newer attempt, or says that another one was committed.
        """
        if by := self.outbid_by():
            raise self._superseded(by)

    def outbid_by(self) -> str | None:
        """Who owns the target in the place of this attempt, in words; ``None``: it does itself.

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
            return "another one, which is finished"
        return None

    def _superseded(self, by: str) -> SupersededError:
        error = SupersededError(
            f"the save to {self.target.url} (attempt {self.id}) was given up: the target belongs "
            f"to {by}. Of several saves to one place the newest goes on; save elsewhere, or one "
            "after the other",
            url=self.target.url,
        )
        error.by = by
        return error

    def require_seen(self) -> None:
        """See :meth:`Attempt.require_seen`."""
        found = _read_claim(self.target, self.number).get("id")
        if found != self.id:
            there = "another one" if found else "none"
            raise StorageError(
                f"the claim {self.number:06d} of attempt {self.id}, with which the coordinator of "
                f"this save began, is not at {self.target.url} as this rank sees it ({there} is): "
                "the ranks' stores differ. Compare endpoint and credentials of the ranks "
                "(storage_options, AWS_ENDPOINT_URL and other variables of the environment)",
                url=self.target.url,
            )

    # -- what ranks write ----------------------------------------------------------------------

    def announce(self, nodes: Iterable[str], rank: int) -> None:
        """See :meth:`Attempt.announce`: chunks of layout 1 (``w/0.1``) could be anybody's as long
        as there is no document."""
        text = json.dumps(sorted(set(nodes))).encode()
        self.target.remote.write(self.mark(f"nodes-{rank}.json"), text)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, in the place of a leftover if need be. Any rank may call it."""
        if not self.target.remote.create(name, data):
            self._settle(name, data)

    def put_all(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Write many, in parallel. Any rank may call it."""
        put_objects(self.target, documents, self._settle)

    def _settle(self, name: str, data: bytes) -> None:
        """There is an object of that name: ours, a leftover, or a newer attempt's."""
        if self.target.remote.read_range(name, 0, None) != data:
            self.check()
            self.target.remote.write(name, data)

    # -- commit --------------------------------------------------------------------------------

    def commit(self, documents: Sequence[tuple[str, bytes]], *, durable: bool) -> None:
        """Write the last documents, the last of all by one conditional PUT, which is the commit.

        Args:
            documents: names and contents.
            durable: of no meaning here.

        Raises:
            CheckpointExistsError: another checkpoint was committed there in the meantime.
            StorageError: the store refused, or a newer attempt took the target over. Or the store
                did not say whether it committed: then its text says so, and :meth:`abandon` leaves
                everything as it is.
        """
        if not documents:
            raise StorageError(
                f"nothing that could commit {self.target.url} was written", url=self.target.url
            )
        name, data = documents[-1]
        try:
            # All of them before the look: nothing but one request comes between that and the
            # commit.
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
            raise StorageError(
                f"whether {self.target.url} was committed is not known: {open_.message}. It may be "
                "there, or come yet, and is whole then, for nothing was removed. Look for it "
                "(shardstore ls); save there again where it has not come, or with overwrite=True "
                "where it has",
                url=self.target.url,
            ) from open_.__cause__
        except CheckpointingException:
            self._settle_commit()
            raise
        self.withdraw_all(names)

    def _settle_commit(self) -> None:
        """It is certain that there is no commit of this attempt, and that none will come: nobody
        has to wait for it."""
        with contextlib.suppress(StorageError):
            self.target.remote.delete([self.mark("committing")])

    def _publish(self, name: str, data: bytes) -> bool:
        """Return the conditional PUT. Whether the commit that is there then is ours."""
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
        # Somebody else's, or one that a newer attempt has deleted again.
        self.check()
        return False

    def _take_over(self, name: str, data: bytes) -> bool:
        """Replace the commit of an older attempt that was held up for longer than this one waited
        for it, and whose data this one has cleared: nobody was told that it succeeded. Whether the
        commit is ours then; any other commit stays."""
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
        """Return a claim that came between: it withdraws when it sees this commit, or has replaced
        it.

        Returns:
            Names of the claims and marks.
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
        """Delete this commit: a newer attempt does not know of it, and may have deleted what
        belongs to it. Under a claim of its own, so that no commit of that attempt is met."""
        claim = claimed(self.target)
        try:
            claim.settled_names()
            if self.target.remote.read_range(name, 0, None) == data:
                self.target.remote.delete([name])
        finally:
            claim.withdraw()

    # -- clearing ------------------------------------------------------------------------------

    def settled_names(self) -> list[str]:
        """Return the names of all that is at the target but this claim, once no older attempt is
        between its last look at the claims and what follows it."""
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
                    "%s: an attempt that was about to commit does not go on; it is taken for dead",
                    self.target.url,
                )
                return names
            time.sleep(POLL_S)

    def clear(self, names: Sequence[str]) -> str | None:
        """Delete what other attempts left, or a checkpoint.

        Returns:
            The newer attempt that took the target over meanwhile and does the rest, in words.

        Raises:
            SupersededError: it did so before anything was deleted.
        """
        store, begun = self.target.remote, False
        if not names:
            return None
        store.write(self.mark("clearing"), self.id.encode())
        try:
            for some in deletion_rounds(names, store.deletes_at_once):
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
        """Remove what was written, as far as the store lets us; the next attempt does the rest. The
        claim stays where that fails: it says that what is left is of a save. All of it stays where
        the commit may still come."""
        with contextlib.suppress(StorageError, FileNotFoundError):
            names = self.target.remote.walk()
            if self.mark("committing") not in names and not self.clear(remains(self.target, names)):
                said = self.mark("nodes-")
                self.withdraw([name for name in names if name.startswith(said)])

    def withdraw(self, marks: Sequence[str] = ()) -> None:
        """Take back this claim alone, and marks of it."""
        if _read_claim(self.target, self.number).get("id") == self.id:
            self.target.remote.delete([*marks, self.mark("committing"), self.mark("json")])

    def withdraw_all(self, names: Sequence[str] | None = None) -> None:
        """Take back this claim and those of attempts that it superseded, the claims last.

        Args:
            names: those below :data:`ATTEMPTS`, where they are known already.
        """
        try:
            store = self.target.remote
            names = store.listing(ATTEMPTS) if names is None else names
            done = sorted((n for n in names if _number_of(n) <= self.number), key=_number_of)
            store.delete([f"{ATTEMPTS}/{name}" for name in done])
        except StorageError as error:
            logger.warning(
                "%s: claims that are done with could not be removed: %s", self.target.url, error
            )


def _number_of(name: str) -> int:
    """Return the number that a claim's or mark's name begins with; 0 for other names."""
    found = re.match(r"\d+", name)
    return int(found.group()) if found else 0


def _read_claim(target: Location, number: int) -> dict[str, object]:
    """What a claim says of its attempt; empty where it is gone, or is no claim."""
    try:
        about = json.loads(target.remote.read(f"{ATTEMPTS}/{number:06d}.json"))
    except (FileNotFoundError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _described(target: Location, number: int) -> str:
    """Return the attempt of a claim, in words for an error."""
    about = _read_claim(target, number)
    return (
        f"the newer attempt {about.get('id', f'{number:06d}')} of process {about.get('pid', '?')} "
        f"on {about.get('host', '?')}"
    )


def claimed(
    place: Location, overwrite: bool = False, names: Sequence[str] | None = None
) -> ObjectAttempt:
    """Claim a target with the next free number; it is as older attempts left it.

    Args:
        place: the target.
        overwrite: a checkpoint that is there may be replaced.
        names: those below :data:`ATTEMPTS`, where they are known already.

    Raises:
        StorageError: the store refused, or does not list a claim that is there.
    """
    token = secrets.token_hex(8)
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = place.remote.listing(ATTEMPTS) if names is None else names
        number = max(numbers(names, "json", "committing", "clearing"), default=0) + 1
        names = None
        attempt = ObjectAttempt(place, f"{number:06d}-{token}", overwrite)
        about = {
            "id": attempt.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if place.remote.create(attempt.mark("json"), json.dumps(about).encode()):
            return attempt
        # Lost; or won, and the answer was lost.
        if _read_claim(place, number).get("id") == attempt.id:
            return attempt
        if time.monotonic() > deadline:
            raise StorageError(
                f"claiming {place.url} failed: the store says that {attempt.mark('json')} is "
                "there, and does not list it; saves need a store whose listings are up to date",
                url=place.url,
            )


def begin(
    place: Location, *, overwrite: bool = False, allow_unconditional: bool = False
) -> ObjectAttempt:
    """Claim a target, and clear it of what dead attempts left. Called by one process.

    Args:
        place: the target.
        overwrite: a checkpoint that is there may be replaced; it is deleted here, its commit
            first, so that for a while there is none, and never a mixed one.
        allow_unconditional: go on where the store ignores create-if-absent.

    Raises:
        CheckpointExistsError: a checkpoint is there and may not be replaced.
        StorageError: the store refused, does not answer, or ignores create-if-absent.
    """
    claims, committed = run_together(
        lambda: place.remote.listing(ATTEMPTS), lambda: not overwrite and is_committed(place)
    )
    if committed:
        raise exists_error(place)
    if not allow_unconditional:
        _require_conditions(place)
    attempt = claimed(place, overwrite, claims)
    try:
        names = attempt.settled_names()
        if not overwrite and is_committed(place, names):
            raise exists_error(place)
        if attempt.clear(remains(place, names)):
            attempt.check()
    except BaseException:
        with contextlib.suppress(StorageError):
            attempt.withdraw()
        raise
    return attempt


def _require_conditions(place: Location) -> None:
    """Create a probe twice, as documents are created and as chunks are: the second must be refused.

    Raises:
        StorageError: it was not; or the two do not go to one store.
    """
    store = place.remote
    scheme, _, rest = place.url.partition("://")
    # Of one endpoint and bucket.
    known = f"{id(store.fs)} {scheme}://{rest.partition('/')[0]}"
    if known in _honest:
        return
    probe = f"{ATTEMPTS}/probe-{secrets.token_hex(8)}"
    try:
        first = store.create(probe, b"first")
        second = object_io(place).put(probe, [b"second"], create=True)
        apart = first and second and store.read_range(probe, 0, None) == b"first"
    finally:
        with contextlib.suppress(StorageError):
            store.delete([probe])
    if apart:
        raise StorageError(
            f"{place.url}: documents and chunks go to different stores, as two clients see "
            "different endpoints: give the endpoint in storage_options, and look for AWS_* "
            "variables and profiles that name another",
            url=place.url,
        )
    if second:
        condition, but = "the condition that an object must be new", ""
        if scheme in ("s3", "s3a"):
            condition = "If-None-Match"
            but = " (Ceph's gateway does not in a bucket with versioning: one without will do)"
        raise StorageError(
            f"{place.url}: the store ignores {condition} (it created one object twice), so that "
            "two saves to one place could mix unnoticed; use a store that honours it"
            f"{but}, or pass allow_unconditional=True where no two saves ever go to one place",
            url=place.url,
        )
    if first:
        _honest.add(known)


def delete(place: Location) -> None:
    """Delete a checkpoint, its commit first; foreign objects stay. Called by one process.

    Until all is gone there are two marks. One has the number of the claim: newer attempts wait for
    it. The other one has none, and stays also where the store refuses: it tells the sweeper what is
    left.

    Raises:
        StorageError: the store failed; or another process claimed the place before anything was
            deleted. If it claims the place later, it clears the rest.
    """
    attempt = claimed(place)
    try:
        names = remains(place, attempt.settled_names())
        place.remote.write(DELETING, b"")
        by = attempt.clear(names)
    except SupersededError as error:
        with contextlib.suppress(StorageError):
            place.remote.delete([DELETING])
            attempt.withdraw()
        raise StorageError(
            f"{place.url} was not deleted: meanwhile the place was claimed by {error.by}. Delete "
            "it again once that one is done",
            url=place.url,
        ) from error
    except BaseException:
        with contextlib.suppress(StorageError):
            attempt.withdraw()
        raise
    if by is None:
        attempt.withdraw_all()
    else:
        logger.warning("%s: deleted; what is left of its data is cleared by %s", place.url, by)
        attempt.withdraw()
