"""Conversions between all formats: to the bit, within a budget, resumed after a kill, verified.

Other formats are written and read by their own libraries: safetensors, PyTorch DCP, and the golden
checkpoints of Megatron-Core.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import shardstore
from shardstore import ShardedObject, ShardedTensor, hf
from shardstore.convert import DEFAULT_FILE_BYTES, convert
from shardstore.errors import (
    ArgumentError,
    CheckpointExistsError,
    CheckpointingException,
    DamagedCheckpointError,
    DTypeMismatchError,
    KeyNameError,
    NotACheckpointError,
)
from shardstore.hf import files
from shardstore.progress import Progress
from shardstore.serialization import load_sharded_metadata
from shardstore.storage.format.grid import Box
from tests.golden import states
from tests.helpers.conversions import killed_conversion, same, some_tensors, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore")

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDENS = [
    "megatron-core-0.15.3-zarr/tp2dp2",
    "megatron-core-0.15.3-zarr/tp1dp4",
    "megatron-core-0.15.3-torch_dist/tp2dp1",
    "megatron-core-0.15.3-torch_dist/tp1dp2",
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8]


# -- from other formats ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_checkpoints_of_megatron_are_converted(name: str, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([io.BytesIO]):
        done = convert(GOLDEN / name, tmp_path / "c", memory_budget=500)
        assert done.verified
        assert done.tensors == len({**states.MODEL, **states.OPTIMIZER})
        found = load_sharded_metadata(tmp_path / "c")
        assert {key for key in found if "/shard_" in key} == {
            f"objects.{kind}/shard_{i}_2" for kind in ("rng", "fp8_meta", "amax") for i in range(2)
        }
        from shardstore import mapping

        wanted = states.build(mapping, states.Layout(1, 1), 0, empty=True)
        loaded = shardstore.load(wanted, tmp_path / "c")
    assert isinstance(loaded, dict)
    assert loaded.pop("content_metadata") == states.CONTENT_METADATA
    expected = states.expected(mapping, states.Layout(1, 1), 0)
    assert states.differences(loaded, expected) == []
    group = zarr.open_group(str(tmp_path / "c"), mode="r")
    values = states.values("token_counts").numpy()
    assert np.array_equal(np.asarray(group["token_counts"][...]), values)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.qint8])
def test_a_type_of_dcp_that_no_array_stores_is_named_with_its_key(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensor = torch.zeros(4, dtype=torch.complex32)
    if dtype == torch.qint8:
        tensor = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, dtype)
    dcp.save({"a": torch.ones(3), "b": tensor}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(DTypeMismatchError, match=rf"key 'b'.*{dtype}"):
        convert(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("path", [("a", 0.5), ("a", torch.float32), ("a", None), (), 3])
def test_dcp_with_a_damaged_path(tmp_path: Path, path: object) -> None:
    """A record of such a path could not be written, or not be read."""
    dcp.save({"a": {"b": 3}}, checkpoint_id=tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    metadata.planner_data["a.b"] = path
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata"):
        convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_safetensors_files_and_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt", "who": "me"})
    convert(tmp_path / "m.safetensors", tmp_path / "c", memory_budget=10_000)
    assert same(tensors_of(tmp_path / "c"), tensors)
    attributes = dict(zarr.open_group(str(tmp_path / "c"), mode="r").attrs)
    assert attributes["safetensors"] == {"who": "me"}

    convert(tmp_path / "c", tmp_path / "several", target_format="safetensors", file_bytes=50_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    found: dict[str, torch.Tensor] = {}
    for name in files:
        loaded = load_file(tmp_path / "several" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(loaded)
        found |= loaded
    assert same(found, tensors)

    convert(tmp_path / "several", tmp_path / "again")
    assert same(tensors_of(tmp_path / "again"), tensors)
    convert(tmp_path / "again", tmp_path / "one.safetensors")
    assert same(load_file(tmp_path / "one.safetensors"), tensors)
    assert metadata_of(tmp_path / "one.safetensors") == {"format": "pt", "who": "me"}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again", "c", "m.safetensors", "one.safetensors", "several",
    ]  # fmt: skip


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return {k: v for k, v in file.metadata().items() if k != "shardstore.state_dict"}


def test_the_metadata_of_safetensors_files_is_kept(tmp_path: Path) -> None:
    """Such as the ties that ``safetensors.torch.save_model`` and ``hf.save`` write."""
    emb = torch.rand(4, 2)
    hf.save({"emb": emb, "head": emb}, tmp_path / "a")
    about = {"head": "emb", "modelspec.title": "A model"}
    save_file({"emb": emb, "w": torch.ones(9)}, tmp_path / "b.safetensors", metadata=about)
    for name in ("a", "b.safetensors"):
        place = tmp_path / f"of {name}"
        convert(tmp_path / name, place / "zarr")
        convert(place / "zarr", place / "one.safetensors")
        several = {"target_format": "safetensors", "file_bytes": 36}
        convert(place / "one.safetensors", place / "several", **several)  # type: ignore[arg-type]
        for made in (place / "one.safetensors", place / "several"):
            head = torch.zeros(4, 2)
            hf.load({"head": head}, made)
            assert torch.equal(head, emb)
    assert metadata_of(place / "one.safetensors") == {**about, "format": "pt"}
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    assert metadata_of(place / "several" / first) == {**about, "format": "pt"}
    assert metadata_of(place / "several" / second) == {"format": "pt"}


def test_only_texts_become_metadata_of_safetensors_files(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard({"w": torch.ones(2)}), tmp_path / "c")
    group = zarr.open_group(str(tmp_path / "c"), mode="r+")
    about = {"a": 1, "b": "text", "c": None, "shardstore.state_dict": "text"}
    for number, value in enumerate((about, ["b"], "b")):
        group.attrs["safetensors"] = value
        convert(tmp_path / "c", tmp_path / f"{number}.safetensors")
        found = {"b": "text"} if number == 0 else {}
        assert metadata_of(tmp_path / f"{number}.safetensors") == {**found, "format": "pt"}
        convert(tmp_path / f"{number}.safetensors", tmp_path / f"back {number}")


@settings(
    max_examples=settings.default.max_examples // 10,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    memory_budget=st.sampled_from([1, 64, 1000, 10**6]),
)
def test_round_trip_through_everything(
    shapes: list[list[int]], dtype: torch.dtype, memory_budget: int
) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for i, shape in enumerate(shapes):
        values = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)
        tensors[f"t{i}"] = (values % 2).bool() if dtype == torch.bool else values.to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_file(tensors, place / "a.safetensors")
        convert(place / "a.safetensors", place / "b", memory_budget=memory_budget)
        convert(place / "b", place / "c", target_format="dcp", memory_budget=memory_budget)
        convert(place / "c", place / "d", memory_budget=memory_budget)
        convert(place / "d", place / "e.safetensors", memory_budget=memory_budget)
        assert same(load_file(place / "e.safetensors"), tensors)


def test_a_region_is_compared_only_with_parts_that_it_touches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part with every region took minutes for 3,500 of each."""
    values = torch.rand(6, 5, 4)
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", target_format="dcp", memory_budget=1)
    compared = []
    plain = Box.intersect
    monkeypatch.setattr(Box, "intersect", lambda *boxes: compared.append(0) or plain(*boxes))
    convert(tmp_path / "b", tmp_path / "c", memory_budget=1)
    assert same(tensors_of(tmp_path / "c"), {"w": values})
    assert len(compared) < 10 * values.numel()


