"""Values of a state dict come back equal and of their types, or `save` names what it refuses."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import pathlib
import types
import zoneinfo
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore import CheckpointingException, LocalNonpersistentObject, ShardedObject
from shardstore.mapping import ShardedTensor


class Point(NamedTuple):
    x: int
    y: int


class Color(enum.Enum):
    RED = 1


class Text(str):
    """A subclass, which no file can name."""


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def shard() -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("inside", torch.ones(2))


REFUSED: dict[str, Any] = {
    "numpy.ndarray of text": lambda: np.array(["a"]),
    "numpy.ndarray of objects": lambda: np.array([None, 1]),
    "numpy.ndarray of records": lambda: np.zeros(2, "i4,f4"),
    "numpy.str_": lambda: np.str_("x"),
    "numpy.datetime64": lambda: np.datetime64("2020"),
    "datetime.datetime in a zone": lambda: datetime.datetime.now(zoneinfo.ZoneInfo("UTC")),
    "generator": lambda: (i for i in range(3)),
    "Point": lambda: Point(1, 2),
    "Color": lambda: Color.RED,
    "Text": lambda: Text("x"),
    "type": lambda: Point,
    "builtin_function_or_method": lambda: len,
    "function": lambda: shard,
    "tuple of a sharded tensor": lambda: (shard(),),
    "Tensor that was freed": freed,
    "Tensor that was freed in a tuple": lambda: (1, [freed()]),
}

atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from([int, torch.float32, torch.Size([2]), torch.device("cpu"), np.dtype("f4")]),
    st.builds(np.float32, st.integers(0, 9)),
    st.just(range(3)),
    st.builds(pathlib.PurePosixPath, st.sampled_from(["a", "/b"])),
)
mutable = st.one_of(
    st.builds(bytearray, st.binary()),
    st.builds(io.BytesIO, st.binary()),
    st.builds(slice, st.integers()),
    st.builds(np.arange, st.integers(0, 4)),
    st.builds(torch.arange, st.integers(0, 4)),
    st.builds(argparse.Namespace, a=atoms),
    st.builds(types.SimpleNamespace, b=atoms),
    st.builds(lambda name: REFUSED[name](), st.sampled_from(sorted(REFUSED))),
)
keys = st.text(max_size=3) | st.integers(0, 3) | st.tuples(st.integers(0, 3), st.none())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        items.map(collections.deque),
        pairs,
        pairs.map(collections.OrderedDict),
        pairs.map(lambda found: collections.defaultdict(list, found)),
        st.builds(collections.Counter, st.lists(st.integers(0, 3))),
        st.sets(atoms, max_size=3),
        st.frozensets(atoms, max_size=3),
    )


values = st.recursive(atoms | mutable, containers, max_leaves=8)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if isinstance(one, argparse.Namespace | types.SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(value=values, as_object=st.booleans())
def test_a_value_comes_back_or_is_refused_by_name(value: Any, as_object: bool) -> None:
    url, key = "memory://values/state", "the_key"
    held = ShardedObject(key, value, (1,), (0,)) if as_object else value
    refused: CheckpointingException | None = None
    try:
        shardstore.save({"at": {key: held}}, url, overwrite=True)
    except CheckpointingException as error:
        refused = error
    if refused is not None:
        assert key in str(refused), refused
        return
    asked = {"at": {key: ShardedObject(key, None, (1,), (0,))}} if as_object else {}
    loaded = shardstore.load(asked, url)["at"][key]
    assert same(loaded, value), (loaded, value)


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_path_and_type(name: str) -> None:
    layers = [{"other": 1, "bad": 0}, {"other": 1, "bad": REFUSED[name]()}]
    state = {"model": {"layers": layers}, "n": 1}
    with pytest.raises(CheckpointingException) as caught:
        shardstore.save(state, "memory://values/refused", overwrite=True)
    assert "model.layers.1.bad" in str(caught.value)
    assert name.partition(" ")[0] in str(caught.value)
    for layer in layers:
        layer["bad"] = LocalNonpersistentObject(3)
    shardstore.save(state, "memory://values/refused", overwrite=True)
    loaded = shardstore.load(state, "memory://values/refused")
    assert loaded["model"]["layers"] == [{"other": 1, "bad": 3}] * 2


def test_a_class_that_the_program_allows_passes() -> None:
    state = {"color": Color.RED, "point": Point(1, 2)}
    with torch.serialization.safe_globals([Color, Point]):
        shardstore.save(state, "memory://values/allowed", overwrite=True)
        assert same(shardstore.load({}, "memory://values/allowed"), state)


def test_a_whole_ordered_dict_comes_back_as_one() -> None:
    def state(fill: float) -> Any:
        weight = ShardedTensor.from_rank_offsets("w", torch.full((2,), fill))
        inner = collections.OrderedDict(z=1, weight=weight, a=[2])
        return collections.OrderedDict(step=3, model=inner, empty=collections.OrderedDict(), b=4)

    shardstore.save(state(1.0), "memory://values/ordered", overwrite=True)
    loaded = shardstore.load(state(0.0), "memory://values/ordered")
    expected = state(1.0)
    expected["model"]["weight"] = torch.ones(2)
    assert same(loaded, expected), loaded
    # Without the template the rest is as it was saved.
    del expected["model"]["weight"]
    assert same(shardstore.load_common_state_dict("memory://values/ordered"), expected)
