"""``float8_e8m0fnu`` and ``float4_e2m1fn_x2``, every byte of them: saved, loaded, sharded and
converted, and read and written by zarr, TensorStore, safetensors and PyTorch DCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
import zarr.codecs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import shardstore
from shardstore import ShardedTensor, hf
from shardstore.cli.app import app
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import DTypeMismatchError
from shardstore.validation import comparable, pickled
from tests.helpers.conversions import same
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.verification import findings

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ("float8_e8m0fnu", "float4_e2m1fn_x2")
BYTES = torch.arange(256, dtype=torch.int16).to(torch.uint8)
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
"""The values of float4_e2m1fn from 0 on."""

Tensors = dict[str, torch.Tensor]
State = dict[str, Any]


def every_byte() -> Tensors:
    """Tensors of both types that contain every byte, and of no bytes."""
    found = {}
    for name in NAMES:
        dtype = getattr(torch, name)
        found[f"{name}.all"] = BYTES.reshape(16, 16).clone().view(dtype)
        found[f"{name}.turned"] = BYTES.reshape(8, 32).flip(0).view(dtype).T
        found[f"{name}.line"] = BYTES[7:100].clone().view(dtype)
        found[f"{name}.none"] = torch.empty(3, 0, dtype=dtype)
    return found


def blank(tensors: Tensors) -> Tensors:
    """Other values in the same shapes. torch has no fill_ for float4_e2m1fn_x2."""
    return {
        key: torch.full(value.shape, 9, dtype=torch.uint8).view(value.dtype)
        for key, value in tensors.items()
    }


def sharded(tensors: Tensors) -> State:
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}


@pytest.mark.parametrize(
    "how",
    [
        {"sharded_strategy": ("zarr", 2)},
        {"compression": "zstd"},
        {"compression": "blosc"},
        {"sharded_strategy": ("zarr", 1)},
        {"sharded_strategy": ("torch_dist", 1)},
    ],
    ids=str,
)
def test_short_floats_are_saved_and_loaded(tmp_path: Path, how: dict[str, Any]) -> None:
    tensors = every_byte() | {name: BYTES[130].view(getattr(torch, name)) for name in NAMES}
    shardstore.save(sharded(tensors), tmp_path / "c", **how)
    found = shardstore.load(sharded(blank(tensors)), tmp_path / "c")
    assert same(found, tensors)
    if "torch_dist" not in str(how):
        assert findings(tmp_path / "c", hashes=True) == []
        opened = shardstore.open(tmp_path / "c")
        assert same({key: opened[key].torch() for key in tensors}, tensors)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shardstore.save(sharded(every_byte()), tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_what_zarr_wrote_is_read(tmp_path: Path, zarr_format: Any) -> None:
    """TensorStore decompresses the one type, and zarr the other."""
    packer = zarr.codecs.GzipCodec() if zarr_format == 3 else {"id": "zlib", "level": 1}
    packed: Any = {"plain": None, "packed": packer}
    group = zarr.open_group(tmp_path, mode="w", zarr_format=zarr_format)
    for key, value in every_byte().items():
        bits: Any = value.contiguous().view(torch.uint8).numpy()
        for how, compressors in packed.items():
            array: Any = group.create_array(
                f"{how}.{key}",
                shape=bits.shape,
                chunks=tuple(max(1, n // 2) for n in bits.shape),
                dtype=key.partition(".")[0],
                compressors=compressors,
            )
            array[...] = bits.view(array.dtype)
    opened = shardstore.open(tmp_path)
    assert opened.refused == {}
    for how in packed:
        found = {key: opened[f"{how}.{key}"].torch() for key in every_byte()}
        assert same(found, every_byte())


def header(path: Path) -> dict[str, Any]:
    """The tensors in a safetensors file, without their offsets."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found.pop("__metadata__", None)
    return {key: (entry["dtype"], entry["shape"]) for key, entry in found.items()}