# -- plain tensors among the common values ---------------------------------------------------------


def plain_state() -> dict[str, Any]:
    """As a program of one process saves it, without ``shard()``."""
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3).bfloat16(), "n": torch.tensor(7)},
        "optim": {
            "state": {0: {"exp_avg": torch.ones(3), "lr": 0.5}, 1: {"exp_avg": torch.zeros(3)}},
            "groups": [{"params": [0, 1]}],
        },
        "mixed": [torch.ones(2).requires_grad_(), "text", {"c": torch.arange(8).reshape(4, 2).T}],
        "pair": (torch.ones(1), 2),
        "step": 3,
    }


PLAIN = {
    "model.w": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "model.n": torch.tensor(7),
    "optim.state.0.exp_avg": torch.ones(3),
    "optim.state.1.exp_avg": torch.zeros(3),
    "mixed.0": torch.ones(2),
    "mixed.2.c": torch.arange(8).reshape(4, 2).T,
}


def test_plain_tensors_are_written_to_safetensors(tmp_path: Path) -> None:
    shardstore.save(plain_state(), tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "m.safetensors", memory_budget=30)
    assert (done.tensors, done.verified) == (len(PLAIN), True)
    assert same(load_file(tmp_path / "m.safetensors"), PLAIN)
    hf.export(tmp_path / "c", tmp_path / "exported")
    assert same(load_file(tmp_path / "exported" / "model.safetensors"), PLAIN)

    convert(tmp_path / "m.safetensors", tmp_path / "back")
    wanted = plain_state()
    wanted |= {"step": 0, "pair": None}
    wanted["optim"]["state"][0]["lr"] = wanted["mixed"][1] = None
    for tensor in (wanted["model"]["w"], wanted["mixed"][2]["c"]):
        tensor.zero_()
    found: Any = shardstore.load(wanted, tmp_path / "back")
    assert not shardstore.dict_utils.diff(found, plain_state())[2]
    assert found["mixed"][1] == "text"
    assert found["optim"]["state"][0]["lr"] == 0.5


