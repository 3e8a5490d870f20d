"""Plain tensors of a load: filled in place, wherever they are stored, or missing by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import shardstore
from shardstore.errors import ArgumentError, DTypeMismatchError, MissingKeyError
from shardstore.mapping import ShardedTensor
from shardstore.strategies.zarr import ZarrLoadShardedStrategy


def saved(tmp_path: Path, how: str) -> Path:
    """One state, with its tensors as arrays or as common values."""
    state: dict[str, Any] = {"w": torch.ones(2), "inner": [torch.arange(3), {"b": torch.ones(1)}]}
    described = shardstore.shard(state) if how == "arrays" else state
    shardstore.save({**described, "step": 3}, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture(params=["arrays", "common values"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return saved(tmp_path, request.param)


def test_given_tensors_are_filled_in_place(place: Path) -> None:
    whole = torch.zeros(4)
    given = {"w": torch.nn.Parameter(whole[1:3]), "inner": [torch.zeros(3, dtype=torch.int64)]}
    found: Any = shardstore.load(given, place)
    assert found["w"].data_ptr() == whole[1:].data_ptr()
    assert found["inner"][0].data_ptr() == given["inner"][0].data_ptr()
    assert whole.tolist() == [0, 1, 1, 0]
    assert given["inner"][0].tolist() == [0, 1, 2]
    assert found["step"] == 3


@pytest.mark.parametrize(
    "given",
    [torch.zeros(3), torch.zeros(2).double(), torch.zeros(1).expand(2), torch.zeros(2).to_sparse()],
)
def test_a_given_tensor_that_does_not_fit_is_left_and_named_and_the_stored_one_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: torch.Tensor
) -> None:
    """A program that uses the given tensors, and not the result, has their old values."""
    place, before = saved(tmp_path, "common values"), given.to_dense().clone()
    found: Any = shardstore.load({"w": given, "inner": [torch.zeros(3).long()]}, place)
    assert torch.equal(given.to_dense(), before)
    assert found["w"].tolist() == [1, 1]
    (text,) = caplog.messages
    assert "1 given tensor" in text
    assert "['w']: they are not dense, share memory, or" in text


@pytest.mark.parametrize("cast", [True, "warn"])
def test_given_tensors_of_another_data_type_are_filled_if_they_may_be_cast(
    place: Path, caplog: pytest.LogCaptureFixture, cast: bool | Literal["warn"]
) -> None:
    whole = torch.zeros(2, dtype=torch.bfloat16)
    given: Any = {"w": whole, "inner": [torch.zeros(3), {"b": torch.zeros(1)}]}
    found: Any = shardstore.load(given, place, cast=cast)
    assert (whole.tolist(), given["inner"][0].tolist()) == ([1, 1], [0, 1, 2])
    assert found["w"].data_ptr() == whole.data_ptr()
    assert found["inner"][0].data_ptr() == given["inner"][0].data_ptr()
    assert len(caplog.messages) == (cast == "warn")
    assert "2 tensors of" in caplog.text or cast is True


@pytest.mark.parametrize("given", [torch.zeros(2), torch.zeros(2, device="meta")])
def test_a_given_tensor_that_is_filled_or_has_no_values_is_not_named(
    place: Path, caplog: pytest.LogCaptureFixture, given: torch.Tensor
) -> None:
    shardstore.load({"w": given}, place)
    assert caplog.messages == []


def test_tensors_on_the_meta_device_are_replaced_by_new_ones(place: Path) -> None:
    with torch.device("meta"):
        given = {"w": torch.nn.Parameter(torch.empty(2)), "inner": [torch.zeros(3).long()]}
    found: Any = shardstore.load(given, place)
    assert found["w"].tolist() == [1, 1]
    assert found["inner"][0].tolist() == [0, 1, 2]


def test_given_tensors_that_share_memory_do_not_change_what_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tied weights are filled; one placeholder for several values is not one value for all, and is
    named."""
    first, second = torch.tensor([1.0, float("nan")]), torch.full((2,), 2.0)
    shardstore.save({"a": first, "b": second, "c": second.clone()}, tmp_path / "c")
    one = torch.zeros(2)
    found: Any = shardstore.load({"a": one, "b": one}, tmp_path / "c")
    assert "['a']" in caplog.text
    assert found["a"].tolist()[0] == 1
    assert found["b"].tolist() == [2, 2]
    flat = torch.zeros(4)
    tied = {"a": flat[:2], "b": flat[2:], "c": flat[2:]}
    found = shardstore.load(tied, tmp_path / "c")
    assert flat.tolist()[2:] == [2, 2]
    assert all(found[key].data_ptr() == tied[key].data_ptr() for key in tied)


def test_tensors_of_inference_mode_are_filled(place: Path) -> None:
    with torch.inference_mode():
        given = torch.zeros(2)
    found: Any = shardstore.load({"w": given}, place)
    assert given.tolist() == found["w"].tolist() == [1, 1]


