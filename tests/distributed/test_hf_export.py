"""Ranks write one model in Hugging Face's format, and the library safetensors reads it back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardstore
from shardstore import CheckpointManager, ShardedTensor, hf
from shardstore.convert import convert
from shardstore.coverage import as_flat_range, report_shards
from shardstore.errors import (
    AccessPatternError,
    ArgumentError,
    CheckpointExistsError,
    CheckpointingException,
    ChunkCorruptError,
    KeyNameError,
    RanksError,
    StorageError,
)
from shardstore.hf import block_writer, blocks
from shardstore.hf.files import SINGLE_NAME, FileLayout
from shardstore.hf.places import PART_BYTES
from shardstore.storage.format.grid import Box
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import logged, raised, remains

State = dict[str, Any]


def whole(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**7), 2**7, shape, generator=generator).to(dtype)


MODEL = {
    "embed": whole(0, 64, 20, dtype=torch.bfloat16),
    "rows": whole(1, 37, 16),
    "columns": whole(2, 24, 40, dtype=torch.float16),
    "experts": whole(3, 6, 10, 14, dtype=torch.bfloat16),
    "bias": whole(4, 41, dtype=torch.int8),
    "scale": whole(5, dtype=torch.float64),
    "none": whole(6, 0, 3),
}


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[key].dtype == value.dtype and torch.equal(found[key], value)
        for key, value in expected.items()
    )


def sharded(mesh: DeviceMesh, axes: tuple[int | None, ...]) -> State:
    """The model with its tensors cut along these axes by the mesh, as far as they have them."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        placements = [
            Replicate() if axis is None or axis >= tensor.ndim else Shard(axis) for axis in axes
        ]
        return distribute_tensor(tensor.clone(), mesh, placements)

    return {key: cut(value) for key, value in MODEL.items()}


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {
    "rows": ((4,), (0,)),
    "columns": ((4,), (1,)),
    "inner": ((4,), (2,)),
    "rows of columns": ((2, 2), (0, 1)),
    "columns of experts": ((2, 2), (0, 2)),
    "replicas": ((2, 2), (None, 0)),
    "all alike": ((4,), (None,)),
}


STORED_LAYOUTS = ("inner", "rows of columns", "replicas")


def _export(
    rank: int, world_size: int, place: str, options: dict[str, Any], names: Iterable[str]
) -> None:
    for name in names:
        mesh, axes = LAYOUTS[name]
        state = sharded(init_device_mesh("cpu", mesh), axes)
        target = f"{place}/{name.replace(' ', '-')}"
        hf.save(state, target, file_bytes=3000, storage_options=options)
    hf.async_save(state, f"{place}/later", storage_options=options).result()
    tied = sharded(init_device_mesh("cpu", (4,)), (0,))
    tied["head"], tied["none"] = tied["embed"], tied["columns"]
    hf.save(tied, f"{place}/tied", file_bytes=3000, storage_options=options)
    parts = {key: value for n, (key, value) in enumerate(MODEL.items()) if n % 4 == rank}
    hf.save(parts, f"{place}/stages", storage_options=options)
    flat = []
    for key in ("columns", "experts"):
        value = MODEL[key].reshape(-1)
        ends = [0, 100, 101, 350, value.numel()][rank : rank + 2]
        rows = ShardedTensor.from_rank_offsets(key, MODEL[key])
        tensor = as_flat_range(rows)
        tensor.flattened_range, tensor.data = slice(*ends), value[slice(*ends)]
        flat.append(tensor)
    hf.save({"flat": flat}, f"{place}/flat", storage_options=options)
    hf.save(MODEL, f"{place}/plain", storage_options=options)


def expected_at(name: str) -> dict[str, torch.Tensor]:
    if name == "tied":
        return {key: value for key, value in MODEL.items() if key != "none"}
    return MODEL if name != "flat" else {key: MODEL[key] for key in ("columns", "experts")}


