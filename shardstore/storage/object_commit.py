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

Called by one process where it is not said otherwise. It knows documents, names and claims; not
what is in them. (Create-if-absent: Amazon S3 user guide, "Conditional writes".)
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

from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.storage.location import Location
from shardstore.storage.object_io import put_objects
from shardstore.storage.parallel import run_together

__all__ = ["ATTEMPTS", "ObjectAttempt", "begin", "is_committed", "join", "own_names"]

ATTEMPTS = ".attempts"
"""Folder of the claims, below the target."""

DELETING = f"{ATTEMPTS}/deleting"
"""Mark of a deletion that is under way, or died."""

SETTLE_S = 30.0
"""How long a new claim waits for an older attempt that is about to commit: longer than one PUT with
all its retries usually takes. Too short costs the older attempt its success, never anybody's
data."""
POLL_S = 0.2

_OWN = frozenset({"zarr.json", "metadata.json", "common.pt", "manifest.npz", ".metadata"})
_COMMITS = ("zarr.json", "metadata.json")
_CLAIM = re.compile(r"(\d{6,})\.json")
_COMMITTING = re.compile(r"(\d{6,})\.committing")
_CLEARING = re.compile(r"(\d{6,})\.clearing")
_PART = re.compile(r"zarr\.json|\.zarray|\.zattrs|c([./]\d+)*|\d+([./]\d+)*|shard_[\d._]*\.pt")
_CHUNK = re.compile(r"c([./]\d+)*|\d+([./]\d+)*")

_honest: set[str] = set()
"""Stores of this process that were seen to refuse a second creation."""

