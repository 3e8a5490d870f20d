"""Constant arrays come back bit for bit, here and in zarr and TensorStore."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore import ShardedTensor, zarr_dtypes  # noqa: F401 (bfloat16 and float8 for zarr)
from shardstore.errors import ChunkCorruptError, ChunkMissingError
from shardstore.saving import plan
from shardstore.storage.format import dtypes
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.verification import findings

NAMES = dtypes.names()
SHAPES = [(), (1,), (3, 5), (7, 1, 2), (300,)]


def tensor_of(name: str, bits: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    bits = bytes(byte & 1 for byte in bits) if name == "bool" else bits
    count = int(np.prod(shape, dtype=int))
    values = np.frombuffer(bits * count, dtypes.numpy_dtype(name)).copy()
    return dtypes.as_tensor(values).reshape(shape)


def bits_of(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def sharded(state: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}


def zarr_keeps(tensor: torch.Tensor) -> bool:
    """zarr knows one NaN of the types that NumPy has."""
    if tensor.dtype in (torch.complex64, torch.complex128):
        return all(map(zarr_keeps, torch.view_as_real(tensor).flatten()[:2]))
    is_native = tensor.dtype in (torch.float16, torch.float32, torch.float64)
    first = tensor.flatten()[:1].numpy() if is_native else np.zeros(1)
    return not np.isnan(first)[0] or first.tobytes() == np.array(np.nan, first.dtype).tobytes()


SPECIAL = st.one_of(
    st.binary(min_size=16, max_size=16),
    st.sampled_from([bytes(16), b"\xff" * 16, (b"\0" * 7 + b"\x80") * 2, b"\x80" * 16]),
)


@given(st.lists(st.tuples(st.sampled_from(NAMES), SPECIAL, st.sampled_from(SHAPES)), max_size=12))
def test_constants_of_any_bits_are_read_by_all(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, bytes, tuple[int, ...]]]
) -> None:
    place = tmp_path_factory.mktemp("constants") / "c"
    state = {
        f"k{i}": tensor_of(name, bits[: dtypes.itemsize(name)], shape)
        for i, (name, bits, shape) in enumerate(drawn)
    }
    shardstore.save(
        sharded(state),
        place,
        ZarrSaveShardedStrategy("zarr", 2, threads=1),
        constants=True,
        durable=False,
    )
    for key, tensor in state.items():
        kept = not zarr_keeps(tensor)
        assert bool(list((place / key).glob("c*"))) == kept
    found = shardstore.load(sharded({k: torch.empty_like(t) for k, t in state.items()}), place)
    group = zarr.open_group(place, mode="r")
    opened = shardstore.open(place)
    for key, tensor in state.items():
        wanted = bits_of(dtypes.as_numpy(tensor))
        assert bits_of(dtypes.as_numpy(found[key])) == wanted
        assert bits_of(opened[key][...]) == wanted
        assert bits_of(group[key][...]) == wanted
        if tensor.dtype != torch.float4_e2m1fn_x2:  # which TensorStore lacks
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{place}/{key}/"}}
            assert bits_of(tensorstore.open(spec).result().read().result()) == wanted
            assert bits_of(opened[key].tensorstore.read().result()) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int8", 300),
        ("int32", "x"),
        ("float32", None),
        ("float32", "0x00"),
        ("bfloat16", "0xzz00"),
        ("complex64", [1.0]),
        ("bool", [[]]),
    ],
)
def test_a_fill_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"fill value|hex|unpack|range|int\(\)"):
        dtypes.bits_of(name, value)


NEARLY = torch.zeros(3, 1000, 1000)
NEARLY[1, 500, 500] = 1e-30


SOME = pytest.mark.parametrize(
    ("tensor", "is_constant"),
    [
        (torch.zeros(64, 64), True),
        (torch.zeros(64, 64).t()[::2], True),
        (torch.tensor([0.0, -0.0]), False),  # equal numbers, other bits
        (torch.tensor([0.0, -0.0, 0.0]), False),
        (torch.full((5,), torch.nan), True),
        (NEARLY, False),
        (NEARLY.permute(2, 0, 1), False),
        (torch.complex(torch.zeros(4), torch.arange(4.0)), False),
        (torch.ones(3, dtype=torch.complex64).conj(), True),
    ],
)


@SOME
def test_large_tensors_of_a_device_are_compared_there(
    monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor, is_constant: bool
) -> None:
    monkeypatch.setattr(plan, "HOST_BYTES", 0)
    found = plan.constant_of(plan.DevicePart(tensor))
    first = tensor[(slice(1),) * tensor.ndim].resolve_conj()
    assert found == (bits_of(first.numpy()) if is_constant else None)


@SOME
def test_only_equal_bits_are_a_constant(
    tmp_path: Path, tensor: torch.Tensor, is_constant: bool
) -> None:
    shardstore.save(sharded({"w": tensor}), tmp_path / "c", constants=True)
    assert bool(list((tmp_path / "c" / "w").glob("c*"))) != is_constant
    found = shardstore.load(sharded({"w": torch.empty_like(tensor)}), tmp_path / "c")["w"]
    assert bits_of(found.resolve_conj().numpy()) == bits_of(tensor.resolve_conj().numpy())


def test_a_missing_chunk_beside_constants_is_an_error(tmp_path: Path) -> None:
    state = {"zeros": torch.zeros(8), "w": torch.arange(8.0)}
    shardstore.save(sharded(state), tmp_path / "c", constants=True)
    (tmp_path / "c" / "w" / "c.0").unlink()
    assert shardstore.open(tmp_path / "c")["zeros"][3] == 0
    with pytest.raises(ChunkMissingError, match="'w'"):
        shardstore.open(tmp_path / "c")["w"][...]


def test_the_attribute_of_a_constant_in_another_group_is_not_believed(tmp_path: Path) -> None:
    """A program that copies an array copies its attributes too."""
    shardstore.save(sharded({"w": torch.full((4,), 7.0)}), tmp_path / "c", constants=True)
    theirs = zarr.open_group(tmp_path / "theirs", mode="w")
    copied = zarr.open_group(tmp_path / "c", mode="r")["w"]
    array = theirs.create_array("w", shape=(4,), dtype="f4", attributes=dict(copied.attrs))
    array[...] = [1, 2, 3, 4]
    assert shardstore.open(tmp_path / "theirs")["w"][...].tolist() == [1, 2, 3, 4]


def test_constants_are_the_same_after_zarr_wrote_the_root_again(tmp_path: Path) -> None:
    odd = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32).expand(4)  # 0xffc00000
    state = {
        "zeros": torch.full((4,), -0.0),
        "nan": odd,
        "complex": torch.complex(torch.zeros(4), odd),
        "half": torch.full((4,), torch.nan, dtype=torch.bfloat16),
    }
    shardstore.save(sharded(state), tmp_path / "c", constants=True)
    zarr.open_group(tmp_path / "c", mode="r+").attrs["note"] = 1
    opened = shardstore.open(tmp_path / "c")
    for key, tensor in state.items():
        assert bits_of(opened[key][...]) == bits_of(dtypes.as_numpy(tensor)), key


def test_a_changed_fill_value_of_a_constant_is_an_error(tmp_path: Path) -> None:
    shardstore.save(sharded({"w": torch.ones(4)}), tmp_path / "c", constants=True)
    document = json.loads((tmp_path / "c" / "zarr.json").read_text())
    del document["attributes"]["shardstore"]["root_crc32c"]
    document["consolidated_metadata"]["metadata"]["w"]["fill_value"] = 2.0
    (tmp_path / "c" / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(ChunkCorruptError, match=r"'w'.*constant was changed"):
        shardstore.open(tmp_path / "c")["w"][...]


@pytest.mark.parametrize(
    ("option", "at", "is_first"),
    [("constants", 0, True), ("constants", 3, False), ("pack", 0, False), ("pack", 3, True)],
)
def test_an_empty_shard_beside_a_constant_says_nothing(
    tmp_path: Path, option: str, at: int, is_first: bool
) -> None:
    def shard(data: torch.Tensor, offset: int) -> ShardedTensor:
        return ShardedTensor("w", data, data.dtype, tuple(data.shape), (3,), (offset,), None)

    parts = [shard(torch.ones(3), 0), shard(torch.ones(0), at)]
    parts = parts if is_first else parts[::-1]
    shardstore.save(dict(enumerate(parts)), tmp_path / "c", **{option: True})
    assert shardstore.open(tmp_path / "c")["w"][...].tolist() == [1, 1, 1]
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}
    assert shardstore.load(wanted, tmp_path / "c")["w"].tolist() == [1, 1, 1]


def test_a_chunk_that_another_writer_put_beside_a_constant_is_not_read(tmp_path: Path) -> None:
    shardstore.save(sharded({"w": torch.ones(4)}), tmp_path / "c", constants=True)
    shardstore.save(sharded({"w": torch.arange(4.0)}), tmp_path / "late")
    shutil.copy(tmp_path / "late" / "w" / "c.0", tmp_path / "c" / "w" / "c.0")
    opened = shardstore.open(tmp_path / "c")
    for values in (
        opened["w"][...],
        opened["w"].zarr[...],
        opened["w"].tensorstore.read().result(),
    ):
        assert values.tolist() == [1, 1, 1, 1]
    assert [one.kind for one in findings(tmp_path / "c")] == ["chunk-extra"]


def test_without_the_option_every_chunk_is_stored(tmp_path: Path) -> None:
    shardstore.save(sharded({"w": torch.zeros(4)}), tmp_path / "c")
    assert (tmp_path / "c" / "w" / "c.0").exists()
    about = json.loads((tmp_path / "c" / "zarr.json").read_text())["attributes"]["shardstore"]
    assert about["format_version"] == 1
