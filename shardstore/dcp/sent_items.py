"""The items of a load plan on their way to the coordinator and back.

DCP gathers the plans of all ranks on one, and scatters them again, each time as a pickle of every
item. A storage that can read any region has nothing to decide there, and most planners look at
nothing: so a rank's items are pickled once, by the rank itself, travel as bytes, and are taken from
where they were kept when they come home. Whoever does look at them finds what was sent. Knows items
and processes; no plans, no files.
"""

from __future__ import annotations

import itertools
import os
import pickle
import secrets
import weakref
from collections.abc import Iterable, Iterator, MutableSequence
from copy import deepcopy
from typing import Any, TypeVar, overload

__all__ = ["SentItems"]

T = TypeVar("T")

_process = secrets.token_bytes(8)
_numbers = itertools.count()
_at_home: weakref.WeakValueDictionary[bytes, SentItems[Any]] = weakref.WeakValueDictionary()


class SentItems(MutableSequence[T]):
    """A list that is not unpickled where nobody looks into it.

    Whoever makes it keeps it until it is back. It may be changed, as a list may: from then on it is
    sent as it is.

    Args:
        items: what it holds.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items: list[T] | None = list(items)
        self._length = len(self._items)
        self._packed: bytes | None = None
        # A forked process has the same token to begin with, and is another home.
        self._token = _process + os.getpid().to_bytes(4) + next(_numbers).to_bytes(8)
        _at_home[self._token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes that were made once."""
        if self._packed is None:
            self._packed = pickle.dumps(self._items, pickle.HIGHEST_PROTOCOL)
        return _arrived, (self._token, self._length, self._packed)

    @property
    def _list(self) -> list[T]:
        """The items, unpickled."""
        if self._items is None:
            assert self._packed is not None
            # From the process group that this whole object was unpickled from a moment ago.
            self._items = pickle.loads(self._packed)
        return self._items

    def _changed(self) -> list[T]:
        """The items, which are no more what was kept or packed."""
        items = self._list
        _at_home.pop(self._token, None)
        self._token, self._packed = b"", None
        return items

    def __len__(self) -> int:
        return self._length if self._items is None else len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._list)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._list[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._changed()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._changed()[index]

    def insert(self, index: int, value: T) -> None:
        """As that of a list."""
        self._changed().insert(index, value)

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """As that of a list."""
        self._changed().sort(key=key, reverse=reverse)

    def copy(self) -> list[T]:
        """The items as an ordinary list."""
        return list(self._list)

    # Not by way of a pickle, which would give this very object.
    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return deepcopy(self._list, memo)

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self._list, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self._list]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | SentItems):
            return self._list == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._list)


def _arrived(token: bytes, length: int, packed: bytes) -> SentItems[Any]:
    """What has been sent: the very items where they come from, else the bytes alone."""
    found = _at_home.get(token)
    if found is not None:
        return found
    made: SentItems[Any] = SentItems.__new__(SentItems)
    made._items, made._length, made._packed, made._token = None, length, packed, token
    return made
