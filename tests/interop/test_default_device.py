"""A default device of the program, such as ``meta`` while it builds a model, does not reach the
buffers of this package."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._device import _device_constructors

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.dcp import StorageReader, StorageWriter
from tests.helpers.nested import same
from tests.helpers.ranks_helper import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

BACKENDS = [("zarr", 2), ("zarr", 1), ("torch_dist", 1)]


def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    """Calls of torch's functions that follow the default device."""
    names = {function.__name__ for function in _device_constructors()}
    found = []
    for file in Path(shardstore.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of_torch = ast.unparse(node.func.value) == "torch" and node.func.attr in names
                if of_torch and "device" not in [word.arg for word in node.keywords]:
                    found.append(f"{file.name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count, dtype=dtype, device="cpu")


def whole(key: str, data: torch.Tensor | None, like: torch.Tensor) -> ShardedTensor:
    shape = tuple(like.shape)
    return ShardedTensor(key, data, like.dtype, shape, shape, (0,) * like.ndim, (1,) * like.ndim)


TENSORS = {
    "w": numbers(12).view(3, 4),
    "half": numbers(5).bfloat16(),
    "scalar": numbers(1)[0],
    "f8": numbers(7).to(torch.float8_e4m3fn),
}
VALUES: dict[str, Any] = {
    "tensor": numbers(4),
    "view": numbers(100)[5:7],
    "parameter": torch.nn.Parameter(numbers(3)),
    "sparse": torch.eye(3, device="cpu").to_sparse(),
    "rows": torch.eye(3, device="cpu").to_sparse_csr(),
    "step": 7,
}


def state(given: bool = True) -> dict[str, Any]:
    """Sharded tensors with data, or for a load without."""
    tensors = {k: whole(k, t.clone() if given else None, t) for k, t in TENSORS.items()}
    flat = ShardedTensor.from_rank_offsets_flat(
        "flat", numbers(6), (6,), flattened_range=slice(0, 6)
    )
    made = {**tensors, "flat": flat if given else flat.without_data()}
    held = {"tensor": numbers(3)[1:]} if given else None
    return {**made, "o": ShardedObject("o", held, (1,), (0,)), **(VALUES if given else {})}


def expected() -> dict[str, Any]:
    return {**TENSORS, "flat": numbers(6), "o": {"tensor": numbers(3)[1:]}, **VALUES}


def assert_loaded(loaded: dict[str, Any]) -> None:
    def dense(values: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to_dense() if k in ("sparse", "rows") else v for k, v in values.items()}

    devices = {v.device.type for v in loaded.values() if isinstance(v, torch.Tensor)}
    assert devices == {"cpu"}
    assert same(dense(loaded), dense(expected()))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_saves_and_loads_ignore_the_default_device(
    tmp_path: Path, backend: tuple[str, int]
) -> None:
    with torch.device("meta"):
        shardstore.save(state(), tmp_path / "now", backend)
        shardstore.async_save(state(), tmp_path / "later", backend).result()
        into = [shardstore.load(state(given), tmp_path / "now") for given in (False, True)]
        into.append(shardstore.load(state(False), tmp_path / "later"))
        plain = shardstore.load_plain_tensors(tmp_path / "now")
        halves = {"half": whole("half", None, TENSORS["half"].float())}
        cast = shardstore.load(halves, tmp_path / "now", cast=True)
        on_meta = {"w": whole("w", torch.empty(3, 4), TENSORS["w"])}
        from_meta = shardstore.load(on_meta, tmp_path / "now")
    for loaded in into:
        assert_loaded(loaded)
    assert same({k: plain[k] for k in TENSORS}, TENSORS)
    assert same(cast["half"], TENSORS["half"].float())
    assert same(from_meta["w"], TENSORS["w"])


def test_the_manager_and_dcp_ignore_the_default_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        manager = shardstore.CheckpointManager(tmp_path / "run")
        manager.save(1, state())
        manager.async_save(2, state()).result()
        restored = manager.restore(state(False))
        opened = shardstore.open(tmp_path / "run" / "step-1")
        read = {key: opened[key].torch() for key in TENSORS}
        common = opened.common
        for kind in ("dcp", "megatron", "safetensors"):
            assert convert(
                tmp_path / "run" / "step-1", tmp_path / kind, target_format=kind
            ).verified
            assert convert(tmp_path / kind, tmp_path / f"{kind} back").verified
        values = {"w": TENSORS["w"], "pair": (numbers(3)[1:], 1)}
        dcp.save(values, storage_writer=StorageWriter(tmp_path / "d"), no_dist=True)
        filled = {"w": TENSORS["w"] * 0, "pair": None}
        dcp.load(filled, storage_reader=StorageReader(tmp_path / "d"), no_dist=True)
    assert restored is not None
    assert_loaded({key: restored.state[key] for key in expected()})
    assert same(read, TENSORS)
    assert same(common["tensor"], VALUES["tensor"])
    assert same(filled, values)


def _exchanged(rank: int, world_size: int, place: str) -> bool:
    """Irregular cuts, flattened ranges, and replicas whose bytes come from another rank."""
    cuts = [slice(0, 5), slice(5, 12)]

    def parts(filled: bool) -> dict[str, Any]:
        flat = numbers(12)[cuts[rank]] if filled else numbers(12)[cuts[rank]] * 0
        copy = numbers(9) if filled else numbers(9) * 0
        return {
            "flat": ShardedTensor.from_rank_offsets_flat(
                "flat", flat, (12,), flattened_range=cuts[rank]
            ),
            "copy": ShardedTensor.from_rank_offsets("copy", copy, replica_id=rank),
        }

    with torch.device("meta"):
        shardstore.save(parts(True), place)
        loaded: Any = shardstore.load(parts(False), place)
        plain: Any = shardstore.load_plain_tensors(place)
    return bool(
        torch.equal(loaded["flat"], numbers(12)[cuts[rank]])
        and torch.equal(loaded["copy"], numbers(9))
        and torch.equal(plain["flat"], numbers(12))
    )


def test_exchanges_between_ranks_ignore_the_default_device(tmp_path: Path) -> None:
    assert run_ranks(_exchanged, 2, str(tmp_path / "c")) == [True, True]