@pytest.mark.parametrize("new", [torch.zeros(2), torch.zeros(2).to_sparse()])
def test_a_tensor_that_is_stored_nowhere_is_missing(place: Path, new: torch.Tensor) -> None:
    given = {"w": torch.zeros(2), "inner": {"new": new}}
    with pytest.raises(MissingKeyError, match=r"'inner\.new'"):
        shardstore.load(given, place)
    assert given["w"].tolist() == [0, 0]
    for mode in ("raise_unexpected", "raise_all"):
        with pytest.raises(MissingKeyError, match=r"inner\.new"):
            shardstore.load(given, place, strict=mode)
    found, _, unexpected = shardstore.load(given, place, strict="return_unexpected")
    assert unexpected == {"inner.new"}
    assert found["w"].tolist() == [1, 1]


def test_an_uninitialized_parameter_takes_the_stored_value_or_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lazy, whole = torch.nn.LazyLinear(3), torch.nn.Linear(2, 3).state_dict()
    shardstore.save({"m": whole}, tmp_path / "common")
    found: Any = shardstore.load({"m": lazy.state_dict()}, tmp_path / "common")
    assert "m.weight" in caplog.text
    lazy.load_state_dict(found["m"])
    assert torch.equal(lazy.weight, whole["weight"])
    shardstore.save(shardstore.shard({"m": whole}), tmp_path / "arrays")
    for call in (
        lambda: shardstore.load({"m": torch.nn.LazyLinear(3).state_dict()}, tmp_path / "arrays"),
        lambda: shardstore.shard({"m": torch.nn.LazyLinear(3).state_dict()}),
    ):
        with pytest.raises(DTypeMismatchError, match=r"'m\.weight' is a Uninit.* forward pass"):
            call()


@pytest.mark.parametrize("given", [[torch.zeros(2), 0], {0: torch.zeros(2)}])
def test_a_tensor_that_is_stored_in_a_tuple_is_not_put_into_it(tmp_path: Path, given: Any) -> None:
    shardstore.save({"x": (torch.ones(2), 3)}, tmp_path / "c")
    with pytest.raises(MissingKeyError, match=r"'x\.0' is a common value .* plain tensor in a tup"):
        shardstore.load({"x": given}, tmp_path / "c")
    found: Any = shardstore.load({"x": (torch.zeros(2), 0)}, tmp_path / "c")
    assert found["x"][0].tolist() == [1, 1]


def test_a_sparse_tensor_cannot_be_filled_from_an_array(tmp_path: Path) -> None:
    place = saved(tmp_path, "arrays")
    with pytest.raises(ArgumentError, match=r"'w'.*sparse"):
        shardstore.load({"w": torch.zeros(2).to_sparse()}, place)


def test_beside_megatron_s_types_plain_tensors_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "rng": torch.zeros(2)}

    shardstore.save(state(), tmp_path / "c")
    given = {**state(), "rng": torch.ones(2), "new": torch.ones(1)}
    found: Any = shardstore.load(given, tmp_path / "c")
    assert found["rng"].tolist() == [0, 0]
    assert given["rng"].tolist() == [1, 1]
    assert "new" not in found


@pytest.mark.parametrize("given", [{"o": {"lr": 0.5, "m": None}}, {"o": [0.5, None]}, {"o": None}])
def test_arrays_in_the_places_of_other_values_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, Any]
) -> None:
    """As a learning rate that was a tensor, or a state that a new optimizer does not have yet."""
    tensors = {"lr": torch.tensor(0.1), "m": torch.ones(2)}
    inner = list(tensors.values()) if isinstance(given["o"], list) else tensors
    shardstore.save(shardstore.shard({"o": inner, "w": torch.ones(1)}), tmp_path / "c")
    shardstore.load({**given, "w": torch.zeros(1)}, tmp_path / "c")
    (text,) = caplog.messages
    names = [f"o.{n}" for n in (range(2) if isinstance(inner, list) else inner)]
    assert str(names) in text
    assert str(tmp_path / "c") in text
    caplog.clear()
    shardstore.load({"new": 5, "w": torch.zeros(1)}, tmp_path / "c")
    shardstore.load({**given, "w": torch.zeros(1)}, tmp_path / "c", strict="ignore_all")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("stored", "given"),
    [
        ([torch.ones(2), 1], (torch.ones(2), 1)),
        ({"m": torch.ones(2), "step": 1}, None),
        (torch.ones(2), [0.1, 0.2]),
        (torch.ones(2), {"m": None}),
        ([5, torch.ones(2)], [5, 6]),
        ([torch.ones(2), {"m": torch.ones(1)}], [torch.zeros(2)]),
        ([torch.ones(2), torch.ones(1), 5], [torch.zeros(2), None, 5]),
        ([torch.ones(2), torch.ones(1), 5], [torch.zeros(2), 6, 5]),
    ],
    ids=[
        "tuple on list",
        "value on dict",
        "list on tensor",
        "dict on tensor",
        "at the end",
        "a shorter list",
        "none in a list",
        "a number in a list",
    ],
)
def test_arrays_above_and_below_other_values_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: Any, given: Any
) -> None:
    shardstore.save(shardstore.shard({"o": stored, "w": torch.ones(1)}), tmp_path / "c")
    shardstore.load({"o": given, "w": torch.zeros(1)}, tmp_path / "c")
    (text,) = caplog.messages
    assert "1 array(s)" in text


