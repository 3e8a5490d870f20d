"""Items of a plan that travel as bytes: a list to whoever looks, at home what was kept."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.dcp import reader as sent_items
from shardstore.dcp.reader import SentItems


class Item:
    """Counts how often one is unpickled."""

    unpickled = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: dict[str, Any]) -> None:
        Item.unpickled += 1
        self.__dict__.update(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]


def sent(items: SentItems[Any]) -> SentItems[Any]:
    return sent_for(pickle.dumps(items))


def abroad(items: SentItems[Any]) -> SentItems[Any]:
    """As another process would get it."""
    data = pickle.dumps(items)
    kept = sent_items._at_home.pop(items._token)
    try:
        return sent_for(data)
    finally:
        sent_items._at_home[items._token] = kept


def sent_for(data: bytes) -> SentItems[Any]:
    found = pickle.loads(data)
    assert isinstance(found, SentItems)
    return found


def test_they_come_home_as_what_was_kept() -> None:
    items = SentItems.kept([Item("a"), Item("b")])
    assert sent(items) is items


def test_abroad_nothing_is_unpickled_before_somebody_looks() -> None:
    items = SentItems.kept([Item(name) for name in "abc"])
    Item.unpickled = 0
    there = abroad(items)
    assert pickle.dumps(there) == pickle.dumps(items)
    assert Item.unpickled == 0
    assert len(there) == 3
    assert list(there) == list(items)
    assert Item.unpickled == 3
    assert there[1] is there[1]


def test_another_process_reads_them() -> None:
    items = SentItems.kept([("a", 1), ("b", 2)])
    program = (
        "import pickle, sys; got = pickle.load(sys.stdin.buffer); got.append(('c', 3)); "
        "sys.stdout.buffer.write(pickle.dumps(got))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(items), capture_output=True, check=True
    )
    back = pickle.loads(done.stdout)
    assert back == [("a", 1), ("b", 2), ("c", 3)]
    assert items == [("a", 1), ("b", 2)]


def test_nothing_is_kept_for_whoever_let_go() -> None:
    items = SentItems.kept([Item("a")])
    data = pickle.dumps(items)
    del items
    gc.collect()
    back = pickle.loads(data)
    assert [item.name for item in back] == ["a"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, SentItems.copy])
def test_a_copy_is_a_list_of_its_own(copied: Callable[[Any], list[Any]]) -> None:
    items = SentItems.kept([Item("a")])
    other = copied(items)
    assert (other[0] is items[0]) == (copied is not copy.deepcopy)
    other.append(Item("b"))
    assert items == [Item("a")]


CHANGES: dict[str, Callable[[Any], object]] = {
    "append": lambda x: x.append(7),
    "extend": lambda x: x.extend([7, 8]),
    "insert": lambda x: x.insert(1, 7),
    "set": lambda x: x.__setitem__(0, 7),
    "set slice": lambda x: x.__setitem__(slice(0, 2), [7]),
    "delete": lambda x: x.__delitem__(0),
    "clear": lambda x: x.clear(),
    "pop": lambda x: x.pop(),
    "reverse": lambda x: x.reverse(),
    "sort": lambda x: x.sort(reverse=True),
    "add in place": lambda x: x.__iadd__([7]),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("where", ["home", "abroad"])
def test_what_was_changed_is_what_arrives(how: str, where: str) -> None:
    plain = [3, 1, 2]
    items = SentItems.kept(plain)
    there = items if where == "home" else abroad(items)
    pickle.dumps(there)  # what was packed before must not be sent again
    CHANGES[how](there)
    CHANGES[how](plain)
    back = sent(there)
    assert list(back) == plain == list(there)
    assert (back == items) == (where == "home")
    CHANGES[how](plain)
    CHANGES[how](back)
    assert list(sent(back)) == plain


@given(st.lists(st.integers()), st.lists(st.integers()), st.slices(5))
def test_it_is_a_list_to_whoever_looks(a: list[int], b: list[int], cut: slice) -> None:
    for items in (SentItems.kept(a), abroad(SentItems.kept(a))):
        assert items == a
        assert a == items
        assert items + b == a + b
        assert b + items == b + a
        assert items[cut] == a[cut]
        assert [*items] == list(items) == items.copy() == a
        assert len(items) == len(a)
        assert bool(items) == bool(a)
        assert repr(items) == repr(a)
        assert list(reversed(items)) == a[::-1]
        assert all(x in items for x in a)
        assert (items == b) == (a == b)
        assert items != tuple(a)