def test_values_and_plain_tensors_are_written_as_dcp_saves_them(tmp_path: Path) -> None:
    shardstore.save(plain_state(), tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "converted", target_format="dcp", memory_budget=30)
    dcp.save(plain_state(), checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    places = [str(tmp_path / name) for name in ("converted", "saved")]
    found, wanted = (dcp.FileSystemReader(place).read_metadata() for place in places)
    assert found.planner_data == wanted.planner_data
    kinds = [{k: type(v) for k, v in one.state_dict_metadata.items()} for one in (found, wanted)]
    assert kinds[0] == kinds[1]
    loaded: dict[str, Any] = {"optim": {"state": {0: {"exp_avg": torch.zeros(3)}}}, "step": 0}
    dcp.load(loaded, checkpoint_id=places[0], no_dist=True)
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], torch.ones(3))
    assert loaded["step"] == 3
    state = {"a": {"b": 2}, "x": ShardedTensor.from_rank_offsets("a.b", torch.zeros(3))}
    shardstore.save(state, tmp_path / "twice")
    with pytest.raises(KeyNameError, match=r"'a\.b'"):
        convert(tmp_path / "twice", tmp_path / "n", target_format="dcp")


def test_plain_tensors_that_cannot_be_written_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shardstore.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, tmp_path / "sparse")
    convert(tmp_path / "sparse", tmp_path / "m.safetensors")
    assert same(load_file(tmp_path / "m.safetensors"), {"w": torch.ones(2)})
    assert "1 value(s) without a JSON form are left out: s (it is a tensor" in caplog.text
    state = {"o": ShardedObject("rng", torch.ones(9), (1,), (0,)), "w": torch.ones(2)}
    shardstore.save(state, tmp_path / "object")
    convert(tmp_path / "object", tmp_path / "o.safetensors")
    assert same(load_file(tmp_path / "o.safetensors"), {"w": torch.ones(2)})
    assert "are left out: rng/shard_0_1 (it is a tensor" in caplog.text
    state = {"a": {"b": torch.ones(2)}, "x": ShardedTensor.from_rank_offsets("a.b", torch.zeros(3))}
    shardstore.save(state, tmp_path / "twice")
    with pytest.raises(KeyNameError, match=r"'a\.b'"):
        convert(tmp_path / "twice", tmp_path / "n.safetensors")


# -- budget, progress, resumption ------------------------------------------------------------------