def test_an_array_in_the_place_of_an_empty_dict_is_told(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard({"o": torch.ones(2), "w": torch.ones(1)}), tmp_path / "c")
    with pytest.raises(MissingKeyError, match="empty at 'o'"):
        shardstore.load({"o": {}, "w": torch.zeros(1)}, tmp_path / "c")


class _Lists(ZarrLoadShardedStrategy):
    """As a strategy of another program, whose list of what is stored fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [NotImplementedError(), KeyError("x"), OSError("gone")], ids=repr)
def test_a_strategy_that_cannot_list_its_tensors_loads_without_the_warning(
    tmp_path: Path, error: Exception
) -> None:
    shardstore.save(shardstore.shard({"w": torch.ones(1)}), tmp_path / "c")
    state = {**shardstore.shard({"w": torch.zeros(1)}), "new": 5}
    found = shardstore.load(state, tmp_path / "c", sharded_strategy=_Lists(error))
    assert found == {"w": torch.ones(1)}


def test_a_list_keeps_its_positions(tmp_path: Path) -> None:
    """As the lists of LBFGS, of which a new optimizer has fewer tensors."""
    one = torch.ones(1)
    shardstore.save(shardstore.shard({"al": [None, one, None, one, "z"]}), tmp_path / "c")
    given = {"al": [None, torch.zeros(1), None, None, None]}
    found: Any = shardstore.load(given, tmp_path / "c")
    assert found["al"][0] is found["al"][2] is found["al"][3] is None
    assert (found["al"][1].tolist(), found["al"][4]) == ([1], "z")


def test_lbfgs_goes_on(tmp_path: Path) -> None:
    def optimizer(steps: int) -> tuple[torch.nn.Linear, torch.optim.LBFGS]:
        layer = torch.nn.Linear(3, 1)
        made = torch.optim.LBFGS(layer.parameters(), max_iter=1, history_size=10)
        for _ in range(steps):
            step(layer, made)
        return layer, made

    def step(layer: torch.nn.Linear, made: torch.optim.LBFGS) -> None:
        def closure() -> torch.Tensor:
            made.zero_grad()
            loss = layer(torch.eye(3)).square().sum()
            loss.backward()
            return loss

        made.step(closure)

    layer, made = optimizer(4)
    state = {"model": layer.state_dict(), "optim": made.state_dict()}
    shardstore.save(shardstore.shard(state), tmp_path / "c")
    layer, made = optimizer(2)
    given = {"model": layer.state_dict(), "optim": made.state_dict()}
    found: Any = shardstore.load(shardstore.shard(given), tmp_path / "c")
    layer.load_state_dict(found["model"])
    made.load_state_dict(found["optim"])
    assert len(made.state_dict()["state"][0]["al"]) == 10
    step(layer, made)


def test_an_array_that_is_a_common_value_is_named_as_one(tmp_path: Path) -> None:
    place = saved(tmp_path, "common values")
    for asked, key in (({"w": torch.zeros(2)}, "w"), ({"inner": [torch.arange(3)]}, "inner.0")):
        text = rf"'{key}' is a common value in .* or a DTensor, without shard"
        with pytest.raises(MissingKeyError, match=text) as caught:
            shardstore.load(shardstore.shard(asked), place)
        assert "tuple" not in str(caught.value)
    with pytest.raises(MissingKeyError, match=r"'inner\.00' is not in .* tensors \['inner\.0', "):
        shardstore.load({"inner": {"00": torch.zeros(3).long()}}, place)
    with pytest.raises(MissingKeyError, match="'step' is not in the checkpoint"):
        shardstore.load(shardstore.shard({"step": torch.zeros(())}), place)


def test_a_tensor_in_a_tuple_without_values_is_given_those_that_are_stored(tmp_path: Path) -> None:
    """As a model gives them that was built on the meta device."""
    shardstore.save({"w": (1, torch.ones(2))}, tmp_path / "c")
    found: Any = shardstore.load({"w": (1, torch.empty(2, device="meta"))}, tmp_path / "c")["w"]
    assert found[1].tolist() == [1, 1]
