"""Attempt and commit in an object store, which has neither rename nor locks: the newest claim owns.

A save writes straight to its target. It claims the target first: a document
``.attempts/NNNNNN.json``, created only if absent, with a number above all others. Whoever holds the
highest number owns the target; an older attempt, dead or late, is fenced off, because objects are
created and not replaced, and because it asks for the claims wherever there is one already. The
commit is one conditional PUT of the last document, whose own content says whose it is: where the
answer is lost, or is an error, it is read back. No clock, lease or rename is involved.

The races that claims alone leave open (a new claim between the last look at the claims and the
commit, or the deletion of leftovers) are closed by marks ``NNNNNN.committing`` and
``NNNNNN.clearing`` which the older attempt sets before it looks, and which the newer one, having
claimed, waits for to be settled: one of the two always sees the other.

Where the commit's PUT has no answer that decides it, and reading back does not show it, it may
still be carried out. Then nothing is removed, and the mark ``NNNNNN.committing`` stays, which says
so: the checkpoint is whole if it comes, and the next attempt waits for it before it clears
anything.

One process calls what is here, unless a docstring says otherwise. :mod:`.claims` makes and reads
claims; :mod:`.inventory` lists the objects of a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardstore.errors import CheckpointExistsError, CheckpointingException, StorageError
from shardstore.storage.commit.attempt import SupersededError
from shardstore.storage.commit.claims import (
    ATTEMPTS,
    CLAIM,
    CLEARING,
    COMMITTING,
    DELETING,
    SETTLE_S,
    claims,
    described,
    make_claim,
    number_of,
    numbers,
    read_claim,
    require_conditions,
)
from shardstore.storage.commit.inventory import (
    committed_among,
    deletion_rounds,
    is_committed,
    known_nodes,
    leftovers,
)
from shardstore.storage.movers.parallel import run_together
from shardstore.storage.stores.errors import is_refusal
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import put_objects

__all__ = ["ObjectAttempt", "begin", "claimed", "delete_all", "join", "settled_names"]

POLL_S = 0.2

logger = logging.getLogger(__name__)


class _UndecidedError(StorageError):
    """The commit may be there, or come later."""


@dataclass(frozen=True)
class ObjectAttempt:
    """One try at writing a checkpoint to an object store.

    Attributes:
        target: where the checkpoint shall be, and where it is written.
        id: number of the claim and a random part; in the commit record too.
        overwrite: whether a checkpoint at the target may be replaced.
    """

    target: Location
    id: str
    overwrite: bool = False

    @property
    def location(self) -> Location:
        """The target itself."""
        return self.target

    @property
    def defers_documents(self) -> bool:
        """Yes: what lies at the target can be opened by others."""
        return True

    @property
    def number(self) -> int:
        """Of the claim."""
        return int(self.id.partition("-")[0])

    def check(self) -> None:
        """Raise unless this attempt still owns its target. Any rank may call it.

        Raises:
            StorageError: names the newer attempt, or says that another one was committed.
        """
        if by := self.outbid_by():
            raise self._superseded(by)

    def require_seen(self) -> None:
        """See :meth:`Attempt.require_seen`."""
        found = read_claim(self.target, self.number).get("id")
        if found != self.id:
            there = "another one" if found else "none"
            raise StorageError(
                f"the claim {self.number:06d} of attempt {self.id}, with which the coordinator of "
                f"this save began, is not at {self.target.url} as this rank sees it ({there} is): "
                "the ranks' stores differ. Compare endpoint and credentials of the ranks "
                "(storage_options, AWS_ENDPOINT_URL and other variables of the environment)",
                url=self.target.url,
            )

    def outbid_by(self) -> str | None:
        """Who owns the target in the place of this attempt, in words; ``None``: it does itself.

        Raises:
            StorageError: the store refused.
        """
        numbers_there, own = run_together(
            lambda: claims(self.target), lambda: read_claim(self.target, self.number)
        )
        newest = max(numbers_there, default=0)
        if newest > self.number:
            return described(self.target, newest)
        if newest < self.number or own.get("id") != self.id:
            return "another one, which is finished"
        return None

    def announce(self, nodes: Iterable[str], rank: int) -> None:
        """Leave word that chunks below nodes are this attempt's. Any rank may call it, once.

        For layout 1: its chunks (``w/0.1``) could be anybody's as long as there is no document.
        """
        text = json.dumps(sorted(set(nodes))).encode()
        self.target.remote.write(f"{ATTEMPTS}/{self.number:06d}.nodes-{rank}.json", text)

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, in the place of a leftover if need be. Any rank may call it."""
        if not self.target.remote.create(name, data):
            self._settle(name, data)

    def put_all(self, documents: Sequence[tuple[str, bytes]]) -> None:
        """Write many, in parallel. Any rank may call it."""
        put_objects(self.target, documents, self._settle)

    def _settle(self, name: str, data: bytes) -> None:
        """There is an object of that name: ours, a leftover, or a newer attempt's."""
        try:
            if self.target.remote.read(name) == data:
                return
        except FileNotFoundError:
            pass
        self.check()
        self.target.remote.write(name, data)

    def flush(self) -> None:
        """Nothing to wait for: what a store has acknowledged is durable."""

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
            self.put_all([*documents[:-1], (self._committing, self.id.encode())])
            self.check()
        except BaseException:
            self._settle_commit()
            raise
        try:
            if not self._publish(name, data) and not self._take_over(name, data):
                raise CheckpointExistsError(
                    f"{self.target.url} already exists: another checkpoint was committed there "
                    "while this one was being written; pass overwrite=True to replace it, or save "
                    "elsewhere",
                    url=self.target.url,
                )
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
        self._clean_up(names)

    @property
    def _committing(self) -> str:
        """The mark: the commit may be under way."""
        return f"{ATTEMPTS}/{self.number:06d}.committing"

    def _settle_commit(self) -> None:
        """It is certain that there is no commit of this attempt, and that none will come: nobody
        has to wait for it."""
        with contextlib.suppress(StorageError):
            self.target.remote.delete([self._committing])

    def _publish(self, name: str, data: bytes) -> bool:
        """The conditional PUT. Whether the commit that is there then is ours."""
        failure: StorageError | None = None
        try:
            if self.target.remote.create(name, data):
                return True
        except StorageError as error:
            failure = error
        try:
            there = self._read_back(name)
        except StorageError as error:
            there, failure = None, failure or error
        if there == data:
            return True
        if failure is not None and there is None:
            if is_refusal(failure):
                raise failure
            raise _UndecidedError(failure.message) from failure
        # Somebody else's, or one that a newer attempt has deleted again.
        self.check()
        return False

    def _read_back(self, name: str) -> bytes | None:
        for _ in range(2):
            with contextlib.suppress(StorageError):
                return self.target.remote.read_range(name, 0, None)
            time.sleep(POLL_S)
        return self.target.remote.read_range(name, 0, None)

    def _take_over(self, name: str, data: bytes) -> bool:
        """Replace the commit of an older attempt that was held up for longer than this one waited
        for it, and whose data this one has cleared: nobody was told that it succeeded. Whether the
        commit is ours then; any other commit stays."""
        store = self.target.remote
        there = store.read_range(name, 0, None)
        marks = numbers(store.listing(ATTEMPTS), COMMITTING)
        ids = [
            store.read_range(f"{ATTEMPTS}/{number:06d}.committing", 0, None)
            for number in marks
            if number < self.number
        ]
        if there is not None and not any(late and late in there for late in ids):
            return False
        logger.warning(
            "%s: the commit of an older attempt came too late and is replaced", self.target.url
        )
        store.delete([name])
        return self._publish(name, data)

    def _look_once_more(self, name: str, data: bytes) -> list[str]:
        """A claim that came between: it withdraws when it sees this commit, or has replaced it.

        Returns:
            Names of the claims and marks.
        """
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                names = self.target.remote.listing(ATTEMPTS)
                newest = max(numbers(names, CLAIM), default=0)
                if newest <= self.number:
                    return names
                ours = self.target.remote.read_range(name, 0, None) == data
            except StorageError as error:
                raise _UndecidedError(error.message) from error
            if not ours:
                raise self._superseded(described(self.target, newest))
            if time.monotonic() > deadline:
                by = described(self.target, newest)
                self._take_back(name, data)
                raise self._superseded(by)
            time.sleep(POLL_S)

    def _take_back(self, name: str, data: bytes) -> None:
        """Delete this commit: a newer attempt does not know of it, and may have deleted what
        belongs to it. Under a claim of its own, so that no commit of that attempt is met."""
        claim = claimed(self.target, self.overwrite)
        try:
            settled_names(claim)
            with contextlib.suppress(FileNotFoundError):
                if self.target.remote.read(name) == data:
                    self.target.remote.delete([name])
        finally:
            claim.withdraw()

    def withdraw_all(self) -> None:
        """Take back this claim and those of attempts that it superseded."""
        self._clean_up()

    def _clean_up(self, names: Sequence[str] | None = None) -> None:
        """The claims go last: this one, and those of attempts that it superseded."""
        try:
            store = self.target.remote
            names = store.listing(ATTEMPTS) if names is None else names
            done = sorted((n for n in names if number_of(n) <= self.number), key=number_of)
            store.delete([f"{ATTEMPTS}/{name}" for name in done])
        except StorageError as error:
            logger.warning(
                "%s: claims that are done with could not be removed: %s", self.target.url, error
            )

    def abandon(self) -> None:
        """Remove what was written, as far as the store lets us; the next attempt does the rest. The
        claim stays where that fails: it says that what is left is of a save. All of it stays where
        the commit may still come."""
        with contextlib.suppress(StorageError, FileNotFoundError):
            names = self.target.remote.walk()
            if self._committing in names:
                return
            self._clear(leftovers(names, known_nodes(self.target, names)))
            said = f"{ATTEMPTS}/{self.number:06d}.nodes-"
            if marks := [name for name in names if name.startswith(said)]:
                self.target.remote.delete(marks)
            self.withdraw()

    def _clear(self, names: Sequence[str]) -> None:
        """Delete what other attempts left, unless a newer one owns the target already."""
        if not names:
            return
        store = self.target.remote
        mark = f"{ATTEMPTS}/{self.number:06d}.clearing"
        store.write(mark, self.id.encode())
        try:
            for some in deletion_rounds(names, store.deletes_at_once):
                self.check()
                store.delete(some)
        finally:
            store.delete([mark])

    def withdraw(self) -> None:
        """Take back this claim alone."""
        claim = f"{ATTEMPTS}/{self.number:06d}.json"
        if read_claim(self.target, self.number).get("id") == self.id:
            self.target.remote.delete([self._committing, claim])

    def _superseded(self, by: str) -> SupersededError:
        return SupersededError(
            f"the save to {self.target.url} (attempt {self.id}) was given up: the target belongs "
            f"to {by}. Of several saves to one place the newest goes on; save elsewhere, or one "
            "after the other",
            url=self.target.url,
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
    names: list[str]
    committed: bool
    names, committed = run_together(
        lambda: place.remote.listing(ATTEMPTS),
        lambda: not overwrite and is_committed(place),
    )
    if committed:
        raise _exists(place)
    require_conditions(place, allow_unconditional)
    attempt = claimed(place, overwrite, names)
    try:
        names = settled_names(attempt)
        if not overwrite and committed_among(place, names):
            raise _exists(place)
        claim = f"{ATTEMPTS}/{attempt.number:06d}.json"
        known = known_nodes(place, names)
        attempt._clear(leftovers((name for name in names if name != claim), known))
    except BaseException:
        with contextlib.suppress(StorageError):
            attempt.withdraw()
        raise
    return attempt


def join(place: Location, attempt_id: str, *, overwrite: bool = False) -> ObjectAttempt:
    """The attempt that the coordinator began, on another rank."""
    return ObjectAttempt(place, attempt_id, overwrite)


def claimed(
    place: Location, overwrite: bool = False, names: Sequence[str] | None = None
) -> ObjectAttempt:
    """A new attempt that owns a target, which is as older ones left it; arguments as
    :func:`begin`'s and :func:`make_claim`'s."""
    return ObjectAttempt(place, make_claim(place, names), overwrite)


def settled_names(attempt: ObjectAttempt) -> list[str]:
    """Names of all that is at the target, once no older attempt is between its last look at the
    claims and what follows it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = attempt.target.remote.walk()
        marks = [name.rpartition("/")[2] for name in names if name.startswith(f"{ATTEMPTS}/")]
        clearing, committing = (
            min(numbers(marks, kind), default=attempt.number) < attempt.number
            for kind in (CLEARING, COMMITTING)
        )
        if not clearing and (not committing or committed_among(attempt.target, names)):
            return names
        if time.monotonic() > deadline:
            logger.warning(
                "%s: an attempt that was about to commit does not go on; it is taken for dead",
                attempt.target.url,
            )
            return names
        time.sleep(POLL_S)


def _exists(place: Location) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{place.url} already exists and holds a checkpoint; pass overwrite=True to replace it, "
        "or save elsewhere",
        url=place.url,
    )


def delete_all(place: Location) -> None:
    """Delete a checkpoint, its commit first; foreign objects stay. Called by one process.

    Until all is gone there are two marks. One has the number of the claim: newer attempts wait for
    it. The other one has none, and stays also where the store refuses: it tells the sweeper what is
    left.

    Raises:
        StorageError: the store refused; or the place was claimed anew before anything was deleted.
            Where that happens later, what is left is cleared by whoever claimed it.
    """
    store = place.remote
    attempt = claimed(place)
    claim, mark = (f"{ATTEMPTS}/{attempt.number:06d}.{kind}" for kind in ("json", "clearing"))
    begun = finished = False
    try:
        names = [name for name in settled_names(attempt) if name != claim]
        own = leftovers(names, known_nodes(place, names))
        run_together(
            lambda: store.write(mark, attempt.id.encode()), lambda: store.write(DELETING, b"")
        )
        for some in deletion_rounds(own, store.deletes_at_once):
            by = attempt.outbid_by()
            if by is not None and not begun:
                raise StorageError(
                    f"{place.url} was not deleted: meanwhile the place was claimed by {by}. Delete "
                    "it again once that one is done",
                    url=place.url,
                )
            if by is not None:
                logger.warning(
                    "%s: deleted; what is left of its data is cleared by %s", place.url, by
                )
                return
            begun = True
            store.delete(some)
        finished = True
    finally:
        if finished:
            attempt.withdraw_all()
        else:
            with contextlib.suppress(StorageError):
                store.delete([mark] if begun else [mark, DELETING])
                attempt.withdraw()
