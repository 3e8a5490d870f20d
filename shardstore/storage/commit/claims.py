"""Claims and marks of attempts at an object store's target: documents whose names have numbers.

Names the documents below ``.attempts``, makes the next claim, and tests whether the store creates
an object only once. :mod:`~shardstore.storage.commit.objects` has the commit protocol that rests on
claims. (Create-if-absent: Amazon S3 user guide, "Conditional writes".)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from shardstore.errors import StorageError
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.object_io import object_io

__all__ = [
    "ATTEMPTS",
    "CLAIM",
    "CLEARING",
    "COMMITTING",
    "DELETING",
    "NODES",
    "SETTLE_S",
    "claims",
    "described",
    "make_claim",
    "number_of",
    "numbers",
    "read_claim",
    "require_conditions",
]

ATTEMPTS = ".attempts"
"""Folder of the claims, below the target."""

DELETING = f"{ATTEMPTS}/deleting"
"""Mark of a deletion that is under way, or died."""

SETTLE_S = 30.0
"""How long a new claim waits for an older attempt that is about to commit: longer than one PUT with
all its retries usually takes. Too short costs the older attempt its success, never anybody's
data."""

CLAIM = re.compile(r"(\d{6,})\.json")
COMMITTING = re.compile(r"(\d{6,})\.committing")
CLEARING = re.compile(r"(\d{6,})\.clearing")
NODES = re.compile(r"(\d{6,})\.nodes-\d+\.json")
"""What a rank of an attempt is about to write chunks of, where their names alone prove nothing."""

_honest: set[str] = set()
"""Stores of this process that were seen to refuse a second creation."""


def make_claim(place: Location, names: Sequence[str] | None = None) -> str:
    """Claim a target with the next free number. Called by one process.

    Args:
        place: the target.
        names: those below :data:`ATTEMPTS`, where they are known already.

    Returns:
        The id that is in the claim: its number and a random part.

    Raises:
        StorageError: the store refused, or does not list a claim that is there.
    """
    store = place.remote
    token = f"{time.time_ns():x}-{secrets.token_hex(4)}"
    last, until = 0, 0.0
    while True:
        names = store.listing(ATTEMPTS) if names is None else names
        number = max(numbers(names, CLAIM, COMMITTING, CLEARING), default=0) + 1
        names = None
        if number != last:
            last, until = number, time.monotonic() + SETTLE_S
        elif time.monotonic() > until:
            raise StorageError(
                f"claiming {place.url} failed: the store says that {ATTEMPTS}/{number:06d}.json is "
                "there, and does not list it; saves need a store whose listings are up to date",
                url=place.url,
            )
        attempt_id = f"{number:06d}-{token}"
        about = {
            "id": attempt_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        name = f"{ATTEMPTS}/{number:06d}.json"
        if store.create(name, json.dumps(about).encode()):
            return attempt_id
        # Lost; or won, and the answer was lost.
        if read_claim(place, number).get("id") == attempt_id:
            return attempt_id


def claims(target: Location) -> list[int]:
    """Numbers of the claims."""
    return numbers(target.remote.listing(ATTEMPTS), CLAIM)


def numbers(names: Iterable[str], *kinds: re.Pattern[str]) -> list[int]:
    """Numbers of the claims or marks of the given kinds among names."""
    names = list(names)
    return [
        int(found.group(1)) for kind in kinds for name in names if (found := kind.fullmatch(name))
    ]


def read_claim(target: Location, number: int) -> dict[str, object]:
    """What a claim says of its attempt; empty where it is gone, or is no claim."""
    try:
        about = json.loads(target.remote.read(f"{ATTEMPTS}/{number:06d}.json"))
    except (FileNotFoundError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def described(target: Location, number: int) -> str:
    """The attempt of a claim, in words for an error."""
    about = read_claim(target, number)
    return (
        f"the newer attempt {about.get('id', f'{number:06d}')} of process {about.get('pid', '?')} "
        f"on {about.get('host', '?')}"
    )


def number_of(name: str) -> int:
    """The number that a claim's or mark's name begins with; 0 for other names."""
    found = re.match(r"\d+", name.rpartition("/")[2])
    return int(found.group()) if found else 0


def require_conditions(place: Location, allow_unconditional: bool) -> None:
    """Create a probe twice, as documents are created and as chunks are: the second must be refused.

    Raises:
        StorageError: it was not, and that was not allowed; or the two do not go to one store.
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
        with contextlib.closing(object_io(place)) as io:
            second = io.put(probe, [b"second"], create=True)
        apart = False
        if first and second:
            with contextlib.suppress(FileNotFoundError, StorageError):
                apart = store.read(probe) == b"first"
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
        is_s3 = scheme in ("s3", "s3a")
        condition = "If-None-Match" if is_s3 else "the condition that an object must be new"
        but = ""
        if is_s3:
            but = " (Ceph's gateway does not in a bucket with versioning: one without will do)"
        raise StorageError(
            f"{place.url}: the store ignores {condition} (it created one object twice), so that "
            "two saves to one place could mix unnoticed; use a store that honours it"
            f"{but}, or pass allow_unconditional=True where no two saves ever go to one place",
            url=place.url,
        )
    if first:
        _honest.add(known)
