"""Items of a plan that travel as bytes; one call loads a checkpoint of this package or of DCP."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore.dcp.reader import SentItems, load_either
from shardstore.errors import NotACheckpointError
from shardstore.storage.stores.location import Location


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


def sent(items: list[Any]) -> SentItems:
    found = pickle.loads(pickle.dumps(SentItems(pickle.dumps(items))))
    assert isinstance(found, SentItems)
    return found


def test_nothing_is_unpickled_before_somebody_looks() -> None:
    items = [Item(name) for name in "abc"]
    Item.unpickled = 0
    there = sent(items)
    again = pickle.loads(pickle.dumps(there))
    assert Item.unpickled == 0
    assert len(there) == 3
    assert list(there) == items
    assert Item.unpickled == 3
    assert there[1] is there[1]
    assert list(again) == items


def test_what_was_changed_abroad_is_what_arrives() -> None:
    there: Any = sent([Item("a"), Item("b")])
    there.remove(Item("a"))
    there.append(Item("c"))
    assert pickle.loads(pickle.dumps(there)) == [Item("b"), Item("c")]


def test_both_kinds_are_loaded_and_other_folders_are_an_error(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6.0), "step": 3}
    shardstore.save(saved, tmp_path / "own")
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    for name in ("own", "dcp"):
        state = {"w": torch.zeros(6), "step": 0}
        loaded = load_either(state, Location.of(tmp_path / name))
        assert torch.equal(loaded["w"], saved["w"])
        assert loaded["step"] == 3
    (tmp_path / "none").mkdir()
    with pytest.raises(NotACheckpointError, match="the folder of one step"):
        load_either({}, Location.of(tmp_path / "none"))