def test_safetensors_there_and_back(tmp_path: Path) -> None:
    tensors = {key: value.contiguous() for key, value in every_byte().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "c")
    found = shardstore.load(sharded(blank(tensors)), tmp_path / "c")
    assert same(found, tensors)
    convert(tmp_path / "c", tmp_path / "b.safetensors")
    hf.save(every_byte(), tmp_path / "model")
    for path in (tmp_path / "b.safetensors", tmp_path / "model" / "model.safetensors"):
        assert same(load_file(path), tensors)
        assert header(path) == header(tmp_path / "a.safetensors")
    assert header(path)["float4_e2m1fn_x2.all"] == ("F4", [16, 32])
    assert header(path)["float8_e8m0fnu.all"] == ("F8_E8M0", [16, 16])


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_the_other_types_of_8_bits_in_safetensors(tmp_path: Path, name: str) -> None:
    tensors = {"w": BYTES.view(getattr(torch, name))}
    save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "b.safetensors")
    assert same(load_file(tmp_path / "b.safetensors"), tensors)


def test_shapes_that_do_not_fill_bytes_are_refused(tmp_path: Path) -> None:
    """In torch a row has whole bytes. In safetensors only the whole tensor has."""
    text = b'{"w":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}'
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.get_slice("w").get_shape() == [2, 3]
    with pytest.raises(DTypeMismatchError, match=r"key 'w' .*'F4' and shape \(2, 3\)"):
        convert(tmp_path / "a.safetensors", tmp_path / "c")
    scalar = {"w": BYTES[3].view(torch.float4_e2m1fn_x2)}
    with pytest.raises(DTypeMismatchError, match=r"key 'w' .*float4_e2m1fn_x2 and shape \(\)"):
        hf.save(scalar, tmp_path / "model")


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_int4_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    """torch cannot copy these types, and safetensors lacks them."""
    tensor = BYTES.view(getattr(torch, name))
    for state in ({"w": tensor}, sharded({"w": tensor})):
        for save in (shardstore.save, hf.save):
            with pytest.raises(DTypeMismatchError, match=r"'w'.*view\(torch\.uint8\)"):
                save(state, tmp_path / "c")
    shardstore.save(sharded({"w": tensor.view(torch.uint8)}), tmp_path / "c")
    found = shardstore.load(sharded({"w": torch.zeros_like(BYTES)}), tmp_path / "c")["w"]
    assert found.view(tensor.dtype).view(torch.uint8).equal(BYTES)


def test_a_cast_that_torch_lacks_is_refused(checkpoint: Path) -> None:
    for key, scale in (("float4_e2m1fn_x2.all", False), ("float8_e8m0fnu.all", True)):
        state = sharded({key: torch.zeros(16, 16)})
        with pytest.raises(DTypeMismatchError, match=key):
            shardstore.load(state, checkpoint)
        if scale:
            found = shardstore.load(sharded({key: torch.zeros(16, 16)}), checkpoint, cast=True)
            expected = every_byte()[key].to(torch.float32)
            torch.testing.assert_close(found[key], expected, rtol=0, atol=0, equal_nan=True)
            continue
        for cast in (True, "warn"):
            with pytest.raises(DTypeMismatchError, match=key):
                shardstore.load(state, checkpoint, cast=cast)