@pytest.mark.parametrize("target_format", ["shardstore", "safetensors", "dcp"])
def test_the_budget_is_kept(tmp_path: Path, target_format: str) -> None:
    mib = 2**20
    big = torch.arange(16 * mib, dtype=torch.float32).reshape(-1, 1024)
    save_file({"w": big, "v": big[:4096].clone()}, tmp_path / "m.safetensors")
    del big
    budget = 16 * mib
    reports: list[Progress] = []
    tracemalloc.start()
    try:
        convert(
            tmp_path / "m.safetensors",
            tmp_path / "c",
            target_format=target_format,
            memory_budget=budget,
            progress=reports.append,
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * budget
    assert len(reports) >= 8
    for stage in ("convert", "verify"):
        done = [report.bytes_done for report in reports if report.operation == stage]
        assert done == sorted(done)
        assert done[-1] == reports[-1].bytes_total == 80 * mib


@pytest.mark.parametrize(
    ("source", "target_format"),
    [
        ("m.safetensors", "shardstore"),
        ("m.safetensors", "safetensors"),
        ("m.safetensors", "dcp"),
        ("plain tensors", "safetensors"),
    ],
)
def test_a_killed_conversion_goes_on(tmp_path: Path, source: str, target_format: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.rand(200, 200, generator=generator) for i in range(8)}
    if source == "plain tensors":
        shardstore.save(dict(tensors), tmp_path / source)
    else:
        save_file(tensors, tmp_path / source)
    arguments = [str(tmp_path / source), str(tmp_path / "c"), target_format]
    assert killed_conversion(*arguments, DEFAULT_FILE_BYTES) == 9
    assert not (tmp_path / "c").exists()
    # The last document of the journal was cut short, and something was half written.
    journal = max((tmp_path / ".c.convert.journal").iterdir())
    journal.write_bytes(journal.read_bytes()[:-3])
    done = convert(*arguments[:2], target_format=target_format, memory_budget=200_000)
    assert 0 < done.resumed_bytes < done.total_bytes
    assert {p.name for p in tmp_path.iterdir()} == {"c", source}
    if target_format != "shardstore":
        convert(tmp_path / "c", tmp_path / "d")
    assert same(tensors_of(tmp_path / ("c" if target_format == "shardstore" else "d")), tensors)


def test_another_source_starts_anew(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(1000)}, tmp_path / "m.safetensors")
    arguments = [str(tmp_path / "m.safetensors"), str(tmp_path / "c"), "shardstore"]

    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(*arguments[:2], progress=stop)
    save_file({"t": torch.ones(1000), "u": torch.ones(3)}, tmp_path / "m.safetensors")
    done = convert(*arguments[:2])
    assert done.resumed_bytes == 0
    assert tensors_of(tmp_path / "c")["t"].sum() == 1000


def test_a_work_folder_that_was_changed_is_found_out(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.rand(100) for i in range(4)}
    save_file(tensors, tmp_path / "m.safetensors")

    def stop(progress: Progress) -> None:
        if progress.operation == "verify":
            raise KeyboardInterrupt

    def run(**options: Any) -> None:
        convert(tmp_path / "m.safetensors", tmp_path / "c.safetensors", **options)

    with pytest.raises(KeyboardInterrupt):
        run(progress=stop)
    work = tmp_path / ".c.safetensors.convert" / "c.safetensors"
    data = bytearray(work.read_bytes())
    data[-1] ^= 1
    work.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="resume=False"):
        run()
    assert not (tmp_path / "c.safetensors").exists()
    run(resume=False)
    assert same(load_file(tmp_path / "c.safetensors"), tensors)


# -- wrong input -----------------------------------------------------------------------------------


