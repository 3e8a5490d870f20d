"""Values are written as torch.save writes them, with the memory that their tensors use."""

from __future__ import annotations

import collections
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.errors import CheckpointingException
from shardstore.values.torch_dump import dump_bytes, pickled
from shardstore.values.torch_values import load_bytes
from tests.helpers.nested import exactly_same

BIG = 1_000_000
OVERHEAD_BYTES = 4096


def of_torch(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def through(value: Any) -> Any:
    """As we load it, which is what torch loads."""
    data = dump_bytes(value)
    found = load_bytes(data, "/place/file.pt")
    assert exactly_same(found, torch.load(io.BytesIO(data), weights_only=True))
    return found


def views() -> dict[str, torch.Tensor]:
    """Views of a hundred elements or fewer, each of a storage of a million."""

    def base() -> torch.Tensor:
        return torch.arange(float(BIG))

    z = torch.complex(base(), -base())
    parameter = torch.nn.Parameter(base())
    return {
        "slice": base()[500:600],
        "columns": base().view(1000, 1000)[7:17, 3:13],
        "transposed": base().view(1000, 1000)[:10, :10].t(),
        "steps": base()[::10_000],
        "scalar": base()[5],
        "empty": base()[5:5],
        "expanded": base()[5:6].expand(300_000),
        "conj": z[3:5].conj(),
        "neg": torch._neg_view(base()[3:5]),
        "imag": z[3:5].conj().imag,
        "bfloat16": base().bfloat16()[3:7],
        "float8": base().to(torch.float8_e4m3fn)[3:7],
        "uint16": torch.zeros(BIG, dtype=torch.uint16)[3:7],
        "requires_grad": parameter.detach()[2:4].requires_grad_(),
        "parameter": torch.nn.Parameter(base()[2:6]),
        "frozen": torch.nn.Parameter(base()[2:6], requires_grad=False),
        "result": parameter[2:4],
    }


def noted() -> torch.Tensor:
    """A tensor with attributes, which torch pickles in another way."""
    tensor = torch.arange(float(BIG))[2:4]
    tensor.note = torch.arange(float(BIG))[7:9]  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("name", views())
def test_a_view_is_written_alone(name: str) -> None:
    view = views()[name]
    found = through(view)
    assert len(dump_bytes(view)) < OVERHEAD_BYTES
    assert len(pickled(view)) < OVERHEAD_BYTES
    assert type(found) is type(view)
    same = (found.dtype, found.shape, found.requires_grad, found.is_conj(), found.is_neg())
    assert same == (view.dtype, view.shape, view.requires_grad, view.is_conj(), view.is_neg())
    assert torch.equal(
        found.double() if found.is_floating_point() else found,
        view.double() if view.is_floating_point() else view,
    )
    theirs = torch.load(io.BytesIO(dump_bytes(view)), weights_only=True)
    assert (type(found), found.stride()) == (type(theirs), theirs.stride())


def test_attributes_of_a_tensor_are_written_alone_too() -> None:
    found = through(noted())
    assert len(dump_bytes(noted())) < OVERHEAD_BYTES
    assert (found.tolist(), found.note.tolist()) == ([2, 3], [7, 8])


def test_views_inside_other_values_are_written_alone() -> None:
    base = torch.arange(float(BIG))
    indices = torch.zeros(1, BIG, dtype=torch.int64)[:, :1]
    sparse = torch.sparse_coo_tensor(indices, base[5:6], (3,), check_invariants=True)
    state = {"a": (1, [base[3:5]]), "b": {base[7:8]}, "sparse": sparse}
    assert len(dump_bytes(state)) < OVERHEAD_BYTES
    found = load_bytes(dump_bytes(state), "/place/file.pt")
    assert found["a"][1][0].tolist() == [3, 4]
    assert found["sparse"].to_dense().tolist() == [5, 0, 0]
    assert through(torch.eye(3).to_sparse_csr()).layout == torch.sparse_csr


def test_a_storage_that_is_used_in_full_stays_one() -> None:
    """Tied tensors, a flat buffer and its parts, a module's state: the bytes are torch's."""
    flat = torch.arange(1000.0)
    for value in (
        flat,
        flat.view(10, 100).t(),
        torch.ones(1).expand(1000),
        [flat, flat],
        {"flat": flat, "parts": flat.split(300)},
        list(flat.view(10, 100)),
        torch.nn.LSTM(3, 4).state_dict(),
        torch.empty(3, device="meta"),
        {"text": "a", "numbers": [1.5, None, b"x"]},
    ):
        assert dump_bytes(value) == of_torch(value)
    found = through({"flat": flat, "parts": flat.split(300)})
    found["flat"].zero_()
    assert not any(part.any() for part in found["parts"])


def test_equal_views_stay_one() -> None:
    base = torch.arange(float(BIG))
    first, again, other = through([base[3:5], base[3:5], base[4:6]])
    first.zero_()
    assert (again.tolist(), other.tolist()) == ([0, 0], [4, 5])


def test_views_of_other_data_types_are_written() -> None:
    """torch.save refuses two data types of one storage."""
    base = torch.zeros(BIG)
    found = through([base[:2], base[:2].view(torch.int32)])
    assert [one.dtype for one in found] == [torch.float32, torch.int32]


class Makes:
    """A value that makes new tensors whenever it is pickled."""

    def __reduce__(self) -> Any:
        return collections.OrderedDict, ([(0, torch.ones(BIG)[:3])],)


def test_replicas_have_the_same_bytes() -> None:
    """Whatever memory the views lie in."""
    one, two = ([torch.arange(float(n))[3:5], torch.arange(float(n))[3:5].t()] for n in (BIG, 60))
    assert dump_bytes(one) == dump_bytes(two)
    assert through(Makes())[0].tolist() == [1, 1, 1]


@given(st.data())
def test_any_views_of_any_storages(data: st.DataObject) -> None:
    bases = [torch.arange(32.0), torch.arange(48).to(torch.int16)]
    found = []
    for _ in range(data.draw(st.integers(1, 5))):
        base = data.draw(st.sampled_from(bases))
        shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
        strides = [data.draw(st.integers(0, 3)) for _ in shape]
        found.append(base.as_strided(shape, strides, data.draw(st.integers(0, 3))))
    loaded = through(found)
    for one, other in zip(found, loaded, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    total = sum(one.untyped_storage().nbytes() for one in loaded)
    assert total <= sum(one.untyped_storage().nbytes() for one in found)


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a", "bc"]),
        np.array([{"x": 1}, None], dtype=object),
        np.array(["2026-11-28"], dtype="M8[D]"),
        np.datetime64("2026-11-28"),
    ],
    ids=lambda value: str(value.dtype),
)
def test_an_array_of_numpy_that_cannot_be_loaded_can_be_saved_as_its_list(
    value: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointingException, match=r"'v'.*tolist\(\)") as caught:
        shardstore.save({"v": value}, tmp_path / "c")
    assert "add_safe_globals" not in str(caught.value)
    shardstore.save({"v": value.tolist()}, tmp_path / "c")
    found: Any = shardstore.load({}, tmp_path / "c")
    assert found["v"] == value.tolist()