def _export_in_rounds(rank: int, world_size: int, place: str) -> None:
    block_writer.ROUND_BYTES = 300 * (rank + 1)
    _export(rank, world_size, place, {}, LAYOUTS)


def test_every_layout_of_ranks_gives_the_same_model(tmp_path: Path) -> None:
    """Ranks whose rounds differ do not wait for each other."""
    run_ranks(_export_in_rounds, 4, str(tmp_path))
    names = [*LAYOUTS, "later", "tied", "stages", "flat", "plain"]
    for name in names:
        folder = tmp_path / name.replace(" ", "-")
        assert same(read(folder), expected_at(name)), name
        index = folder / "model.safetensors.index.json"
        files = {path.name for path in folder.glob("*.safetensors")}
        if name in LAYOUTS:
            listed = json.loads(index.read_text())
            assert listed["weight_map"].keys() == MODEL.keys()
            assert set(listed["weight_map"].values()) == files
            assert listed["metadata"]["total_size"] == sum(t.nbytes for t in MODEL.values())
        elif name != "tied":
            assert files == {"model.safetensors"}
            assert not index.exists()
    assert len(os.listdir(tmp_path)) == len(names)


def test_the_same_in_a_bucket(s3_server: S3Server, tmp_path: Path) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/models", s3_server.storage_options)
    run_ranks(_export, 4, place.url, s3_server.storage_options, STORED_LAYOUTS)
    for name in [*STORED_LAYOUTS, "later", "tied", "stages", "flat", "plain"]:
        folder = place.child(name.replace(" ", "-"))
        (tmp_path / name).mkdir()
        for file in folder.listing():
            (tmp_path / name / file).write_bytes(folder.read(file))
        assert same(read(tmp_path / name), expected_at(name)), name
        assert ".shardstore-uploads.json" not in folder.listing()


def _export_halves(rank: int, world_size: int, place: str) -> None:
    size, part = PART_BYTES // 6, 1 - rank  # of 8 bytes: a half is longer than a part
    half = torch.arange(size) + part * size
    hf.save({"w": ShardedTensor.from_rank_offsets("w", half, (0, part, 2))}, place)