def test_wrong_places_and_formats(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for place in ("nothing", "absent", "absent.safetensors"):
        with pytest.raises(NotACheckpointError, match=place):
            convert(tmp_path / place, tmp_path / "c")
    save_file({"t": torch.zeros(3)}, tmp_path / "m.safetensors")
    for options in ({"source_format": "npz"}, {"target_format": "npz"}, {"memory_budget": 0}):
        with pytest.raises(CheckpointingException, match=next(iter(options))):
            convert(tmp_path / "m.safetensors", tmp_path / "c", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()
    for name in ("model.pt", "pytorch_model.bin"):  # not a folder where a file was meant
        with pytest.raises(CheckpointingException, match=rf"{name}.*target_format="):
            convert(tmp_path / "m.safetensors", tmp_path / name)
    convert(tmp_path / "m.safetensors", tmp_path / "last.pt", target_format="shardstore")
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "m.safetensors", "nothing"]


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(3)}, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "c")
    save_file({"t": torch.ones(3)}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        convert(tmp_path / "m.safetensors", tmp_path / "c")
    convert(tmp_path / "m.safetensors", tmp_path / "c", overwrite=True)
    assert tensors_of(tmp_path / "c")["t"].tolist() == [1, 1, 1]
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert sorted(os.listdir(tmp_path)) == before  # no work was begun
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "c", tmp_path / "empty", target_format="dcp")


