"""Items of a plan that travel as bytes: a list to whoever looks, at home what was kept."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from typing import Any

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


def sent(items: SentItems) -> SentItems:
    return sent_for(pickle.dumps(items))


def abroad(items: SentItems) -> SentItems:
    """As another process would get it."""
    data = pickle.dumps(items)
    kept = sent_items._at_home.pop(items._token)
    try:
        return sent_for(data)
    finally:
        sent_items._at_home[items._token] = kept


def sent_for(data: bytes) -> SentItems:
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
    items = SentItems.kept([("a", 1), ("b", 2)])  # type: ignore[list-item]
    program = (
        "import pickle, sys; got = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(pickle.dumps([*got, ('c', 3)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(items), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == [("a", 1), ("b", 2), ("c", 3)]


def test_nothing_is_kept_for_whoever_let_go() -> None:
    items = SentItems.kept([Item("a")])
    data = pickle.dumps(items)
    del items
    gc.collect()
    assert [item.name for item in pickle.loads(data)] == ["a"]


def test_what_was_changed_abroad_is_what_arrives() -> None:
    there = abroad(SentItems.kept([Item("a"), Item("b")]))
    there.remove(Item("a"))
    there.append(Item("c"))
    assert pickle.loads(pickle.dumps(there)) == [Item("b"), Item("c")]
