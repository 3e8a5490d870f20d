"""shardstore.dict_utils: nested dicts and lists walked, split, compared and merged."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.dict_utils import (
    StructureError,
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
    shaped_like,
    united,
)
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.values.record import LIST_LENGTH

nested = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=20,
).filter(lambda x: isinstance(x, dict | list))


def float_nan() -> float:
    return float("nan")  # another object each time


def is_int(value: Any) -> bool:
    return isinstance(value, int)


def ten_times(value: Any) -> Any:
    return value * 10 if is_int(value) else value


def state() -> dict[str, Any]:
    return {
        "a": 1,
        "b": "s",
        "c": {"d": 2, "e": "z"},
        "l": [1, "q", [2, "w"], {"k": 3}],
        "empty": {},
        "none": [],
        "t": (1, 2),
    }


@pytest.mark.parametrize("value", [5, (1, 2), None])
def test_extract_from_a_value(value: Any) -> None:
    with pytest.raises(ValueError, match=type(value).__name__) as caught:
        extract_matching_values(value, is_int)
    assert isinstance(caught.value, CheckpointingException)


@given(nested)
def test_extract_loses_no_value(x: Any) -> None:
    matching, others = extract_matching_values(x, is_int)
    values = list(nested_values(x))
    assert list(nested_values(matching)) == [v for v in values if is_int(v)]
    assert list(nested_values(others)) == [v for v in values if not is_int(v)]
    matching, others = extract_matching_values(x, is_int, return_lists_as_dicts=True)
    assert list(nested_values(matching)) == [v for v in values if is_int(v)]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"a": 1}, {"a": 1}, ([], [], [])),
        ({"a": 1, "c": 1}, {"b": 1}, ([("a",), ("c",)], [("b",)], [])),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "z": 2}}, ([("a", "y")], [("a", "z")], [])),
        ([1, 2, 3, 4], [1, 5], ([3, 2], [], [((1,), int, int)])),
        ({"a": (1, 2)}, {"a": (1, 3)}, ([], [], [(("a", 1), int, int)])),
        ({"a": [1]}, {"a": {0: 1}}, ([], [], [(("a",), list, dict)])),
        ({"a": [1]}, {"a": (1,)}, ([], [], [(("a",), list, tuple)])),
        ({"a": 1}, {"a": 1.0}, ([], [], [])),
        ({1: "a"}, {"1": "a"}, ([(1,)], [("1",)], [])),
        ({"a": None}, {"a": 0}, ([], [], [(("a",), type(None), int)])),
        (1, 2, ([], [], [((), int, int)])),
        ({"a": np.ones(2)}, {"a": np.ones(2)}, ([], [], [])),
        (
            {"a": np.ones(2)},
            {"a": np.array([1.0, 0.0])},
            ([], [], [(("a", 1), np.float64, np.float64)]),
        ),
        (np.array(1.0), np.array(1.0), ([], [], [])),
        *(
            ((1, make()), (1, make()), ([], [], []))
            for make in (float_nan, np.array([np.nan]).copy)
        ),
        ((1, float_nan()), (1, 1.0), ([], [], [((1,), float, float)])),
    ],
)
def test_diff(left: Any, right: Any, expected: Any) -> None:
    assert diff(left, right) == expected


def test_diff_of_tensors() -> None:
    ones = torch.ones(2, 2)
    assert diff({"a": ones}, {"a": torch.ones(2, 2, dtype=torch.float64)}) == ([], [], [])
    other = ones.clone()
    other[1, 0] = 7
    _, _, [mismatch] = diff({"a": ones}, {"a": other})
    assert mismatch == (("a",), torch.Tensor, torch.Tensor, 1, (2, 2), [[1, 0]])
    _, _, [mismatch] = diff({"a": ones}, {"a": torch.ones(3)})
    assert mismatch == (("a",), torch.Tensor, torch.Tensor, (2, 2), (3,))
    _, _, [mismatch] = diff({"a": ones}, {"a": 5})
    assert mismatch == (("a",), torch.Tensor, int)
    assert diff(torch.tensor(1.0), torch.tensor(1.0)) == ([], [], [])
    nan = float_nan()
    _, _, [mismatch] = diff(torch.tensor([nan, 1, 2]), torch.tensor([nan, nan, 2]))
    assert mismatch[3:] == (1, (3,), [[1]])


def test_diff_of_what_cannot_be_compared() -> None:
    class Stubborn:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("never")

        __hash__ = None  # type: ignore[assignment]

    left, right = Stubborn(), Stubborn()
    assert diff({"a": left}, {"a": right}) == ([], [], [(("a",), Stubborn, Stubborn)])
    meta = torch.empty(2, device="meta")
    assert diff(meta, meta) == ([], [], [((), torch.Tensor, torch.Tensor)])


def test_diff_looks_into_what_is_sharded_and_at_its_data_alone() -> None:
    def shard(*values: float, key: str = "k") -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.tensor(values))

    assert diff({"a": shard(1, 2)}, {"a": shard(1, 2, key="other")}) == ([], [], [])
    _, _, [mismatch] = diff({"a": shard(1, 2)}, {"a": shard(1, 2, 3)})
    assert mismatch[0] == ("a", ShardedTensor)
    assert mismatch[3:] == (torch.Size([2]), torch.Size([3]))
    one, two = (ShardedObject("o", {"x": [n]}, (1,), (0,)) for n in (1, 2))
    assert diff(one, two, ("p",)) == ([], [], [(("p", ShardedObject, "x", 0), int, int)])
    assert diff(one, shard(1)) == ([], [], [((), ShardedObject, ShardedTensor)])


@given(nested)
def test_diff_of_equals_is_empty(x: Any) -> None:
    assert diff(x, copy.deepcopy(x)) == ([], [], [])


def test_inspect_types(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_types({"a": 1, "b": [torch.ones(2, 3), {"c": "x" * 99}]})
    printed = capsys.readouterr().out
    assert "> a: [<class 'int'>]: 1" in printed
    assert "    - 0: Tensor of shape torch.Size([2, 3])" in printed
    assert "        > c: [<class 'str'>]: xxx" in printed
    assert "x" * 50 not in printed


def test_nested_values_and_items() -> None:
    assert list(nested_values(state())) == [1, "s", 2, "z", 1, "q", 2, "w", 3, (1, 2)]
    x = [1, {"a": [2]}]
    items = list(nested_items_iter(x))
    assert items == [(x, 0, 1), ([2], 0, 2)]
    for container, key, value in nested_items_iter(x):
        container[key] = value + 1
    assert x == [2, {"a": [3]}]


def test_maps_apply_a_function_to_all_values() -> None:
    d: dict[str, Any] = {"a": 1, "b": [2, {"c": 3}]}
    dict_map(ten_times, d)
    assert d == {"a": 10, "b": [20, {"c": 30}]}
    dict_map_with_key(lambda k, v: (k, v), d)
    assert d == {"a": ("a", 10), "b": [(0, 20), {"c": ("c", 30)}]}

    x = state()
    inner = x["l"]
    assert dict_list_map_inplace(ten_times, x) is x
    assert x["l"] is inner
    assert inner == [10, "q", [20, "w"], {"k": 30}]
    assert x["t"] == (1, 2)
    assert dict_list_map_inplace(ten_times, 5) == 50

    y = state()
    mapped = dict_list_map_outplace(ten_times, y)
    assert mapped == x
    assert y == state()
    assert mapped["none"] is not y["none"]


def test_merge_changes_the_first_dict() -> None:
    left = {"a": {"x": 1}, "l": [{"p": 1}, {}], "none": []}
    right: dict[str, Any] = {"a": {"y": {"z": 1}}, "l": [{"q": 2}, {"r": 3}], "b": 2, "none": []}
    merged = merge(left, right)
    assert merged is left
    assert merged == {
        "a": {"x": 1, "y": {"z": 1}},
        "l": [{"p": 1, "q": 2}, {"r": 3}],
        "none": [],
        "b": 2,
    }
    assert right["a"] == {"y": {"z": 1}}


@pytest.mark.parametrize(
    ("left", "right", "text"),
    [
        ({"a": 1}, {"a": 1}, r"\('p', 'a'\)"),
        ({"a": {}}, {"a": []}, r"\('p', 'a'\)"),
        ({"a": [1]}, {"a": {0: 5}}, r"\('p', 'a'\)"),
        ([1, 2], [1], "2 and 1 elements"),
        ([{"q": 1}], [{"q": 1}], r"\('p', 0, 'q'\)"),
        ([1, 2], 2, r"\('p',\)"),
        (1, [2, 3], r"\('p',\)"),
        ({"a": None}, {"a": None}, "None and None"),
    ],
)
def test_merge_refuses_two_values_in_one_place(left: Any, right: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        merge(left, right, key=("p",))
    assert isinstance(caught.value, StructureError)


@given(nested)
def test_merge_joins_what_was_split(x: Any) -> None:
    matching, others = extract_matching_values({"x": x}, is_int, return_lists_as_dicts=True)
    joined = merge(copy.deepcopy(matching), others)
    whole, _ = extract_matching_values({"x": x}, lambda _: True, return_lists_as_dicts=True)
    # Empty dicts and lists hold no value and belong to the part that does not match.
    assert sorted(map(repr, nested_values(joined))) == sorted(map(repr, nested_values(whole)))


SHARD = ShardedTensor.from_rank_offsets("t", torch.zeros(1))


@pytest.mark.parametrize(
    ("asked", "found", "expected"),
    [
        ({"b": 1, "a": 2, "z": 3}, {"a": 5, "c": 7, "b": [6]}, {"b": [6], "a": 5, "c": 7}),
        (OrderedDict(b=1), {"a": 5, "b": {"x": 6}}, OrderedDict(b={"x": 6}, a=5)),
        ({"a": 1}, OrderedDict(a=2), OrderedDict(a=2)),
        ({1: 0, 2: 0, "2": 0}, {"1": 5, "2": 7}, {1: 5, "2": 7}),
        (
            {1: 0, 2: 0},
            {"1": {"x": 5}, 1: {"y": 6}, "2": 8, 2: 7},
            {1: {"y": 6, "x": 5}, 2: 7, "2": 8},
        ),
        (
            {"a": {}, "b": [], "c": {"d": []}, "e": [1]},
            {"b": [3]},
            {"a": {}, "b": [3], "c": {"d": []}},
        ),
        ([4, 5, 6], {LIST_LENGTH: 3, 1: {LIST_LENGTH: 1, 0: 9}}, [4, [9]]),
        ([{"x": 1, "y": SHARD}, SHARD, [], 5, 6], {LIST_LENGTH: 6, 3: 9}, [{"x": 1}, [], 9]),
        ([{}, 5, [], 6], [1], [1, 5, []]),
        ([{1: 0}], [{"1": [4]}], [{1: [4]}]),
        ([1], {0: 2}, {0: 2}),
        ({0: {}}, [2], [2]),
        ([3], (4,), (4,)),
    ],
)
def test_a_loaded_state_takes_the_shape_of_the_requested_one(
    asked: Any, found: Any, expected: Any
) -> None:
    before = repr(found)
    assert repr(shaped_like(asked, found)) == repr(expected)
    assert repr(found) == before


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([{"a": 1}], [{"b": 2}, 3], [{"a": 1, "b": 2}, 3]),
        ([{"a": 1}, 2], [], [{"a": 1}, 2]),
        ([{"a": 1}], {LIST_LENGTH: 3, 2: 5}, {0: {"a": 1}, LIST_LENGTH: 3, 2: 5}),
        ({LIST_LENGTH: 3, 2: 5}, [1], {LIST_LENGTH: 3, 2: 5, 0: 1}),
        ({LIST_LENGTH: 4}, {LIST_LENGTH: 3, 0: 1}, {LIST_LENGTH: 4, 0: 1}),
        ({1: 2}, {LIST_LENGTH: 1, 0: 1}, {1: 2, LIST_LENGTH: 1, 0: 1}),
    ],
)
def test_parts_of_a_list_are_united(left: Any, right: Any, expected: Any) -> None:
    assert united(left, right) == expected


@pytest.mark.parametrize("left", [{"a": {}}, 1, {LIST_LENGTH: 1, 0: {}}, [{}]])
@pytest.mark.parametrize("right", [{"a": 1}, [2], {LIST_LENGTH: 1, 0: 2}, 3])
def test_two_values_in_one_place_are_not_united(left: Any, right: Any) -> None:
    with pytest.raises(StructureError):
        united(left, right)
    for pair in (([{}], {1: 2}), ({1: 2}, [{}])):
        with pytest.raises(StructureError):
            united(*pair)


def test_map_reduce() -> None:
    assert map_reduce([1, 1, 2]) == {1: [1, 1], 2: [2]}
    tens = map_reduce([3, 2, 1], lambda v: v % 2, lambda v: v * 10, sum)
    assert list(tens.items()) == [(1, 40), (0, 20)]
    assert map_reduce((w for w in ["ab", "c"]), key_fn=len, reduce_fn=len) == {2: 1, 1: 1}
    assert map_reduce([]) == {}