logger = logging.getLogger(__name__)


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
        newest = max(_claims(self.target), default=0)
        if newest > self.number:
            raise self._superseded(_describe(self.target, newest))
        if newest < self.number or _read_claim(self.target, newest).get("id") != self.id:
            raise self._superseded("another one, which is finished")

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
            StorageError: the store refused, or a newer attempt took the target over.
        """
        if not documents:
            raise StorageError(
                f"nothing that could commit {self.target.url} was written", url=self.target.url
            )
        name, data = documents[-1]
        mark = f"{ATTEMPTS}/{self.number:06d}.committing"
        self.put_all([*documents[:-1], (mark, self.id.encode())])
        try:
            self.check()
        except StorageError:
            # Nothing was sent: nobody has to wait for it.
            with contextlib.suppress(StorageError):
                self.target.remote.delete([mark])
            raise
        if not self._publish(name, data) and not self._take_over(name, data):
            raise CheckpointExistsError(
                f"{self.target.url} already exists: another checkpoint was committed there while "
                "this one was being written; pass overwrite=True to replace it, or save elsewhere",
                url=self.target.url,
            )
        self._clean_up(self._look_once_more(name, data))

    def _publish(self, name: str, data: bytes) -> bool:
        """The conditional PUT. Whether the commit that is there then is ours."""
        store = self.target.remote
        failure: StorageError | None = None
        try:
            if store.create(name, data):
                return True
        except StorageError as error:
            failure = error
        for left in (2, 1, 0):
            try:
                there = store.read(name)
            except FileNotFoundError:
                there = None
            except StorageError:
                if not left:
                    raise
                time.sleep(POLL_S)
                continue
            if there == data:
                return True
            if failure is not None and there is None:
                raise failure
            break
        # Somebody else's, or one that a newer attempt has deleted again.
        self.check()
        return False

    def _take_over(self, name: str, data: bytes) -> bool:
        """Replace the commit of an older attempt that was held up for longer than this one waited
        for it, and whose data this one has cleared: nobody was told that it succeeded. Whether the
        commit is ours then; any other commit stays."""
        store = self.target.remote
        there = store.read_range(name, 0, None)
        marks = _numbers(store.listing(ATTEMPTS), _COMMITTING)
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
            names = self.target.remote.listing(ATTEMPTS)
            newest = max(_numbers(names, _CLAIM), default=0)
            if newest <= self.number:
                return names
            try:
                ours = self.target.remote.read(name) == data
            except FileNotFoundError:
                ours = False
            if not ours:
                raise self._superseded(_describe(self.target, newest))
            if time.monotonic() > deadline:
                by = _describe(self.target, newest)
                self._take_back(name, data)
                raise self._superseded(by)
            time.sleep(POLL_S)

    def _take_back(self, name: str, data: bytes) -> None:
        """Delete this commit: a newer attempt does not know of it, and may have deleted what
        belongs to it. Under a claim of its own, so that no commit of that attempt is met."""
        claim = _claim(self.target, self.overwrite)
        try:
            _settled_names(claim)
            with contextlib.suppress(FileNotFoundError):
                if self.target.remote.read(name) == data:
                    self.target.remote.delete([name])
        finally:
            claim._withdraw()

    def withdraw_all(self) -> None:
        """Take back this claim and those of attempts that it superseded."""
        self._clean_up()

    def _clean_up(self, names: Sequence[str] | None = None) -> None:
        """The claims go last: this one, and those of attempts that it superseded."""
        try:
            store = self.target.remote
            names = store.listing(ATTEMPTS) if names is None else names
            done = sorted((n for n in names if _number_of(n) <= self.number), key=_number_of)
            store.delete([f"{ATTEMPTS}/{name}" for name in done])
        except StorageError as error:
            logger.warning(
                "%s: claims that are done with could not be removed: %s", self.target.url, error
            )

    def abandon(self) -> None:
        """Remove what was written, as far as the store lets us; the next attempt does the rest."""
        with contextlib.suppress(StorageError, FileNotFoundError):
            self._clear(_leftovers(self.target.remote.walk()))
            self._withdraw()
            return
        # The claim stays: it says that what is left is of a save. Nobody has to wait for it.
        with contextlib.suppress(StorageError):
            if _read_claim(self.target, self.number).get("id") == self.id:
                self.target.remote.delete([f"{ATTEMPTS}/{self.number:06d}.committing"])

    def _clear(self, leftovers: Sequence[str]) -> None:
        """Delete what other attempts left, unless a newer one owns the target already."""
        if not leftovers:
            return
        mark = f"{ATTEMPTS}/{self.number:06d}.clearing"
        self.target.remote.write(mark, self.id.encode())
        try:
            self.check()
            _delete(self.target, leftovers)
        finally:
            self.target.remote.delete([mark])

    def _withdraw(self) -> None:
        number = f"{ATTEMPTS}/{self.number:06d}"
        if _read_claim(self.target, self.number).get("id") == self.id:
            self.target.remote.delete([f"{number}.committing", f"{number}.json"])

    def _superseded(self, by: str) -> StorageError:
        return StorageError(
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
    _require_conditions(place, allow_unconditional)
    attempt = _claim(place, overwrite, names)
    try:
        names = _settled_names(attempt)
        if not overwrite and _commits(place, names):
            raise _exists(place)
        claim = f"{ATTEMPTS}/{attempt.number:06d}.json"
        attempt._clear(_leftovers(name for name in names if name != claim))
    except BaseException:
        with contextlib.suppress(StorageError):
            attempt._withdraw()
        raise
    return attempt


def join(place: Location, attempt_id: str, *, overwrite: bool = False) -> ObjectAttempt:
    """The attempt that the coordinator began, on another rank."""
    return ObjectAttempt(place, attempt_id, overwrite)


def is_committed(location: Location, names: Sequence[str] | None = None) -> bool:
    """Whether a committed checkpoint is there: ours, or one with a ``metadata.json`` of another
    backend. Two requests, at once.

    Args:
        location: the target.
        names: what lies directly below it, where that is known already.

    Raises:
        StorageError: the store refused.
    """
    if names is not None:
        return _commits(location, names)
    store = location.remote
    root, config = run_together(
        # One byte tells as much as all of a large document.
        lambda: store.read_range("zarr.json", 0, 1),
        lambda: store.read_range("metadata.json", 0, None),
    )
    return root is not None or (config is not None and _is_commit(config))


def _commits(location: Location, names: Sequence[str]) -> bool:
    """The same, where it is known what is there."""
    if "zarr.json" in names or "metadata.json" not in names:
        return "zarr.json" in names
    config = location.remote.read_range("metadata.json", 0, None)
    return config is not None and _is_commit(config)


def _is_commit(text: bytes) -> bool:
    """Whether a ``metadata.json`` is the commit by itself, and no root document is to come."""
    try:
        config = json.loads(text)
    except ValueError:
        return False
    if not isinstance(config, dict):
        return False
    version = config.get("sharded_backend_version", 1)
    committed_by_root = config.get("sharded_backend") == "zarr" and version != 1
    return not committed_by_root


def own_names(names: Iterable[str]) -> list[str]:
    """Those of all object names below a target that belong to checkpoints, finished or not.

    A checkpoint further below, a foreign Zarr group or anything else is left out. What only looks
    like a chunk (``logs/1``) counts beside the document of an array; where claims or marks say that
    a save or a deletion died here, those of layout 2 count without one: the documents come last.
    """
    names = list(names)
    died = any(name.startswith(f"{ATTEMPTS}/") and "/probe-" not in name for name in names)
    arrays = {name.partition("/")[0] for name in names if name.endswith(("/zarr.json", "/.zarray"))}
    documents = {name for name in names if name.endswith(("/zarr.json", "/metadata.json"))}
    # A folder with documents in folders below it is a group or a checkpoint of its own.
    foreign = {name.partition("/")[0] for name in documents if name.count("/") > 1}
    foreign |= {name.partition("/")[0] for name in documents if name.endswith("/metadata.json")}
    own = []
    for name in names:
        first, _, rest = name.partition("/")
        if not rest:
            if first in _OWN or first.endswith(".distcp"):
                own.append(name)
        elif first == ATTEMPTS:
            own.append(name)
        elif first not in foreign and _PART.fullmatch(rest):
            chunk_like = _CHUNK.fullmatch(rest)
            if first in arrays or not chunk_like or (died and rest.startswith("c")):
                own.append(name)
    return own


def _claim(place: Location, overwrite: bool, names: Sequence[str] | None = None) -> ObjectAttempt:
    store = place.remote
    token = f"{time.time_ns():x}-{secrets.token_hex(4)}"
    last, until = 0, 0.0
    while True:
        names = store.listing(ATTEMPTS) if names is None else names
        number = max(_numbers(names, _CLAIM, _COMMITTING, _CLEARING), default=0) + 1
        names = None
        if number != last:
            last, until = number, time.monotonic() + SETTLE_S
        elif time.monotonic() > until:
            raise StorageError(
                f"claiming {place.url} failed: the store says that {ATTEMPTS}/{number:06d}.json is "
                "there, and does not list it; saves need a store whose listings are up to date",
                url=place.url,
            )
        attempt = ObjectAttempt(place, f"{number:06d}-{token}", overwrite)
        about = {
            "id": attempt.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        name = f"{ATTEMPTS}/{number:06d}.json"
        if store.create(name, json.dumps(about).encode()):
            return attempt
        # Lost; or won, and the answer was lost.
        if _read_claim(place, number).get("id") == attempt.id:
            return attempt


def _settled_names(attempt: ObjectAttempt) -> list[str]:
    """Names of all that is at the target, once no older attempt is between its last look at the
    claims and what follows it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        names = attempt.target.remote.walk()
        marks = [name.rpartition("/")[2] for name in names if name.startswith(f"{ATTEMPTS}/")]
        clearing, committing = (
            min(_numbers(marks, kind), default=attempt.number) < attempt.number
            for kind in (_CLEARING, _COMMITTING)
        )
        if not clearing and (not committing or _commits(attempt.target, names)):
            return names
        if time.monotonic() > deadline:
            logger.warning(
                "%s: an attempt that was about to commit does not go on; it is taken for dead",
                attempt.target.url,
            )
            return names
        time.sleep(POLL_S)


