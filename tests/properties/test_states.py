"""Every state that `save` accepts is loaded by the same state, and by an empty one."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st

import shardstore
from shardstore import CheckpointManager, LocalNonpersistentObject, ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.dict_utils import dict_list_map_outplace
from shardstore.errors import MissingKeyError, StructureError
from shardstore.mapping import ShardedTensorFactory
from tests.properties.test_common_values import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, Any]


class Numbered:
    """Stands for a sharded value in a generated state; each gets a key of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def factory(key: str, data: torch.Tensor) -> ShardedTensorFactory:
    def build(key: str, data: torch.Tensor, *_: Any) -> Any:
        return {
            "left": ShardedTensor.from_rank_offsets(f"{key}.left", data[:1]),
            "right": ShardedTensor.from_rank_offsets(f"{key}.right", data[1:]),
        }

    return ShardedTensorFactory(key, data, build, lambda parts: torch.cat([*parts.values()]))


def described(state: State) -> State:
    """Return the state with real sharded values, tensors of new memory."""
    count = 0

    def made(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            return value.clone()
        if not isinstance(value, Numbered):
            return copy.deepcopy(value)
        count += 1
        key, data = f"key{count}", torch.full((3,), float(count))
        return {
            "tensor": lambda: ShardedTensor.from_rank_offsets(key, data),
            "object": lambda: ShardedObject(key, (count, key), (1,), (0,)),
            "local": lambda: LocalNonpersistentObject(count),
            "factory": lambda: factory(key, data),
        }[value.kind]()

    return dict_list_map_outplace(made, state)


def loaded(state: State) -> State:
    """Return what a load of a described state returns."""

    def value_of(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        sharded = isinstance(value, ShardedTensor | ShardedObject | ShardedTensorFactory)
        return value.data if sharded else value

    return dict_list_map_outplace(value_of, state)


values = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.text(max_size=2),
    st.builds(torch.arange, st.integers(0, 3)),
    st.just(torch.tensor(2.5)),
    st.just(()),
    st.tuples(st.integers(0, 3), st.builds(torch.arange, st.integers(0, 3))),
)
shards = st.builds(Numbered, st.sampled_from(["tensor", "object", "local", "factory"]))
names = st.sampled_from(["a", "b", "buf", "0", "params"])


def states(atoms: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[State]:
    inner = st.recursive(
        atoms | st.just([]) | st.just({}),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )
    return st.dictionaries(names, inner, max_size=3)


EMPTY: list[State] = [
    {"w": Numbered("tensor"), "hist": [{"buf": []}]},
    {"w": Numbered("tensor"), "a": [[]], "b": [{}], "params": [{"params": []}]},
    {"a": [Numbered("tensor"), 5, [], {"b": Numbered("object")}, Numbered("local")]},
    {"a": [Numbered("factory"), {"b": Numbered("local")}]},
    {"a": [{"w": torch.ones(2), "n": 1}, {}]},
]


def manager_way(folder: Path, state: Callable[[], State]) -> tuple[Any, Any]:
    manager = CheckpointManager(folder)
    manager.save(1, state())
    same_state, empty = manager.restore(state()), manager.restore({})
    assert same_state is not None
    assert empty is not None
    return same_state.state, empty.state


def direct(backend: tuple[str, int]) -> Callable[[Path, Callable[[], State]], tuple[Any, Any]]:
    def way(folder: Path, state: Callable[[], State]) -> tuple[Any, Any]:
        shardstore.save(state(), folder / "c", backend)
        return shardstore.load(state(), folder / "c"), shardstore.load({}, folder / "c")

    return way


WAYS = {
    "zarr": direct(("zarr", 2)),
    "megatron zarr": direct(("zarr", 1)),
    "torch_dist": direct(("torch_dist", 1)),
    "manager": manager_way,
}


@pytest.mark.parametrize("way", WAYS)
@given(state=states(values | shards, names | st.integers(0, 2)))
@example(state=EMPTY[0])
@example(state=EMPTY[1])
@example(state=EMPTY[2])
@example(state=EMPTY[3])
@example(state=EMPTY[4])
def test_a_saved_state_is_loaded_by_itself_and_by_an_empty_one(way: str, state: State) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        again, empty = WAYS[way](folder, lambda: described(state))
        assert same(again, loaded(described(state))), again
        assert isinstance(empty, dict)
    finally:
        shutil.rmtree(folder)


def zeroed(state: State) -> State:
    return dict_list_map_outplace(
        lambda v: v.clone().zero_() if isinstance(v, torch.Tensor) else v, described(state)
    )


@given(state=states(values, names))
@example(state={"params": torch.ones(2), "a": [{"buf": []}]})
@example(state={"a": [torch.ones(2), 5, []], "b": [[]]})
def test_a_state_saved_through_dcp_is_loaded_by_itself(state: State) -> None:
    """By `load` into the same and an empty state; by DCP if DCP loads it from its own files."""
    folder = tempfile.mkdtemp()
    try:
        dcp.save(described(state), storage_writer=StorageWriter(f"{folder}/c"))
        assert same(shardstore.load(described(state), f"{folder}/c"), described(state))
        assert isinstance(shardstore.load({}, f"{folder}/c"), dict)
        dcp.save(described(state), checkpoint_id=f"{folder}/own")
        try:
            dcp.load(zeroed(state), checkpoint_id=f"{folder}/own")
        except dcp.api.CheckpointException:
            return
        asked = zeroed(state)
        dcp.load(asked, storage_reader=StorageReader(f"{folder}/c"))
        assert same(asked, described(state)), asked
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("by_dcp", [False, True], ids=["our writer", "its own files"])
def test_keys_that_dcp_made_text_are_those_of_the_state(tmp_path: Path, by_dcp: bool) -> None:
    """As those of an optimizer's state, and of the milestones of a MultiStepLR."""

    def state(n: int) -> State:
        of_parameters = {0: {"step": n, "m": torch.full((2,), n)}, 1: {"step": 2 * n}}
        return {"state": of_parameters, "at": Counter({25: n}), "both": {1: n, "1": 3 * n}}

    saved = {key: value for key, value in state(1).items() if key != "both"}
    where: State = {"checkpoint_id": tmp_path / "dcp"}
    dcp.save(saved, **(where if by_dcp else {"storage_writer": StorageWriter(tmp_path / "c")}))
    if by_dcp:
        convert(tmp_path / "dcp", tmp_path / "c")
    asked = {key: value for key, value in state(0).items() if key != "both"}
    assert same(shardstore.load(asked, tmp_path / "c"), saved)
    shardstore.save(state(1), tmp_path / "ours")
    for asked in (state(0), {"both": {1: 0}}):
        assert same(shardstore.load(asked, tmp_path / "ours"), {**asked, **state(1)})


@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        ({"w": torch.ones(2)}, {"state": {}}, {"state": {}}),
        ({"state": {0: {"step": 4}}}, {"state": {}, "w": []}, {"state": {0: {"step": 4}}, "w": []}),
        ({"ema": [1, 2]}, {"ema": []}, {"ema": [1, 2]}),
        ({"opt": [{"params": [0, 1]}]}, {"opt": [{"params": []}]}, {"opt": [{"params": [0, 1]}]}),
        ({"m": [{"n": 1}, {"n": 2}]}, {"m": [{}]}, {"m": [{"n": 1}, {"n": 2}]}),
    ],
    ids=["nothing stored", "new optimizer", "list", "list in a list", "shorter list"],
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a shard"])
def test_empty_containers_are_filled_with_the_stored_values(
    tmp_path: Path, saved: State, asked: State, expected: State, beside: bool
) -> None:
    shard = {"key": Numbered("tensor")} if beside else {}
    shardstore.save(described({**saved, **shard}), tmp_path / "c")
    again = shardstore.load(described({**asked, **shard}), tmp_path / "c")
    stored = {key: value for key, value in saved.items() if key not in expected}
    assert same(again, {**loaded(described({**expected, **shard})), **stored}), again


@pytest.mark.parametrize("wrap", [lambda t: {"0": t}, lambda t: [t, 5]], ids=["dict", "list"])
def test_arrays_below_an_empty_container_are_named(
    tmp_path: Path, wrap: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """They need a layout, which an empty container does not say."""
    state = shardstore.shard({"optim": {"state": wrap(torch.ones(2))}, "step": 3})
    empty = {"optim": {"state": type(wrap(None))()}, "step": 0}
    shardstore.save(state, tmp_path / "c")
    with pytest.raises(MissingKeyError, match=r"'optim.state'.*'optim.state.0'.*leave"):
        shardstore.load(empty, tmp_path / "c")
    loose = shardstore.load(empty, tmp_path / "c", strict="ignore_all")
    rest = wrap(None)[1:] if isinstance(wrap(None), list) else {}
    assert loose == {"optim": {"state": rest}, "step": 3}
    dcp.load({"optim": {"state": {}}}, storage_reader=StorageReader(tmp_path / "c"))
    assert "'optim.state'" in caplog.text


@pytest.mark.parametrize("backend", [("zarr", 2), ("zarr", 1), ("torch_dist", 1)], ids=str)
def test_a_list_of_tensors_and_values_stays_a_list(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    state = described({"a": [Numbered("tensor"), 5, {"b": Numbered("tensor"), "n": 6}]})
    shardstore.save(state, tmp_path / "c", backend)
    for asked in ({"a": []}, {}):
        assert shardstore.load(asked, tmp_path / "c") == {"a": [5, {"n": 6}]}
    assert shardstore.load_common_state_dict(tmp_path / "c") == {"a": [5, {"n": 6}]}


def test_a_list_of_tensors_and_values_of_dcp_stays_a_list(tmp_path: Path) -> None:
    dcp.save({"a": [torch.ones(1), 5, {"n": 6}]}, storage_writer=StorageWriter(tmp_path / "c"))
    assert shardstore.load({}, tmp_path / "c") == {"a": [5, {"n": 6}]}
    assert shardstore.open(tmp_path / "c").common == {"a": [5, {"n": 6}]}


class Holder:
    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        raise AssertionError


@pytest.mark.parametrize("value", [torch.nn.Linear(1, 1), Holder()], ids=["module", "stateful"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a shard"])
def test_objects_with_state_dicts_are_refused_with_the_remedy(
    tmp_path: Path, value: Any, beside: bool
) -> None:
    rest = described({"key": Numbered("tensor")} if beside else {"n": 1})
    shardstore.save(rest, tmp_path / "c")
    for refuse in (
        lambda state: shardstore.save(state, tmp_path / "d"),
        lambda state: shardstore.async_save(state, tmp_path / "d"),
        lambda state: shardstore.load(state, tmp_path / "c"),
    ):
        with pytest.raises(StructureError, match=r"'at\.1'.*state_dict\(\)"):
            refuse({"at": [1, value], **rest})
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("value", [object(), lambda: 1], ids=["object", "function"])
def test_values_that_cannot_be_saved_are_refused_by_a_load_too(tmp_path: Path, value: Any) -> None:
    shardstore.save({"at": 1}, tmp_path / "c")
    with pytest.raises(shardstore.CheckpointingException, match="'at'"):
        shardstore.load({"at": value}, tmp_path / "c")
