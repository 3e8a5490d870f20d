"""Any state with DTensors is loaded by the same state, on ranks that hold different parts of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardstore
from shardstore import LocalNonpersistentObject, ShardedTensor
from shardstore.dict_utils import dict_list_map_outplace
from tests.conftest import ALL
from tests.helpers.ranks_helper import run_ranks
from tests.properties.test_states import Numbered, State, names, same, states, values

SHAPES = {"sharded": (3, 2), "of one rank": (1, 2), "empty": (0, 2), "replica": (2,)}
NUMBERED = st.builds(Numbered, st.sampled_from([*SHAPES, "tensor", "local"]))


def described(state: State, rank: int, *, zero: bool = False) -> State:
    """Return the state with real tensors, of new memory, as this rank of two holds it."""
    mesh, count = init_device_mesh("cpu", (2,)), 0

    def made(value: Any) -> Any:
        nonlocal count
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value) if zero else value.clone()
        if not isinstance(value, Numbered):
            return copy.deepcopy(value)
        count += 1
        if value.kind == "local":
            return LocalNonpersistentObject((rank, count))
        shape = SHAPES.get(value.kind, (4,))
        whole = torch.zeros(shape) if zero else torch.full(shape, float(count))
        if value.kind == "tensor":
            return ShardedTensor.from_rank_offsets(f"key{count}", whole[:2], (0, rank, 2))
        return distribute_tensor(whole, mesh, [Replicate() if len(shape) == 1 else Shard(0)])

    return dict_list_map_outplace(made, state)


def held(state: State) -> State:
    """Return the values and the local parts of a state."""

    def value_of(value: Any) -> Any:
        if isinstance(value, LocalNonpersistentObject):
            return value.unwrap()
        value = value.data if isinstance(value, ShardedTensor) else value
        return value.to_local() if hasattr(value, "to_local") else value

    return dict_list_map_outplace(value_of, state)


def _save_and_load(rank: int, world_size: int, folder: str, some: list[State]) -> None:
    for number, state in enumerate(some):
        place = Path(folder, str(number))
        shardstore.save(described(state, rank), place)
        again = shardstore.load(described(state, rank, zero=True), place)
        assert same(held(again), held(described(state, rank))), (state, again)
        assert isinstance(shardstore.load({}, place, strict="ignore_all"), dict)


@settings(max_examples=30 if ALL else 2, suppress_health_check=list(HealthCheck))
@given(some=st.lists(states(values | NUMBERED, names), min_size=8))
@example(some=[{"l": [Numbered("of one rank"), Numbered("sharded"), 5]}])
@example(some=[{"l": [Numbered("of one rank"), Numbered("local")], "b": torch.ones(2)}])
def test_a_state_is_loaded_by_itself(
    tmp_path_factory: pytest.TempPathFactory, some: list[State]
) -> None:
    run_ranks(_save_and_load, 2, str(tmp_path_factory.mktemp("states")), some)
