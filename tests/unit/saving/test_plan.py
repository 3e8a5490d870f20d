"""Tensors whose elements are not plain memory are refused by key; others of any class are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

import shardstore
from shardstore import ShardedObject, ShardedTensor, hf
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import AccessPatternError, DTypeMismatchError
from tests.helpers.weights import Weight

pytestmark = pytest.mark.filterwarnings("ignore")


class Quantised(torch.Tensor):
    """Int8 and a scale, to be seen as float32; every operation sees float32 values."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantised({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.inner * 0.5 if isinstance(value, Quantised) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Kept(Quantised):
    """Of those that stay themselves if they are detached or copied, as those of torchao."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Kept(func(args[0].inner))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Gathered(Kept):
    """With FSDP2's methods, as torchao's weights for 4 bits."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None


class Opaque(Gathered):
    """That does not say what it holds."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


class Plain(torch.Tensor):
    """A subclass that has memory."""


def ints() -> torch.Tensor:
    return torch.arange(4, dtype=torch.int8)


def nested(**options: Any) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)
    return made


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "wrapper": lambda: Quantised(ints()),
    "kept wrapper": lambda: Kept(ints()),
    "parameter": lambda: torch.nn.Parameter(Kept(ints())),
    "gathered": lambda: Gathered(ints()),
    "opaque": lambda: Opaque(ints()),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "uint4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(3)),
    "masked": lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
}
SHARDS: dict[str, Callable[[], torch.Tensor]] = {
    **UNUSUAL,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    **({"mkldnn": torch.eye(2).to_mkldnn} if torch.backends.mkldnn.is_available() else {}),
}
"""Among common values, sparse tensors are saved."""
REMEDIES = {
    **dict.fromkeys(("sparse", "csr", "mkldnn"), r"no plain memory.*to_dense\(\)"),
    "meta": "no plain memory.*values",
    "fake": "values",
    **dict.fromkeys(("wrapper", "kept wrapper", "parameter", "gathered"), r"__tensor_flatten__"),
    **dict.fromkeys(("nested", "jagged"), r"unbind\(\)"),
    "quantised": r"int_repr\(\)",
    "uint4": r"view\(torch\.uint8\)",
    **dict.fromkeys(("masked", "opaque"), "the tensors that it holds"),
}


def sharded(tensor: torch.Tensor) -> dict[str, Any]:
    return {"at": {"bad": ShardedTensor.from_rank_offsets("at.bad", tensor)}}


STATES: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "sharded": sharded,
    "shard()": lambda tensor: shardstore.shard({"at": {"bad": tensor}}),
    "common": lambda tensor: {"at": {"bad": tensor}},
    "in a tuple": lambda tensor: {"at": {"bad": (1, tensor)}},
    "in an object": lambda tensor: {"x": ShardedObject("at.bad", {"in": tensor}, (1,), (0,))},
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *product(SHARDS, ("sharded",)),
        *product(UNUSUAL, ("common",)),
        *product(("kept wrapper", "jagged"), ("shard()", "in a tuple", "in an object")),
    ],
)
def test_unusual_tensors_are_refused_by_key(tmp_path: Path, name: str, how: str) -> None:
    for number, backend in enumerate([("zarr", 2), ("zarr", 1), ("torch_dist", 1)]):
        if (how, backend[0]) == ("in an object", "torch_dist"):
            continue  # DCP pickles objects
        place = tmp_path / str(number)
        with pytest.raises(DTypeMismatchError, match=rf"at\.bad.*{REMEDIES[name]}"):
            shardstore.save(STATES[how](SHARDS[name]()), place, backend)
        with pytest.raises(DTypeMismatchError, match=r"at\.bad"):
            shardstore.async_save(STATES[how](SHARDS[name]()), place, backend).result()
        assert not place.exists()


@pytest.mark.parametrize("name", sorted({*UNUSUAL} - {"nested", "masked"}))
def test_unusual_tensors_are_refused_by_key_through_dcp(tmp_path: Path, name: str) -> None:
    """DCP itself fails for masked tensors and for nested ones that are not jagged, before any
    storage writer."""
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"at": {"bad": UNUSUAL[name]()}},
            storage_writer=StorageWriter(tmp_path / "c"),
            no_dist=True,
        )
    (error, _) = caught.value.failures[0]
    assert isinstance(error, DTypeMismatchError)
    assert "at.bad" in str(error)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).as_subclass(Plain),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        AsyncCollectiveTensor(torch.ones(3)),
        torch.ones(3).as_subclass(Plain)[1:1],
    ],
    ids=["subclass", "parameter", "buffer", "collective", "empty"],
)
def test_subclasses_with_memory_are_saved(tmp_path: Path, tensor: torch.Tensor) -> None:
    for number, backend in enumerate([("zarr", 2), ("zarr", 1), ("torch_dist", 1)]):
        shardstore.save(sharded(tensor), tmp_path / str(number), backend)
        loaded: Any = shardstore.load_plain_tensors(tmp_path / str(number))
        assert loaded["at.bad"].tolist() == [1.0] * len(tensor)


@pytest.mark.parametrize("how", ["sharded", "shard()", "common"])
def test_weights_for_low_precision_are_saved_and_filled_as_their_values(
    tmp_path: Path, how: str
) -> None:
    values = torch.arange(12.0).reshape(4, 3)
    for number, backend in enumerate([("zarr", 2), ("zarr", 1), ("torch_dist", 1)]):
        place = tmp_path / str(number)
        saved, given = Weight(values.clone(), torch.ones(())), Weight(torch.zeros(4, 3))
        shardstore.save(STATES[how](saved), place, backend)
        loaded: Any = shardstore.load(STATES[how](given), place)["at"]
        assert isinstance(loaded["bad"], Weight)
        assert torch.equal(given.held, values)
    dcp.save({"at": saved}, storage_writer=StorageWriter(tmp_path / "dcp"), no_dist=True)
    given = Weight(torch.zeros(4, 3))
    dcp.load({"at": given}, storage_reader=StorageReader(tmp_path / "dcp"), no_dist=True)
    hf.save({"at": saved}, tmp_path / "hf")
    exported = Weight(torch.zeros(4, 3))
    hf.load({"at": exported}, tmp_path / "hf")
    assert torch.equal(given.held, values)
    assert torch.equal(exported.held, values)


@pytest.mark.parametrize("how", ["shard()", "common"])
def test_the_tensors_in_a_wrapper_are_saved_and_filled_as_the_error_says(
    tmp_path: Path, how: str
) -> None:
    def held(t: Any) -> Any:
        return {name: getattr(t, name) for name in t.__tensor_flatten__()[0]}

    shardstore.save(STATES[how](held(Kept(ints()))), tmp_path / "c")
    given = Kept(torch.zeros(4, dtype=torch.int8))
    shardstore.load(STATES[how](held(given)), tmp_path / "c")
    assert torch.equal(given + 0, ints() * 0.5)


def test_a_wrapper_of_an_allowed_class_is_refused_too(tmp_path: Path) -> None:
    """Its pickle would fit only the version of the program that wrote it."""
    state = {"at": {"bad": Kept(ints())}}
    with (
        torch.serialization.safe_globals([Kept]),
        pytest.raises(DTypeMismatchError, match=r"at\.bad.*not plain memory"),
    ):
        shardstore.save(state, tmp_path / "c")


@pytest.mark.parametrize("option", ["constants", "pack"])
def test_tensors_without_elements_are_saved(tmp_path: Path, option: str) -> None:
    for tensor in (torch.ones(0, 3), torch.ones(2)):
        shardstore.save(sharded(tensor), tmp_path / "c", overwrite=True, **{option: True})
        assert shardstore.load_plain_tensors(tmp_path / "c")["at.bad"].shape == tensor.shape


@pytest.mark.parametrize("validates", [True, False])
def test_a_shard_that_reaches_beyond_its_array_is_named(validates: bool, tmp_path: Path) -> None:
    """Padding that the global shape leaves out; no other cut would make it fit."""
    shard = ShardedTensor("w", torch.ones(4), torch.float32, (4,), (6,), (4,), None)
    with pytest.raises(AccessPatternError, match=r"'w'.*outside the global shape \(6,\)") as caught:
        shardstore.save({"w": shard}, tmp_path / "c", validate_access_integrity=validates)
    assert "axis_fragmentations" not in str(caught.value)