def test_dcp_there_and_back(tmp_path: Path) -> None:
    dcp.save(every_byte(), storage_writer=StorageWriter(tmp_path / "ours"), no_dist=True)
    found = blank(every_byte())
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ours"), no_dist=True)
    assert same(found, every_byte())
    dcp.save(every_byte(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "c")
    assert same(shardstore.load(sharded(blank(every_byte())), tmp_path / "c"), every_byte())
    convert(tmp_path / "c", tmp_path / "again", target_format="dcp")
    found = blank(every_byte())
    dcp.load(found, checkpoint_id=tmp_path / "again", no_dist=True)
    assert same(found, every_byte())


def test_values_in_lists_and_between_ranks(tmp_path: Path) -> None:
    tensors = list(every_byte().values())
    shardstore.save({"x": {"pair": (1, tensors)}}, tmp_path / "c")
    found = shardstore.load({}, tmp_path / "c")["x"]["pair"][1]
    for one, other in zip(found, tensors, strict=True):
        assert same({"": one}, {"": other})
    assert pickled(comparable({"x": tensors}))


def run(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code in (0, 1), done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_commands_take_the_two_numbers_of_a_byte_for_a_complex_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    changed = every_byte()
    for name in NAMES:
        changed[f"{name}.all"].view(torch.uint8)[0, 2:4] = torch.tensor([0x73, 0x82])
    shardstore.save(sharded(changed), tmp_path / "d")
    values = run("diff", checkpoint, tmp_path / "d")["values"]
    assert values.keys() == {"float8_e8m0fnu.all", "float4_e2m1fn_x2.all"}
    pairs = values["float4_e2m1fn_x2.all"]
    assert (pairs["elements"], pairs["of"]) == (2, 256)
    # 0x02 is (1, 0), and 0x73 is (1.5, 6).
    assert pairs["max_abs"] == pytest.approx(abs(0.5 + 6j))
    numbers = [*NUMBERS, *(-number for number in NUMBERS)]
    shown = run("show", checkpoint, "float4_e2m1fn_x2.all")["values"]
    assert shown == [[[low, high] for low in numbers] for high in numbers]
    assert run("show", checkpoint, "float8_e8m0fnu.all[7, 15]")["values"] == 1.0
    assert "float4_e2m1fn_x2" in json.dumps(run("ls", checkpoint))


# ---- ranks


def filled() -> Tensors:
    return {key: value for key, value in every_byte().items() if value.ndim == 2 and value.numel()}


def distributed(tensors: Tensors, world_size: int, axis: int | None) -> dict[str, DTensor]:
    """The tensors as DTensors. distribute_tensor gets bytes, because gloo lacks these types."""
    mesh = init_device_mesh("cpu", (world_size,))
    placements = [Replicate() if axis is None else Shard(axis)]

    def cut(value: torch.Tensor) -> DTensor:
        value = value.contiguous()
        local = distribute_tensor(value.view(torch.uint8), mesh, placements).to_local()
        shape, stride = value.shape, value.stride()
        return DTensor.from_local(
            local.view(value.dtype), mesh, placements, shape=shape, stride=stride
        )

    return {key: cut(value) for key, value in tensors.items()}


def local(tensors: dict[str, DTensor]) -> Tensors:
    return {key: value.to_local() for key, value in tensors.items()}


AXES = (0, 1, None)


def _save(rank: int, world_size: int, place: str) -> None:
    for axis in AXES:
        state: State = distributed(filled(), world_size, axis)
        shardstore.save(state, f"{place}/{axis}")
        hf.save(state, f"{place}/hf-{axis}")
        dcp.save(state, storage_writer=StorageWriter(f"{place}/dcp-{axis}"))
    parts = {}
    for key, value in filled().items():
        part = value.contiguous().chunk(world_size)[rank]
        parts[key] = ShardedTensor.from_rank_offsets(key, part, (0, rank, world_size))
    shardstore.save(parts, f"{place}/sharded")


def _load(rank: int, world_size: int, place: str) -> None:
    for axis in AXES:
        expected = local(distributed(filled(), world_size, axis))
        for stored in ("0", "1", "None", "dcp-1", "sharded"):
            state: State = distributed(blank(filled()), world_size, axis)
            assert same(local(shardstore.load(state, f"{place}/{stored}")), expected)
        state = distributed(blank(filled()), world_size, axis)
        group, how = torch.distributed.group.WORLD, "always"
        shardstore.load(state, f"{place}/0", replica_group=group, share_replicas=how)
        assert same(local(state), expected)
        state = distributed(blank(filled()), world_size, axis)
        dcp.load(state, storage_reader=StorageReader(f"{place}/dcp-0"))
        assert same(local(state), expected)


def test_shards_of_ranks(tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path))
    run_ranks(_load, 3, str(tmp_path))
    for axis in AXES:
        assert same(load_file(tmp_path / f"hf-{axis}" / "model.safetensors"), filled())