def file_of(header: object, size: int) -> bytes:
    """A safetensors file with any header, and zeros as the tensors' bytes."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


def floats(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


FILES = {
    "ordered": file_of({"a": floats(0, 8), "b": floats(8, 16)}, 16),
    "not ordered": file_of({"b": floats(8, 16), "a": floats(0, 8)}, 16),
    "empty tensors": file_of({"a": floats(0, 0), "b": floats(0, 8), "c": floats(8, 8)}, 8),
    "no tensors": file_of({}, 0),
    "null as metadata": file_of({"__metadata__": None, "a": floats(0, 8)}, 8),
    "metadata": file_of({"__metadata__": {"who": "me"}, "a": floats(0, 8)}, 8),
    "a list as metadata": file_of({"__metadata__": [], "a": floats(0, 8)}, 8),
    "a number in the metadata": file_of({"__metadata__": {"a": 1}, "a": floats(0, 8)}, 8),
    "null in the metadata": file_of({"__metadata__": {"a": None}, "a": floats(0, 8)}, 8),
    "bytes after the tensors": file_of({"a": floats(0, 8)}, 12),
    "bytes and no tensors": file_of({}, 4),
    "bytes missing": file_of({"a": floats(0, 8), "b": floats(8, 16)}, 12),
    "tensors that overlap": file_of({"a": floats(0, 8), "b": floats(4, 12)}, 12),
    "the same bytes twice": file_of({"a": floats(0, 8), "b": floats(0, 8)}, 8),
    "a gap": file_of({"a": floats(0, 8), "b": floats(12, 20)}, 20),
    "a gap at the beginning": file_of({"a": floats(4, 12)}, 12),
    "an empty tensor inside of another": file_of({"a": floats(0, 8), "b": floats(4, 4)}, 8),
    "an end before the beginning": file_of({"a": {**floats(0, 8), "data_offsets": [8, 0]}}, 8),
    "fewer bytes than the shape": file_of({"a": {**floats(0, 8), "data_offsets": [0, 4]}}, 8),
    "a negative shape": file_of({"a": {**floats(0, -8), "data_offsets": [0, -8]}}, 8),
    "a negative offset": file_of({"a": {**floats(0, 8), "data_offsets": [-8, 0]}}, 8),
    "no data type": file_of({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "a list": file_of(["a"], 8),
    **{f"cut after {n} bytes": file_of({"a": floats(0, 1200)}, 1200)[:n] for n in (0, 4, 20, 100)},
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_accepted_and_refused_as_by_safetensors(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(FILES[name])
    try:
        expected = load_file(path)
    except SafetensorError:
        with pytest.raises(DamagedCheckpointError, match=r"m\.safetensors"):
            convert(path, tmp_path / "c")
        assert os.listdir(tmp_path) == ["m.safetensors"]
        return
    convert(path, tmp_path / "c")
    assert same(tensors_of(tmp_path / "c"), expected)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"notes": {"long": "x" * 20_000, "short": "x" * 10_000}}, r"value of 'notes\.long'"),
        ({"rng": ShardedObject("rng", b"x" * 20_000, (1,), (0,))}, r"value of 'rng/shard_0_1'"),
        ({f"tensor {i}": torch.ones(1) for i in range(500)}, r"500 tensors"),
    ],
)
def test_a_header_that_nobody_reads_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], named: str
) -> None:
    """The library reads headers of up to 100 MB."""
    assert files.MAX_HEADER_BYTES == 100_000_000
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 20_000)
    shardstore.save(shardstore.shard(state), tmp_path / "c")
    with pytest.raises(ArgumentError, match=f"more than the 20000.*{named}"):
        convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["c"]


def test_tensors_that_an_index_leaves_out_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m").mkdir()
    save_file({"a": torch.ones(2), "x": torch.ones(3)}, tmp_path / "m" / "1.safetensors")
    save_file({"b": torch.ones(4), "a": torch.zeros(2)}, tmp_path / "m" / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    for target in ("b", "c"):
        caplog.clear()
        convert(tmp_path / "m", tmp_path / target)
        assert same(tensors_of(tmp_path / target), {"a": torch.ones(2), "b": torch.ones(4)})
        (text,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert re.search(r"/m: the index leaves out 1 tensor.*'x'", text)
        assert "'a'" not in text


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_of_other_programs_is_converted(tmp_path: Path, zarr_format: Any) -> None:
    group = zarr.create_group(tmp_path / "z", zarr_format=zarr_format, attributes={"title": "t"})
    array = group.create_array("a/w", shape=(6,), chunks=(2,), dtype="f4", fill_value=9)
    array[:2] = 1
    with pytest.raises(NotACheckpointError, match=r"Zarr group of another.*shardstore convert"):
        shardstore.load({}, tmp_path / "z")
    assert convert(tmp_path / "z", tmp_path / "c").source_format == "zarr"
    assert tensors_of(tmp_path / "c")["a/w"].tolist() == [1, 1, 9, 9, 9, 9]
    assert shardstore.open(tmp_path / "c").attrs["title"] == "t"
    convert(tmp_path / "z" / "a" / "w", tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["w"].tolist() == [1, 1, 9, 9, 9, 9]


@pytest.mark.parametrize("target", ["c", "m.safetensors"])
def test_arrays_of_another_program_that_nothing_reads_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    group = zarr.create_group(tmp_path / "z")
    group.create_array("when", data=np.zeros(3, "datetime64[s]"))
    group.create_array("w", data=np.ones(4, "f4"))
    convert(tmp_path / "z", tmp_path / target)
    (text,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "1 tensor(s), which are not converted: 'when'" in text


def test_a_type_that_safetensors_lacks(tmp_path: Path) -> None:
    shardstore.save(shardstore.shard({"z": torch.zeros(3, dtype=torch.complex128)}), tmp_path / "c")
    with pytest.raises(DTypeMismatchError, match="'z'"):
        convert(tmp_path / "c", tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["c"]


def test_a_bar_is_drawn_when_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_file({"w": torch.rand(100, 100)}, tmp_path / "m.safetensors")
    done = convert(tmp_path / "m.safetensors", tmp_path / "step-7", progress="bar")
    out, err = capfd.readouterr()
    assert (out, done.verified) == ("", True)
    assert [line.split(" done")[0].strip() for line in err.splitlines()] == [
        "convert step-7",
        "verify step-7",
    ]


def test_a_bar_ends_where_the_conversion_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arrays = {key: ShardedTensor.from_rank_offsets(key, torch.rand(64, 64)) for key in ("a", "b")}
    shardstore.save(arrays, tmp_path / "source")
    chunk = tmp_path / "source/b/c.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-9] + b"?" * 9)
    with pytest.raises(DamagedCheckpointError):
        convert(tmp_path / "source", tmp_path / "t", memory_budget=2 * 64 * 64 * 4, progress="bar")
    assert "convert t failed" in capfd.readouterr().err