def _claims(target: Location) -> list[int]:
    """Numbers of the claims."""
    return _numbers(target.remote.listing(ATTEMPTS), _CLAIM)


def _numbers(names: Iterable[str], *kinds: re.Pattern[str]) -> list[int]:
    """Numbers of the claims or marks of the given kinds among names."""
    names = list(names)
    return [
        int(found.group(1)) for kind in kinds for name in names if (found := kind.fullmatch(name))
    ]


def _read_claim(target: Location, number: int) -> dict[str, object]:
    try:
        about = json.loads(target.remote.read(f"{ATTEMPTS}/{number:06d}.json"))
    except (FileNotFoundError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def _describe(target: Location, number: int) -> str:
    about = _read_claim(target, number)
    return (
        f"the newer attempt {about.get('id', f'{number:06d}')} of process {about.get('pid', '?')} "
        f"on {about.get('host', '?')}"
    )


def _number_of(name: str) -> int:
    found = re.match(r"\d+", name.rpartition("/")[2])
    return int(found.group()) if found else 0


def _leftovers(names: Iterable[str]) -> list[str]:
    """What checkpoints and dead attempts left, of all names at a target, but for the claims."""
    return [name for name in own_names(names) if not name.startswith(f"{ATTEMPTS}/")]


def _delete(place: Location, names: Sequence[str]) -> None:
    """Delete objects, the commits first."""
    for name in _COMMITS:
        if name in names:
            place.remote.delete([name])
    rest = [name for name in names if name not in _COMMITS]
    if rest:
        place.remote.delete(rest)


def delete_all(place: Location) -> None:
    """Delete a checkpoint, its commit first; foreign objects stay. Called by one process.

    Until all is gone there is a mark, which tells the sweeper what a deletion that died left.
    """
    names = _leftovers(place.remote.walk())
    place.remote.write(DELETING, b"")
    _delete(place, names)
    place.remote.delete([DELETING])


def _exists(place: Location) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{place.url} already exists and holds a checkpoint; pass overwrite=True to replace it, "
        "or save elsewhere",
        url=place.url,
    )


def _require_conditions(place: Location, allow_unconditional: bool) -> None:
    """Create a probe twice: the second must be refused.

    Raises:
        StorageError: it was not, and that was not allowed.
    """
    store = place.remote
    scheme, _, rest = place.url.partition("://")
    # Of one endpoint and bucket.
    known = f"{id(store.fs)} {scheme}://{rest.partition('/')[0]}"
    if known in _honest or allow_unconditional:
        return
    probe = f"{ATTEMPTS}/probe-{secrets.token_hex(8)}"
    try:
        first = store.create(probe, b"first")
        second = store.create(probe, b"second")
    finally:
        with contextlib.suppress(StorageError):
            store.delete([probe])
    if second:
        raise StorageError(
            f"{place.url}: the store ignores If-None-Match (it created one object twice), so that "
            "two saves to one place could mix unnoticed; use a store that honours it, or pass "
            "allow_unconditional=True where no two saves ever go to one place",
            url=place.url,
        )
    if first:
        _honest.add(known)
