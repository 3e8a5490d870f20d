"""Objects of one place in a store as another's, copied by the store: their bytes do not travel.

A chunk that a base has already is looked at (its size, and the checksum at its end), and copied. A
copy must not replace what a newer attempt wrote, just as a PUT must not: where the store creates on
condition, copies do; where it ignores the condition (tried once a store), the claims are asked
before each copy. Questions that several threads have at the same time are asked once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shardstore.errors import StorageError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.stores.location import Location

__all__ = ["COPY_THREADS", "ServerCopies", "same_store", "warn_of_damage"]

logger = logging.getLogger(__name__)

COPY_THREADS = 32
"""Requests for copies under way: each waits for the store, and holds no data."""

MIN_COPIED_BYTES = 4096
"""Smaller chunks are sent: two requests for a copy are larger than they are."""

TAIL_BYTES = 4
"""The crc32c at the end of a chunk's object."""

_ENDS_BEFORE = "InvalidRange"
"""What S3 says where an object ends before the range begins (Amazon S3 API, "Error responses")."""

_conditional: dict[str, bool] = {}
"""Stores of this process -> whether a copy there creates only."""
_trying = threading.Lock()


def same_store(one: Location, other: Location) -> bool:
    """Whether two places are in one object store, which can copy from one to the other.

    Raises:
        StorageError: a store can not be used.
    """
    if one.is_local or other.is_local:
        return False
    # Not their own "==", which is about the thread that made them too.
    first, second = one.remote.fs, other.remote.fs
    return type(first) is type(second) and first.storage_options == second.storage_options


class ServerCopies:
    """Takes over objects of a base by copies in the store. Safe from any thread.

    Args:
        base: where they are.
        location: where they shall be, in the same store.
        attempt: says whether it still owns ``location``; ``None``: nobody else writes there.
    """

    def __init__(self, base: Location, location: Location, attempt: Attempt | None) -> None:
        self._base = base
        self._location = location
        self._refused = threading.Event()
        self._ask = _Together(attempt.check) if attempt is not None else None

    def __call__(self, name: str, stored_bytes: int, tail: bytes | None) -> bool:
        """Copy an object.

        Args:
            name: its name below both places.
            stored_bytes: its size.
            tail: its last four bytes; ``None``: not known.

        Returns:
            Whether it is at its new place. ``False``: it has to be sent.

        Raises:
            StorageError: a newer attempt took the target over.
        """
        if self._refused.is_set() or stored_bytes < max(MIN_COPIED_BYTES, TAIL_BYTES):
            return False
        try:
            found = self._base.remote.read_range(name, stored_bytes - TAIL_BYTES, None)
        except StorageError as error:
            if _ENDS_BEFORE not in str(error):
                return self._give_up(error)
            found = b""
        damage = _damage(found, stored_bytes, tail)
        if damage is not None:
            warn_of_damage(f"{self._base.url}/{name}", damage)
            return False
        store = f"{self._location.url.partition('://')[0]} {id(self._location.remote.fs)}"
        conditional = _conditional.get(store)
        if conditional is None:
            with _trying:
                conditional = _conditional.get(store)
                if conditional is None:
                    return self._try_out(store, name)
        if not conditional and self._ask is not None:
            self._ask()
        return self._copy(name, create=conditional) is True

    def _try_out(self, store: str, name: str) -> bool:
        """Copy one object twice, the second time where it is there: does the store say so?"""
        if self._ask is not None:
            self._ask()
        if self._copy(name, create=True) is not True:
            return False
        again = self._copy(name, create=True)
        if again is not None:
            _conditional[store] = not again
        return True

    def _copy(self, name: str, *, create: bool) -> bool | None:
        """``True``: copied; ``False``: an object is there; ``None``: it could not be."""
        if self._refused.is_set():
            return None
        try:
            return self._location.remote.copy_from(self._base.remote, name, name, create=create)
        except FileNotFoundError:
            return None
        except StorageError as error:
            self._give_up(error)
            return None

    def _give_up(self, error: StorageError) -> bool:
        if not self._refused.is_set():
            self._refused.set()
            logger.warning(
                "chunks of %s can not be copied to %s (%s): they are sent",
                self._base.url,
                self._location.url,
                error,
            )
        return False


def warn_of_damage(url: str, what: str) -> None:
    """Tell of a chunk of a base that is not taken over."""
    logger.warning(
        "%s, which is to be taken over, %s: it is written anew here, and the checkpoint that it is "
        "part of is damaged",
        url,
        what,
    )


def _damage(found: bytes | None, stored_bytes: int, tail: bytes | None) -> str | None:
    """What is wrong with an object, by what is there of its last bytes and after them."""
    if found is None:
        return "is missing"
    if len(found) != TAIL_BYTES:
        more = "more" if len(found) > TAIL_BYTES else "fewer"
        return f"has {more} than its {stored_bytes} bytes"
    return (
        "ends in another checksum than when it was written" if tail not in (None, found) else None
    )


class _Together:
    """Calls a function for many threads at once: a call that began after a thread asked counts for
    it, and for all who asked before it began."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._turn = threading.Condition()
        self._begun = self._ended = 0
        self._running = False
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Return once a call that began after this one succeeded.

        Raises:
            BaseException: what the function raised; once raised, always.
        """
        with self._turn:
            wanted = self._begun + 1
            while self._running and self._ended < wanted and self._error is None:
                self._turn.wait()
            if self._error is not None:
                raise self._error
            if self._ended >= wanted:
                return
            self._begun += 1
            self._running = True
        try:
            self._function()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._turn:
                self._running = False
                self._ended = self._begun
                self._turn.notify_all()
