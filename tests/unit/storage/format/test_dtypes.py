"""Data types: all 21 both ways, bit for bit, and views that share memory."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.errors import ArgumentError, DTypeMismatchError
from shardstore.storage.format import dtypes
from tests.helpers.layouts import DTYPES

TYPES = [*DTYPES, torch.float4_e2m1fn_x2]


def raw(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    top = 2 if dtype == torch.bool else 256
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_names_lead_back_and_forth(dtype: torch.dtype) -> None:
    name = dtypes.zarr_name(dtype)
    assert name == str(dtype).removeprefix("torch.")
    assert dtypes.torch_dtype(name) == dtype
    assert dtypes.zarr_name(dtypes.numpy_dtype(name)) == name
    assert dtypes.itemsize(name) == torch.empty((), dtype=dtype).element_size()
    assert dtypes.v2_dtype_name(dtypes.v2_dtype(name)) == name


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_views_share_memory_of_any_strides(dtype: torch.dtype) -> None:
    whole = raw(dtype, 60).reshape(5, 12)
    for tensor in (whole, whole.t(), whole[1::2, ::3], whole[2, 3], whole[:0]):
        array = dtypes.as_numpy(tensor)
        assert array.dtype == dtypes.numpy_dtype(dtypes.zarr_name(dtype))
        assert array.shape == tuple(tensor.shape)
        assert array.tobytes() == bits(tensor)
        back = dtypes.as_tensor(array)
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert bits(back) == bits(tensor)
        assert back.data_ptr() == tensor.data_ptr() or not tensor.numel()
    before = bits(whole)
    dtypes.as_numpy(whole)[...] = np.zeros(1, dtypes.numpy_dtype(dtypes.zarr_name(dtype)))
    assert bits(whole) == bytes(len(before))


@pytest.mark.parametrize("name", ["float16", "int64", "complex64", "bfloat16", "float8_e8m0fnu"])
def test_numbers_are_exact(name: str) -> None:
    values = np.arange(1, 9).reshape(2, 4).astype(dtypes.numpy_dtype(name))
    found = dtypes.numbers(values)
    assert found.dtype.isbuiltin == 1
    assert np.array_equal(found.astype(values.dtype), values)


def test_a_byte_of_two_numbers_is_a_complex_number() -> None:
    whole = np.arange(256, dtype="u1").reshape(16, 16).view(dtypes.numpy_dtype("float4_e2m1fn_x2"))
    lines = np.arange(16, dtype="u1").view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    for values, high, low in (
        (whole, lines, lines),
        (whole.T[2:9, ::3], lines[::3], lines[2:9]),
        (whole[:0], lines[:0], lines),
    ):
        numbers = dtypes.numbers(values)
        assert numbers.dtype == np.complex64
        grid = np.meshgrid(low, high, indexing="xy")
        expected = grid if numbers.shape == grid[0].shape else [part.T for part in grid]
        assert np.array_equal(numbers.real.view("u4"), expected[0].view("u4"))
        assert np.array_equal(numbers.imag.view("u4"), expected[1].view("u4"))


def test_a_type_that_torch_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    with pytest.raises(DTypeMismatchError, match="has no data type float4_e2m1fn_x2"):
        dtypes.torch_dtype("float4_e2m1fn_x2")
    assert dtypes.itemsize("float4_e2m1fn_x2") == 1


def test_parameters_and_lazy_views() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0))
    assert dtypes.as_numpy(parameter).tolist() == [0, 1, 2, 3]
    number = torch.tensor([1 + 2j])
    assert dtypes.as_numpy(number.conj()).tolist() == [1 - 2j]
    assert dtypes.as_numpy(number.conj().imag).tolist() == [-2.0]


def test_data_types_have_their_zarr_v2_codes() -> None:
    assert dtypes.v2_dtype("bfloat16") == "bfloat16"
    assert dtypes.v2_dtype("float32") == "<f4"
    assert dtypes.v2_dtype("bool") == "|b1"
    assert dtypes.v2_dtype_name("|u1") == "uint8"
    assert dtypes.v2_dtype_name(">f4") == "float32"


@pytest.mark.parametrize(
    "code",
    [">M8[s]", "|O", "|S3", "<M8[s]", "f4,f4", "1/0", "(2,", "\ud800", [["a", "<f4"]], 3, "x"],
)
def test_strange_v2_codes_are_refused(code: object) -> None:
    with pytest.raises(DTypeMismatchError, match="known: bool"):
        dtypes.v2_dtype_name(code)


@pytest.mark.parametrize("name", ["r16", "string", "float4_e2m1fn", "", None, ["float32"], {}])
def test_strange_names_are_refused(name: object) -> None:
    for ask in (dtypes.numpy_dtype, dtypes.itemsize):
        with pytest.raises(DTypeMismatchError, match="known: bool"):
            ask(name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.qint8, torch.complex32, torch.int4, torch.uint4),
        *(np.dtype(">f4"), np.dtype("O"), np.dtype([("float32", "u1")]), ml_dtypes.int4),
    ],
)
def test_what_can_not_be_stored_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(DTypeMismatchError, match="convert"):
        dtypes.zarr_name(dtype)


def test_freed_memory_is_no_values(tmp_path: Path) -> None:
    """NumPy would take memory of its own, with whatever is in it."""

    def freed() -> ShardedTensor:
        tensor = torch.ones(64, 6)
        tensor.untyped_storage().resize_(0)
        return ShardedTensor.from_rank_offsets("w", tensor)

    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(64, 6))}, tmp_path / "a")
    with pytest.raises(ArgumentError, match="has 0 of 1536 bytes"):
        shardstore.save({"w": freed()}, tmp_path / "b")
    with pytest.raises(ArgumentError, match="has 0 of 1536 bytes"):
        shardstore.async_save({"w": freed()}, tmp_path / "b").result()
    with pytest.raises(ArgumentError, match="key 'w' is to be loaded"):
        shardstore.load({"w": freed()}, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 6)[1:, 2:],
        torch.ones(6, 4).T,
        torch.ones(1).expand(5, 7),
        torch.ones(12)[::3],
        torch.ones(0, 5),
        torch.tensor(1.0),
        torch.ones(3, 4)[2:, 3:],
    ],
)
def test_views_have_their_memory(tensor: torch.Tensor) -> None:
    dtypes.require_memory(tensor)
