"""shardstore.optimizer: the state of real optimizers cut like the model's parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardstore.errors import CheckpointingException, ShapeMismatchError
from shardstore.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from shardstore.optimizer import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(3, 2)


def sharded(model: Any) -> dict[str, Any]:
    params = model.state_dict(keep_vars=True)
    return {
        "weight": ShardedTensor.from_rank_offsets("w", params["weight"], (0, 1, 2), replica_id=5),
        "nested": [{"bias": ShardedTensor.from_rank_offsets("b", params["bias"], (0, 1, 2))}],
        "object": ShardedObject("o", 1, (1,), (0,)),
        "plain": 3,
    }


def stepped(model: Any) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = [{"params": [model.bias], "lr": 0.5}, {"params": [model.weight]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_parameters_are_numbered_in_order(model: Any) -> None:
    numbers = get_optim_param_to_id_map(iter([model.weight, model.bias, model.weight]))
    assert numbers == {id(model.weight): 0, id(model.bias): 1}


def test_shards_are_found_by_identity(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = sharded(model)
    stranger = torch.nn.Parameter(torch.ones(1))
    with caplog.at_level("WARNING"):
        found = get_param_id_to_sharded_param_map(state, [model.bias, stranger, model.weight])
    assert found == {0: state["nested"][0]["bias"], 2: state["weight"]}
    assert not caplog.records


def test_nothing_found_is_a_warning(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    copied = {"w": ShardedTensor.from_rank_offsets("w", model.weight.data)}
    with caplog.at_level("WARNING"):
        assert get_param_id_to_sharded_param_map(copied, model.parameters()) == {}
    assert KEEP_VARS_HINT in caplog.text
    assert "keep_vars=True" in KEEP_VARS_HINT


def test_state_takes_everything_but_key_data_and_dtype_from_the_parameter() -> None:
    param = ShardedTensor.from_rank_offsets(
        "w", torch.ones(2, 3), (0, 1, 2), replica_id=(0, 1), allow_shape_mismatch=True
    )
    moment = torch.zeros(2, 3, dtype=torch.float64)
    made = make_sharded_optimizer_tensor(param, moment, "optimizer.state.exp_avg")
    assert made.data is moment
    assert replace(made, data=None) == ShardedTensor(
        "optimizer.state.exp_avg.w",
        None,
        torch.float64,
        (2, 3),
        (4, 3),
        (2, 0),
        (2, 1),
        replica_id=(0, 1),
        allow_shape_mismatch=True,
    )
    assert param.key == "w"


def test_state_of_a_flattened_parameter() -> None:
    param = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(3), (2, 3), (0, 1, 2), flattened_range=slice(1, 4)
    )
    made = make_sharded_optimizer_tensor(param, torch.arange(3), "p")
    assert isinstance(made, ShardedTensor)
    assert (made.key, made.flattened_range, made.dtype) == ("p.w", slice(1, 4), torch.int64)
    with pytest.raises(ShapeMismatchError, match=r"\(6,\).*\(3,\)"):
        make_sharded_optimizer_tensor(param, torch.ones(6), "p")


def test_state_of_a_factory() -> None:
    def build(key: str, data: torch.Tensor, *_: Any) -> dict[str, Any]:
        return {"x": ShardedTensor.from_rank_offsets(key, data)}

    param = ShardedTensorFactory("f", torch.ones(1), build, lambda loaded: loaded["x"], 2)
    made = make_sharded_optimizer_tensor(param, torch.ones(7), "p")
    assert isinstance(made, ShardedTensorFactory)
    assert (made.key, made.replica_id) == ("p.f", 2)
    assert made.build()["x"].global_shape == (7,)


def test_adam(model: Any) -> None:
    optimizer = stepped(model)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbered = get_param_id_to_sharded_param_map(sharded(model), params)
    state = optimizer.state_dict()
    groups = state["param_groups"]
    optim_state_to_sharding_state(state, numbered, exclude_keys=("step",))

    assert {number: list(tensors) for number, tensors in state["state"].items()} == {
        0: ["exp_avg", "exp_avg_sq"],
        1: ["exp_avg", "exp_avg_sq"],
    }
    moment = state["state"][1]["exp_avg_sq"]
    assert moment.key == "optimizer.state.exp_avg_sq.w"
    assert (moment.global_shape, moment.global_offset, moment.replica_id) == ((4, 3), (2, 0), 5)
    assert moment.data is optimizer.state[model.weight]["exp_avg_sq"]
    assert state["state"][0]["exp_avg"].key == "optimizer.state.exp_avg.b"

    assert [group["lr"] for group in state["param_groups"]] == [0.5, 0.1]
    wrapped = state["param_groups"][1]["params"]
    assert isinstance(wrapped, LocalNonpersistentObject)
    assert wrapped.unwrap() == [1]
    assert groups[1]["params"] == [1]


def test_steps_must_be_excluded(model: Any) -> None:
    optimizer = stepped(model)
    numbered = get_param_id_to_sharded_param_map(sharded(model), [model.bias, model.weight])
    state = optimizer.state_dict()
    before = dict(state)
    with pytest.raises(ShapeMismatchError, match=r"optimizer\.state\.step\.b.*exclude_keys"):
        optim_state_to_sharding_state(state, numbered)
    assert state == before
    assert isinstance(state["state"][0]["exp_avg"], torch.Tensor)
    optim_state_to_sharding_state(state, numbered, exclude_keys="step")  # type: ignore[arg-type]
    assert "step" not in state["state"][0]


def test_state_that_is_no_tensor(model: Any) -> None:
    numbered = get_param_id_to_sharded_param_map(sharded(model), [model.weight])
    state = {"state": {0: {"n": 5}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointingException, match=r"optimizer\.state\.n\.w.*int"):
        optim_state_to_sharding_state(state, numbered)


def test_state_of_an_unknown_parameter(model: Any) -> None:
    numbered = get_param_id_to_sharded_param_map(sharded(model), [model.weight])
    state = {"state": {7: {"m": torch.ones(2)}}, "param_groups": []}
    with pytest.raises(ValueError, match="parameter 7") as caught:
        optim_state_to_sharding_state(state, numbered)
    assert isinstance(caught.value, CheckpointingException)


def test_the_state_before_the_first_step_is_empty(model: Any) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, {}, ("step",))
    assert state["state"] == {}
    assert state["param_groups"][0]["params"].unwrap() == [0, 1]