def test_a_store_that_takes_files_from_their_beginning(tmp_path: Path) -> None:
    """One rank writes the parts that it gets, and those that it has alone, in their order."""
    run_ranks(_export_halves, 2, f"local://{tmp_path}")
    assert torch.equal(read(tmp_path)["w"], torch.arange(2 * (PART_BYTES // 6)))


# -- from a checkpoint -----------------------------------------------------------------------------


def model_names(key: str) -> str | None:
    return key.removeprefix("model.") if key.startswith("model.") else None


def _export_steps(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state = {"model": sharded(mesh, (0,)), "optim": sharded(mesh, (1,)), "step": 3}
    with CheckpointManager(f"{folder}/run") as manager:
        manager.async_save(3, state)
        manager.export(3, f"{folder}/model", names=model_names, file_bytes=3000)
        manager.export(3, f"{folder}/half", names=model_names, dtype=torch.bfloat16)


def test_a_step_of_a_manager_is_exported(tmp_path: Path) -> None:
    run_ranks(_export_steps, 3, str(tmp_path))
    assert same(read(tmp_path / "model"), MODEL)
    floats = {key: v.bfloat16() if v.is_floating_point() else v for key, v in MODEL.items()}
    assert same(read(tmp_path / "half"), floats)
    step = CheckpointManager(tmp_path / "run").url(3)
    hf.export(step, tmp_path / "one", names=model_names)
    assert same(read(tmp_path / "one"), MODEL)


def _export_plain(rank: int, world_size: int, folder: str) -> None:
    tied, rows = torch.arange(6.0), torch.full((2, 3), float(rank))
    state = {"wte": tied, "head": tied, "norm": {"mean": torch.tensor(2.0)}, "rng": (tied,), "n": 3}
    state["few"] = tied.to_sparse()
    shard = ShardedTensor.from_rank_offsets("model.rows", rows, (0, rank, world_size))
    shardstore.save({"model": state}, f"{folder}/plain")
    shardstore.save({"model": {**state, "rows": shard}}, f"{folder}/both")
    for name in ("plain", "both"):
        with logged() as texts:
            hf.export(f"{folder}/{name}", f"{folder}/{name}-model", names=model_names)
        # Those that no file can hold are named.
        named = "2 not dense, or inside of a tuple, such as model.rng.0, model.few"
        assert [named in text for text in texts] == [True] * (rank == 0), texts


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_tensors_of_a_checkpoint_are_exported(tmp_path: Path, world_size: int) -> None:
    """Models of programs that do not shard, and plain tensors beside sharded ones."""
    run_ranks(_export_plain, world_size, str(tmp_path))
    plain = {"wte": torch.arange(6.0), "norm.mean": torch.tensor(2.0)}
    assert same(read(tmp_path / "plain-model"), plain)
    rows = torch.arange(world_size).repeat_interleave(2)[:, None].expand(-1, 3).float()
    assert same(read(tmp_path / "both-model"), {**plain, "rows": rows})


@pytest.mark.long
def test_one_process_exports_more_than_its_memory(tmp_path: Path) -> None:
    """A gigabyte in tensors of 64 MiB takes a fraction of it."""
    state = {f"w{n}": torch.full((2**26,), n, dtype=torch.uint8) for n in range(16)}
    shardstore.save(shardstore.shard(state), tmp_path / "c")
    del state
    program = (
        "import sys, resource; from shardstore import hf\n"
        "import shardstore.hf.writing\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "hf.export(*sys.argv[1:], durable=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "c"), str(tmp_path / "m")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 300 * 1024
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert all(bool((file.get_tensor(f"w{n}") == n).all()) for n in range(16))


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard(MODEL), tmp_path / "c")
    files = [path for path in (tmp_path / "c" / "rows").rglob("*") if path.is_file()]
    (chunk,) = (path for path in files if path.suffix != ".json")
    chunk.write_bytes(chunk.read_bytes()[:-5] + b"12345")
    with pytest.raises(ChunkCorruptError, match="'rows'"):
        hf.export(tmp_path / "c", tmp_path / "m")
    assert sorted(os.listdir(tmp_path)) == ["c"]


# -- what one rank says ----------------------------------------------------------------------------


def _differ(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    half = MODEL["rows"][:18]
    cut = (37, 16), (19 * rank, 0)
    shard = ShardedTensor("w", half, half.dtype, tuple(half.shape), *cut, None)
    overlap = ShardedTensor("w", half, half.dtype, tuple(half.shape), (37, 16), (17, 0), None)
    outside = ShardedTensor("w", half, half.dtype, tuple(half.shape), (37, 16), (20, 0), None)
    tries: dict[str, Any] = {
        "gap": lambda: hf.save({"w": shard}, f"{folder}/m"),
        "overlap": lambda: hf.save({"w": overlap if rank else shard}, f"{folder}/m"),
        "outside": lambda: hf.save({"w": outside}, f"{folder}/m"),
        "shape": lambda: hf.save({"w": torch.ones(2 + rank)}, f"{folder}/m"),
        "place": lambda: hf.save(MODEL, f"{folder}/m{rank}"),
        "dtype": lambda: hf.save(MODEL, f"{folder}/m", [None, torch.bfloat16][rank]),
        "argument": lambda: hf.save(MODEL, f"{folder}/m", file_bytes=[10, 0][rank]),
        "file": lambda: hf.save(MODEL, f"{folder}/m", files=[f"{folder}/missing.json"]),
        "names": lambda: hf.save(MODEL, f"{folder}/m", names=lambda _: "one"),
        "memory": lambda: hf.save(MODEL, "memory://hf-of-ranks/m"),
        "later": lambda: hf.async_save({"w": shard}, f"{folder}/m"),
        "named": lambda: hf.save(MODEL, f"{folder}/m", names=[{"rows": "model.rows"}, None][rank]),
        "none": lambda: hf.save(MODEL, f"{folder}/m", names=[None, {"rows": None}][rank]),
    }
    return [(type(error := raised(call)).__name__, str(error)) for call in tries.values()]


def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_written(tmp_path: Path) -> None:
    first, second = run_ranks(_differ, 2, str(tmp_path))
    kinds = [AccessPatternError] * 6 + [RanksError, RanksError, KeyNameError]
    kinds += [StorageError, *[AccessPatternError] * 3]
    texts = (
        "at offset (18, 0) of shape (1, 16) is on no rank",
        "is in different shards of ranks [0, 1]", "reaches outside the global shape (37, 16)",
        "global_shape (2,) on rank 0 and (3,) on rank 1", "/m1", "bfloat16",
        "file_bytes=0", "missing.json", "would both have the name 'one'", "memory of one process",
        "is on no rank", "'rows' the name 'model.rows' on rank 0 and 'rows' on rank 1",
        "'rows' the name 'rows' on rank 0 and None on rank 1",
    )  # fmt: skip
    for number, (kind, text) in enumerate(zip(kinds, texts, strict=True)):
        for rank in (first, second):
            assert text in rank[number][1], rank[number]
        assert kind.__name__ in (first[number][0], second[number][0])
    assert remains(tmp_path) == []


def _without_data(rank: int, world_size: int, place: str) -> tuple[list[str], list[str]]:
    half = MODEL["rows"][:18]
    shards = [
        ShardedTensor("w", data, half.dtype, (18, 16), (36, 16), (18 * rank, 0), None)
        for data in ([half, None][rank], half)
    ]
    texts = []
    for file_bytes in (1, 2**30):
        call = partial(hf.save, {"w": shards[0], "b": MODEL["bias"]}, place, file_bytes=file_bytes)
        texts.append(str(raised(call)))
    left = Location.of(place).listing()
    hf.save({"w": shards[1]}, place)
    return texts, left


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_an_error_while_ranks_write_leaves_nothing(tmp_path: Path, scheme: str) -> None:
    """The pieces of the rank that fails are sent as zeros, because others wait for them."""
    for texts, left in run_ranks(_without_data, 2, f"{scheme}{tmp_path}/m"):
        assert all("'w' has no data" in text for text in texts), texts
        assert left == []
    assert same(read(tmp_path / "m"), {"w": torch.cat([MODEL["rows"][:18]] * 2)})
    assert os.listdir(tmp_path / "m") == [SINGLE_NAME]


def _of_one_name(rank: int, world_size: int, folder: str) -> list[str]:
    names = [f"experts.{number}" for number in range(4)]
    state: State = {name: torch.full((300, 300), float(rank)) for name in names}
    state |= {"bias": torch.ones(3), "none": torch.zeros(0, 3), "count": torch.tensor(rank)}
    with logged() as texts:
        hf.save(state, f"{folder}/m")
    return texts


def test_plain_tensors_that_differ_are_those_of_the_first_rank(tmp_path: Path) -> None:
    """Such as shards that are no DTensors. The ranks divide the writing of equal ones."""
    (warning,), *others = run_ranks(_of_one_name, 3, str(tmp_path))
    assert "5 plain tensor(s) differ between ranks, such as 'experts.0' on ranks 0, 1, 2" in warning
    assert others == [[], []]
    found = read(tmp_path / "m")
    assert len(found) == 7
    assert not any(found[f"experts.{number}"].any() for number in range(4))
    assert found["count"] == 0


# -- one rank --------------------------------------------------------------------------------------


def test_names_data_types_files_and_tied_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weight, count = whole(1, 5, 4), torch.ones(3).int()
    model = {"embed": weight, "head": weight, "half": weight.half(), "count": count}
    state = {"model": model, "rope": whole(2, 3), "step": 7}
    hf.save(
        state,
        tmp_path / "m",
        torch.bfloat16,
        names=lambda key: None if key == "rope" else key.removeprefix("model."),
        files=[tmp_path / "config.json"],
    )
    expected = {"embed": weight.bfloat16(), "half": weight.bfloat16(), "count": count}
    assert same(read(tmp_path / "m"), expected)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head": "embed"}
    hf.save(state, tmp_path / "n", names={"rope": "r"}, files={"a.txt": "text", "b": b"\0"})
    assert "r" in read(tmp_path / "n")
    assert (tmp_path / "n" / "a.txt").read_text() == "text"


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """Programs that map files copy tensors that are not, or fail."""
    types = (torch.uint8, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.float32)
    model = {f"w{number}": torch.ones(3).to(dtype) for number, dtype in enumerate(types)}
    hf.save(model, tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "again", target_format="safetensors")
    for path in tmp_path.glob("*/*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        assert start % 64 == 0  # else reads take 1.4 times as long
        header = json.loads(data[8:start])
        for key, value in model.items():
            assert (start + header[key]["data_offsets"][0]) % value.itemsize == 0, (path, key)
    assert same(read(tmp_path / "again"), model)


def test_one_rank_holds_a_tensor_in_long_columns(tmp_path: Path) -> None:
    whole = torch.arange(2**20, dtype=torch.float32).reshape(2048, 512)
    columns = {
        f"half{n}": ShardedTensor.from_rank_offsets("w", whole[:, 256 * n :][:, :256], (1, n, 2))
        for n in range(2)
    }
    hf.save(columns, tmp_path / "m")
    assert same(read(tmp_path / "m"), {"w": whole})


def test_views_with_other_values_of_the_same_memory_are_no_tied_weights(tmp_path: Path) -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    model = {"x": whole, "y": whole.conj(), "u": whole.imag, "v": whole.conj().imag}
    hf.save(model, tmp_path / "m")
    hf.load(found := {key: torch.zeros_like(value) for key, value in model.items()}, tmp_path / "m")
    assert same(found, model)
    fresh = torch.zeros_like(whole)
    hf.load({"x": fresh, "y": fresh.conj()}, tmp_path / "m")  # the views fit what is stored
    assert torch.equal(fresh, whole)
    hf.save({"x": model["y"], "y": whole.conj()}, tmp_path / "tied")
    with safe_open(tmp_path / "tied" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "y": "x"}


def test_a_model_is_replaced_whole_and_other_files_stay(tmp_path: Path) -> None:
    hf.save(MODEL, tmp_path / "m", file_bytes=1000, files={"config.json": "old"})
    (tmp_path / "m" / "README.md").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="holds a model; pass overwrite=True"):
        hf.save(MODEL, tmp_path / "m")
    hf.save({"w": torch.ones(2)}, tmp_path / "m", overwrite=True, files={"config.json": "new"})
    assert sorted(os.listdir(tmp_path / "m")) == ["README.md", "config.json", "model.safetensors"]
    assert (tmp_path / "m" / "config.json").read_text() == "new"
    assert (tmp_path / "m" / "README.md").read_text() == "mine"
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("kind", "overwrite"), [("shardstore", False), ("shardstore", True), ("dcp", True)]
)
def test_no_model_replaces_a_checkpoint(tmp_path: Path, kind: str, overwrite: bool) -> None:
    """The export of a model leaves the optimizer out, so the checkpoint would be lost."""
    place = tmp_path / "step-1"
    if kind == "dcp":
        dcp.save(MODEL, checkpoint_id=place, no_dist=True)
    else:
        shardstore.save(shardstore.shard(MODEL), place)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    with pytest.raises(CheckpointExistsError, match="save the model elsewhere") as caught:
        hf.save(MODEL, place, overwrite=overwrite)
    assert "overwrite" not in str(caught.value)
    if kind == "shardstore":
        with pytest.raises(CheckpointExistsError, match="save the model elsewhere"):
            hf.export(place, place, overwrite=overwrite)
    assert sorted(path.relative_to(place) for path in place.rglob("*")) == before
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("store", ["folder", "memory", "s3"])
def test_files_of_the_replaced_model_go_whatever_their_names(
    s3_server: S3Server, tmp_path: Path, store: str
) -> None:
    """Programs that read every safetensors file would read both models. Qwen's have the first name,
    DeepSeek's the second; the rest is in the index alone."""
    weights = ["model.safetensors-00001-of-00001", "model-00002-of-000163", "part1", "part 2"]
    weights = [f"{name}.safetensors" for name in weights]
    foreign = ["README.md", "adapter_model.safetensors"]
    urls = {"memory": "memory://hf-names/m", "s3": f"s3://{s3_server.new_bucket()}/m"}
    place = Location.of(urls.get(store, tmp_path / "m"), s3_server.storage_options)
    weight_map = {name: name for name in (*weights, "README.md", "../outside.safetensors")}
    (tmp_path / "m").mkdir()
    (tmp_path / "outside.safetensors").touch()
    indices = {json.dumps({"weight_map": weight_map}): 4, '{"weight_map": [': 2, "[]": 2}
    for index, known in indices.items():
        for name in (*weights, *foreign):
            place.write(name, b"old")
        place.write("model.safetensors.index.json", index.encode())
        options = {} if store == "folder" else s3_server.storage_options
        model = {"w": torch.ones(2)}
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            hf.save(model, place.url, storage_options=options)
        hf.save(model, place.url, overwrite=True, storage_options=options)
        assert place.listing() == sorted([*foreign, "model.safetensors", *weights[known:]])
    assert (tmp_path / "outside.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8 must be one of"),
        ({"names": 3}, "names=3 must be a mapping"),
        ({"names": {"w": ""}}, "the name ''"),
        ({"files": "config.json"}, "a list of paths"),
        ({"files": 3}, "files=3 must be a list of paths"),
        ({"files": [3]}, "a list of paths"),
        ({"files": {"a": 3}}, "name -> text or bytes"),
        ({"files": {3: "a"}}, "the name 3"),
        ({"files": ["missing.json"]}, "missing.json, which does not exist"),
        ({"files": ["/dev"]}, "/dev, which is a folder; give its files"),
        ({"files": {"../x": ""}}, "'../x'"),
        ({"files": {"zarr.json": ""}}, "'zarr.json'"),
        ({"names": lambda _: None}, "no rank has a tensor"),
        ({"files": {"a.safetensors": ""}}, "'a.safetensors'"),
        ({"overwrite": 1}, "overwrite=1"),
        ({"place": "x.safetensors"}, "the name of a file"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    place = tmp_path / arguments.pop("place", "m")
    with pytest.raises(ArgumentError, match=text.replace("(", r"\(")):
        hf.save({"w": torch.ones(2)}, place, **arguments)
    assert os.listdir(tmp_path) == []


def test_two_paths_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "config.json" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("{}")
    with pytest.raises(ArgumentError, match=f"{paths[0]} and {paths[1]}, .* the same name"):
        hf.save({"w": torch.ones(2)}, tmp_path / "m", files=paths)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    hf.save({"w": torch.ones(2)}, tmp_path / "m", files=[paths[0], str(paths[0])])  # one file


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"s": torch.eye(2).to_sparse()}, "'s' is a tensor of layout torch.sparse_coo"),
        ({"t": (torch.ones(1), 2)}, "'t.0'.*tuple"),
        ({"m": torch.ones(2, device="meta")}, "'m'.*no plain memory"),
        ({"c": torch.ones(2, dtype=torch.complex128)}, "'c' has data type complex128"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__'; rename"),
        ({"\ud800": torch.ones(2)}, "ud800.*rename"),
    ],
)
def test_no_tensor_is_left_out_in_silence(tmp_path: Path, state: State, text: str) -> None:
    with pytest.raises(CheckpointingException, match=text):
        hf.save({"w": torch.ones(2), **state}, tmp_path / "m")
    assert os.listdir(tmp_path) == []


def test_a_tied_weight_called_format_keeps_the_format(tmp_path: Path) -> None:
    weight = torch.ones(2)
    hf.save({"a": weight, "format": weight}, tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_record_of_uploads_that_is_none_is_named_and_stays(s3_server: S3Server) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    place.write(".shardstore-uploads.json", b"[1]")
    with pytest.raises(StorageError, match=r"m/\.shardstore-uploads\.json .*remove it"):
        hf.save(MODEL, place.url, storage_options=s3_server.storage_options)
    assert place.read(".shardstore-uploads.json") == b"[1]"  # it belongs to somebody else


# -- the plan --------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and where each axis is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    return shape, [sorted({0, n, *draw(st.sets(st.integers(0, n), max_size=3))}) for n in shape]


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(cuts(), min_size=1, max_size=4),
    alike=st.integers(1, 2),
    ranks=st.integers(1, 5),
    copies=st.integers(1, 2),
    part_bytes=st.one_of(st.none(), st.integers(1, 25).map(lambda n: n * 8)),
    least=st.sampled_from([1, 16, 10**6]),
    file_bytes=st.sampled_from([50, 10**6]),
    data=st.data(),
)
def test_blocks_tile_the_files_and_pieces_their_blocks(
    tensors: list[Any],
    alike: int,
    ranks: int,
    copies: int,
    part_bytes: int | None,
    least: int,
    file_bytes: int,
    data: st.DataObject,
) -> None:
    members = [10 + n for n in range(ranks)]
    held: dict[int, list[ShardedTensor]] = {rank: [] for rank in members}
    dtypes = [torch.float32, torch.uint8, torch.bfloat16]
    for number, (shape, edges) in enumerate(tensors * alike):  # cut alike, on other ranks
        dtype = dtypes[number % len(tensors) % 3]
        for index in (
            torch.cartesian_prod(*[torch.arange(len(e) - 1) for e in edges])
            .reshape(-1, len(shape))
            .tolist()
            if shape
            else [[]]
        ):
            low = tuple(e[i] for e, i in zip(edges, index, strict=True))
            size = tuple(e[i + 1] - e[i] for e, i in zip(edges, index, strict=True))
            for rank in data.draw(st.permutations(members))[:copies]:
                shard = ShardedTensor(f"t{number}", None, dtype, size, shape, low, None)
                held[rank].append(shard)
    reports = [report_shards(shards) for shards in held.values()]
    arrays, holders = blocks.held_by(reports, members)
    layout = FileLayout.of(arrays, file_bytes, {}, SINGLE_NAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "MIN_RUN_BYTES", least)
        patch.setattr(blocks, "BLOCK_BYTES", 64)
        plan = blocks.plan_blocks(layout, arrays, holders, members, part_bytes)
    written = {name: bytearray(size) for name, size in layout.sizes.items()}
    for block in plan:
        for n in range(block.start, block.stop):
            written[block.name][n] += 1
        _check(block, layout, {meta.key: meta for meta in arrays}, holders)
    for name, counts in written.items():
        begins = 0 if part_bytes else len(layout.heads[name])
        assert set(counts[begins:]) <= {1}
        assert set(counts[:begins]) <= {0}


def _check(block: blocks.Block, layout: FileLayout, arrays: Any, holders: Any) -> None:
    """Each byte of the block, besides the header, comes from one piece of a rank that holds it."""
    found = bytearray(block.size)
    for piece in block.pieces:
        size = {"float32": 4, "uint8": 1, "bfloat16": 2}[arrays[piece.key].dtype]
        assert piece.rank in holders[piece.key][piece.held]
        assert piece.start >= 0
        assert piece.held.intersect(piece.box) == piece.whole.intersect(piece.box) == piece.box
        inner = piece.box.relative_to(piece.whole.offset)
        mask = torch.zeros(piece.whole.shape, dtype=torch.bool)
        mask[inner.slices] = True
        for element in mask.reshape(-1).nonzero().reshape(-1).tolist():
            for byte in range(size):
                found[piece.start + element * size + byte] += 1
        name, start = layout.places[piece.key]
        strides = [
            math.prod(arrays[piece.key].shape[axis + 1 :]) for axis in range(len(mask.shape))
        ]
        first = sum(o * s for o, s in zip(piece.whole.offset, strides, strict=True))
        assert (name, start + first * size) == (block.name, block.start + piece.start)
    head = max(0, min(block.size, len(layout.heads[block.name]) - block.start))
    assert set(found[head:]) <= {1}
    assert set(found[:head]) <= {0}


def test_an_empty_tensor_at_the_first_byte_of_a_larger_one_has_no_pieces() -> None:
    sizes = {"a": (100, torch.uint8), "b": (4, torch.float32), "c": (0, torch.float32)}
    shards = [
        ShardedTensor(k, None, dtype, (n,), (n,), (0,), None) for k, (n, dtype) in sizes.items()
    ]
    arrays, holders = blocks.held_by([report_shards(shards)], [0])
    layout = FileLayout.of(arrays, 2**40, {}, SINGLE_NAME)
    assert layout.places["a"] == layout.places["c"]
    plan = blocks.plan_blocks(layout, arrays, holders, [0], 64)
    assert sum(piece.nbytes for block in plan for piece in block.pieces) == 116


def test_replicas_divide_the_writing() -> None:
    tensor = ShardedTensor("w", None, torch.float32, (4096, 4096), (4096, 4096), (0, 0), (1, 1))
    arrays, holders = blocks.held_by([report_shards([tensor])] * 4, range(4))
    layout = FileLayout.of(arrays, 2**40, {}, SINGLE_NAME)
    plan = blocks.plan_blocks(layout, arrays, holders, range(4), None)
    assert sorted(block.owner for block in plan) == [0, 1, 2, 3]
    assert holders["w"] == {Box((0, 0), (4096, 4096)): [0, 1, 2, 3]}


def test_a_file_that_is_written_in_order_has_one_writer() -> None:
    shards = [ShardedTensor(f"t{n}", None, torch.uint8, (99,), (99,), (0,), None) for n in range(4)]
    arrays, holders = blocks.held_by([report_shards(shards)] * 2, range(2))
    layout = FileLayout.of(arrays, 100, {})
    plan = blocks.plan_blocks(layout, arrays, holders, range(2), 64, in_order=True)
    assert plan == sorted(plan, key=lambda block: (block.name, block.start))
    writers = {(block.name, block.owner) for block in plan}
    assert sorted(owner for _, owner in writers) == [0, 0, 1, 1]


def test_blocks_of_many_ranks_are_divided_after_those_of_one() -> None:
    """Cuts within rows let no rank write more, nor do tensors that a rank holds alone."""
    shape, parts = (4000, 4104), 4  # columns; blocks of 16 MiB end within rows
    held: list[list[ShardedTensor]] = [
        [
            ShardedTensor(f"a{n}", None, torch.float32, (4000, 1026), shape, (0, 1026 * rank), None)
            for n in range(6)
        ]
        for rank in range(parts)
    ]
    held[2].append(ShardedTensor("z", None, torch.float32, shape, shape, (0, 0), None))
    arrays, holders = blocks.held_by([report_shards(shards) for shards in held], range(parts))
    layout = FileLayout.of(arrays, 2**40, {}, SINGLE_NAME)
    plan = blocks.plan_blocks(layout, arrays, holders, range(parts), None)
    written = Counter[int]()
    for block in plan:
        written[block.owner] += block.size
    total = sum(meta.shape[0] * meta.shape[1] * 4 for meta in arrays)
    assert max(written.values()) - total / parts <= blocks.BLOCK_BYTES
    assert {b.owner for b in plan if b.pieces[0].key == "z"} == {2}
