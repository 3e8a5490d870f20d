"""What torch.save wrote is read without running code from it, deques and defaultdicts included."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.errors import UnsafeObjectError
from shardstore.values.torch_dump import dump_bytes
from shardstore.values.torch_values import load_bytes
from tests.helpers.nested import exactly_same


def through_torch(value: Any) -> Any:
    return load_bytes(dump_bytes(value), "/place/file.pt")


def test_deques_and_defaultdicts_load_at_any_depth() -> None:
    losses = collections.deque([torch.ones(2), 1.5], maxlen=3)
    state = {
        "first": losses,
        "again": [losses],
        "in": (1, collections.OrderedDict(x=argparse.Namespace(seen=losses))),
        "of": collections.deque([collections.defaultdict(list, a=[collections.deque([1])])]),
        "plain": ([1], {"a": (2, 3)}),
    }
    found = through_torch(state)
    assert type(found["first"]) is collections.deque
    # One object, as before.
    assert found["again"][0] is found["first"]
    assert found["in"][1]["x"].seen is found["first"]
    assert type(found["in"][1]) is collections.OrderedDict
    assert torch.equal(found["first"][0], torch.ones(2))
    assert found["first"].maxlen == 3
    assert found["of"] == state["of"]
    assert type(found["of"][0]["a"][0]) is collections.deque
    assert found["plain"] == state["plain"]


def test_deques_defaultdicts_and_frozen_sets_load_from_a_checkpoint(tmp_path: Path) -> None:
    state = {
        "last": collections.deque([1.5, 2.5], maxlen=2),
        "groups": collections.defaultdict(list, a=[1]),
        "kinds": frozenset({"a", (1, frozenset({2}))}),
        "none": frozenset(),
    }
    shardstore.save(state, tmp_path / "c")
    assert exactly_same(shardstore.load({}, tmp_path / "c"), state)


def made_by_the_program() -> int:
    return 5


def test_other_factories_are_not_allowed() -> None:
    data = dump_bytes(collections.defaultdict(made_by_the_program, a=1))
    with pytest.raises(UnsafeObjectError, match="made_by_the_program"):
        load_bytes(data, "/place/file.pt", "key")


def test_classes_are_values_too() -> None:
    kinds = [collections.OrderedDict, set, complex, torch.Size, torch.device, Path, np.dtype, list]
    assert through_torch(kinds) == kinds
    for factory in (set, collections.deque, collections.OrderedDict, list, int, dict, None):
        filled: Any = collections.defaultdict(factory, a=factory and factory())
        found = through_torch(filled)
        assert type(found) is collections.defaultdict
        assert (found, found.default_factory) == (filled, factory)


def test_a_tensor_without_memory() -> None:
    found = through_torch({"w": torch.empty(2, 3, dtype=torch.bfloat16, device="meta")})["w"]
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.bfloat16, (2, 3))


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([1, "a"], object), np.datetime64(1, "s")]
)
def test_data_types_that_are_not_loaded_are_no_damage(value: Any) -> None:
    with pytest.raises(UnsafeObjectError, match=r"file\.pt \(object 'k'\) needs NumPy's data type"):
        load_bytes(dump_bytes(value), "/place/file.pt", "k")
