"""shardstore.state_dict_utils: what is split off before saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.dict_utils import dict_list_map_outplace
from shardstore.errors import CheckpointingException, StructureError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from shardstore.state_dict_utils import (
    StateSplit,
    filter_out_empty_flatten_tensor,
    load_preprocess,
    save_preprocess,
)
from shardstore.values.record import LIST_LENGTH

DATA = torch.arange(6.0).reshape(2, 3)


def tensor(key: str, *offsets: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, DATA, *offsets)


def flat(start: int, stop: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets_flat(
        f"flat{start}",
        torch.arange(float(start), float(stop)),
        (2, 3),
        flattened_range=slice(start, stop),
    )


def factory(*parts: ShardedTensor) -> ShardedTensorFactory:
    def build(*_: Any) -> dict[str, Any]:
        return {part.key: part for part in parts}

    return ShardedTensorFactory("f", DATA, build, lambda loaded: torch.tensor(sorted(loaded)))


def state() -> dict[str, Any]:
    return {
        "t": tensor("t"),
        "o": ShardedObject("o", 1, (1,), (0,)),
        "f": factory(tensor("built")),
        "n": LocalNonpersistentObject(5),
        "c": {"t": tensor("t2"), "x": 1},
        "l": [tensor("t3"), 7, {"n": LocalNonpersistentObject(6)}],
        "e": {},
    }


def test_save_splits_sharded_and_common() -> None:
    whole = state()
    sharded, common = save_preprocess(whole, validate_access_integrity=False)
    assert {k: sharded[k] for k in ("t", "o")} == {"t": whole["t"], "o": whole["o"]}
    assert list(sharded) == ["t", "o", "f", "c", "l"]
    assert sharded["f"]["built"].key == "built"
    assert sharded["c"] == {"t": whole["c"]["t"]}
    assert sharded["l"] == [whole["l"][0]]
    assert common == {"c": {"x": 1}, "l": [7], "e": {}}
    assert whole["f"]["built"] is sharded["f"]["built"]
    assert isinstance(whole["n"], LocalNonpersistentObject)


def test_save_drops_empty_flattened_tensors_also_built_ones() -> None:
    whole = {"a": flat(1, 1), "f": factory(flat(2, 2), flat(3, 4)), "x": 3}
    sharded, common = save_preprocess(whole, False)
    assert list(sharded) == ["f"]
    assert list(sharded["f"]) == ["flat3"]
    assert common == {"x": 3}


def test_save_checks_the_shards() -> None:
    sharded, common = save_preprocess(state())
    assert sharded["t"].key == "t"
    assert common["c"] == {"x": 1}
    half = {"a": tensor("half", (0, 0, 2))}
    with pytest.raises(CheckpointingException, match="half"):
        save_preprocess(half)
    sharded, _ = save_preprocess(half, validate_access_integrity=False)
    assert sharded == half


def test_save_gives_a_copy_to_the_preprocessing_of_the_common_part() -> None:
    seen: list[Any] = []

    def preprocess(common: dict[str, Any]) -> dict[str, Any]:
        seen.append(dict(common))
        common["c"].clear()
        return common

    _, common = save_preprocess(state(), preprocess_common_before_consistancy_check=preprocess)
    assert [list(s) for s in seen] == [["c", "l", "e"]]
    assert common["c"] == {"x": 1}
    save_preprocess(state(), False, preprocess)
    assert len(seen) == 1


def test_load_splits_off_what_is_not_stored() -> None:
    whole = state()
    wanted, nonpersistent, factories = load_preprocess(whole)
    assert list(wanted) == ["t", "o", "f", "c", "l"]
    assert wanted["t"] is whole["t"]
    assert wanted["f"]["built"].key == "built"
    assert wanted["c"] == whole["c"]
    assert wanted["l"] == [whole["l"][0], 7]
    assert nonpersistent == {"n": 5, "l": [{"n": 6}]}
    assert list(factories) == ["f"]
    assert factories["f"].data is None

    assert isinstance(whole["f"], ShardedTensorFactory)
    assert whole["f"].data is DATA
    assert isinstance(whole["n"], LocalNonpersistentObject)


def test_load_keeps_what_factories_build_for_their_merge() -> None:
    whole = {"a": flat(1, 1), "l": [3, factory(flat(2, 2), flat(3, 4))]}
    wanted, _, factories = load_preprocess(whole)
    assert list(wanted) == ["a", "l"]
    assert list(wanted["l"][1]) == ["flat2", "flat3"]
    assert list(factories["l"]) == [1]
    loaded = {"l": [3, {2: "loaded", 3: "loaded"}]}
    assert apply_factory_merges(loaded, factories)["l"][1].tolist() == [2, 3]


@pytest.mark.parametrize(
    "wrap",
    [lambda e: [e, tensor("w")], lambda e: [{"a": [e]}, {"a": [tensor("w")]}], lambda e: [e]],
    ids=["beside a tensor", "nested", "alone"],
)
def test_what_no_rank_stores_is_no_element_of_a_list(
    tmp_path: Path, wrap: Callable[[ShardedTensor], Any]
) -> None:
    """A load left it out, and the next element took its place."""
    nothing = ShardedTensor.from_rank_offsets_flat(
        "e", torch.empty(0), (0, 4), flattened_range=slice(0, 0)
    )
    for loading in (False, True):
        with pytest.raises(StructureError, match="make it a dict"):
            StateSplit({"l": wrap(nothing)}, loading=loading)
    state = {"d": {"e": nothing, "w": tensor("w")}, "n": 1}
    assert list(load_preprocess(state)[0]["d"]) == ["w"]
    shardstore.save(state, tmp_path / "c")
    found: Any = shardstore.load(state, tmp_path / "c", strict="raise_all")
    assert list(found["d"]) == ["w"]


def test_filter_out_empty_flattened() -> None:
    kept = {
        "b": flat(1, 3),
        "l": [5],
        "zero": ShardedTensor.from_rank_offsets("z", torch.zeros(0, 3)),
        "f": ShardedTensorFactory("f", DATA, lambda *_: {}, lambda _: DATA, 0, slice(0, 0)),
        "plain": torch.zeros(0),
    }
    whole: dict[str, Any] = {
        **kept,
        "a": flat(1, 1),
        "l": [flat(2, 2), 5, {"z": flat(0, 0).without_data()}],
        "n": {"a": flat(0, 0)},
    }
    filtered = filter_out_empty_flatten_tensor(whole)
    assert list(filtered) == ["b", "l", "zero", "f", "plain"]
    assert filtered["l"] == [5]
    assert filtered["b"] is kept["b"]
    assert len(whole["l"]) == 3
    assert [s.key for s in filter_out_empty_flatten_tensor([flat(1, 1), flat(0, 1)])] == ["flat0"]
    with pytest.raises(ValueError, match="int"):
        filter_out_empty_flatten_tensor(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mixed", "sharded", "common"),
    [
        ([tensor("a"), 5], {0: "a"}, {1: 5}),
        ([{"w": tensor("a")}, {"n": 2}], {0: {"w": "a"}}, {1: {"n": 2}}),
        ([{"w": tensor("a"), "n": 1}, {}], {0: {"w": "a"}}, {0: {"n": 1}, 1: {}}),
        ([LocalNonpersistentObject(1), tensor("a")], {1: "a"}, {}),
        ([[LocalNonpersistentObject(1)], []], None, {1: []}),
    ],
    ids=["beside", "nested", "uneven", "local", "local and empty"],
)
def test_a_list_of_several_kinds_keeps_its_positions(mixed: Any, sharded: Any, common: Any) -> None:
    split = StateSplit({"layers": mixed}, loading=False)
    keys = dict_list_map_outplace(lambda shard: shard.key, split.sharded)
    assert keys == ({} if sharded is None else {"layers": sharded})
    assert split.common == {"layers": {**common, LIST_LENGTH: len(mixed)}}


def test_lists_of_one_kind_and_of_both_kinds_throughout_are_fine() -> None:
    state = {
        "sharded": [tensor("a"), tensor("b")],
        "common": [1, [2, {}], []],
        "both": [{"w": tensor("c"), "n": 1}, {"w": tensor("d"), "n": 2}],
        "not kept": [LocalNonpersistentObject(1), LocalNonpersistentObject(2)],
        "all": [{"w": tensor("e"), "n": LocalNonpersistentObject(1)}],
    }
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    assert [list(part) for part in sharded["both"]] == [["w"], ["w"]]
    assert common["both"] == [{"n": 1}, {"n": 2}]


def named(key: str, value: float = 0.0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2,), float(value)))


B = torch.full((2,), 7.0)


@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        # A list by position beside a dict with the same kinds of values.
        (
            lambda b: [[1, b], {"n": None, "w": named("w", 5)}, [2, named("c", 3)]],
            lambda b: [[1, b], {"n": None, "w": named("w")}, [2, named("c")]],
            [[1, B], {"n": None, "w": B - 2}, [2, B - 4]],
        ),
        # A list with a tensor that is not stored before one with a tensor that is.
        (lambda b: [[1], [2, b]], lambda b: [[1, named("new")], [2, b]], [[1], [2, B]]),
        (lambda b: [[1, None], [2, b]], lambda b: [[1, named("new")], [2, b]], [[1, None], [2, B]]),
        # Other values where a tensor is stored.
        (lambda b: [named("a"), b], lambda b: [{"n": 1, "w": named("new")}, b], [{"n": 1}, B]),
    ],
    ids=["lists and dicts", "not stored", "stored as another value", "other values"],
)
def test_lists_in_a_list_keep_their_places(
    tmp_path: Path, saved: Any, asked: Any, expected: list[Any]
) -> None:
    shardstore.save({"l": saved(named("b", 7))}, tmp_path / "c")
    loaded, _, _ = shardstore.load({"l": asked(named("b"))}, tmp_path / "c", strict="return_all")
    torch.testing.assert_close(loaded, {"l": expected})


def test_tensors_that_a_load_leaves_out_move_no_others(tmp_path: Path) -> None:
    def state(new: Sequence[int] = ()) -> dict[str, Any]:
        keys = [f"new{n}" if n in new else f"w{n}" for n in range(4)]
        items = [{"n": n, "w": named(key, n)} for n, key in enumerate(keys)]
        return {"l": [items[:2], items[2:]]}

    shardstore.save(state(), tmp_path / "c")
    for new in chain.from_iterable(combinations(range(4), count) for count in range(5)):
        loaded: Any = shardstore.load(state(new), tmp_path / "c", strict="ignore_all")
        elements = [*chain(*loaded["l"])]
        assert [element["n"] for element in elements] == [*range(4)]
        tensors = [element["w"][0] if "w" in element else None for element in elements]
        assert tensors == [None if n in new else n for n in range(4)]


def test_a_list_of_numbers_is_walked_as_one_value() -> None:
    """A data loader may have a million of them."""
    given = {"a": [1, "x", None], "b": [1, [2.5]]}
    split = StateSplit(given, loading=True)
    assert [path for path, _ in split.others] == [("a",), ("b", 0), ("b", 1)]
    saved = StateSplit(given, loading=False).common
    assert saved == given
    assert saved["a"] is not given["a"]


def test_what_factories_build_in_a_list_keeps_its_position(tmp_path: Path) -> None:
    def state(build: Callable[[str], Any]) -> dict[str, Any]:
        made = ShardedTensorFactory("f", DATA, lambda key, *_: build(key), lambda part: part)
        return {"l": [tensor("w"), made]}

    builders: dict[Callable[[str], Any], Any] = {
        lambda key: {"a": tensor(key), "b": 5}: {"a": DATA, "b": 5},
        lambda key: {}: {},
        lambda key: [tensor(key), 5]: [DATA, 5],
    }
    for build, expected in builders.items():
        shardstore.save(state(build), tmp_path / "c", overwrite=True)
        loaded = shardstore.load(state(build), tmp_path / "c")
        torch.testing.assert_close(loaded, {"l": [DATA, expected]})


@pytest.mark.parametrize("backend", [("zarr", 2), ("zarr", 1), ("torch_dist", 1)], ids=str)
def test_a_state_with_factories_is_saved_and_loaded_again(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    """As one that a program describes once, with tensors that it trains."""
    data = torch.zeros(2, 3)
    made = ShardedTensorFactory(
        "f", data, lambda key, data, *_: {"t": named(key, data[0, 0])}, lambda parts: parts["t"]
    )
    state = {"l": [made]}
    for n in (1, 2):
        data.fill_(n)
        shardstore.save(state, tmp_path / "c", backend, overwrite=True)
        assert shardstore.load(state, tmp_path / "c")["l"][0].tolist() == [n, n]


@pytest.mark.parametrize("value", [(1, tensor("w")), ({"w": [tensor("w")]},)], ids=["", "deep"])
@pytest.mark.parametrize("loading", [False, True])
def test_a_sharded_value_in_a_tuple_is_refused(value: tuple[Any, ...], loading: bool) -> None:
    with pytest.raises(StructureError, match=r"the tuple at 'x\.0' .* make it a list"):
        StateSplit({"x": [value]}, loading=loading)


def test_a_factory_that_builds_a_factory_is_refused(tmp_path: Path) -> None:
    inner = ShardedTensorFactory("f", DATA, lambda key, *_: tensor(key), lambda part: part)
    outer = ShardedTensorFactory("f", DATA, lambda *_: [inner], lambda part: part)
    with pytest.raises(StructureError, match="a factory built the factory"):
        shardstore.save({"l": [tensor("w"), outer]}, tmp_path / "c")
    assert not list(tmp_path.iterdir())
