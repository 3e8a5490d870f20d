"""Zarr v2 checkpoints of Megatron-Core: the golden ones are read, and ours are like them."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch

import shardstore
from shardstore import core, mapping, serialization
from shardstore.errors import ChunkMissingError
from tests.golden import states
from tests.helpers.golden_ranks import WHOLE, save, wrong

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "megatron-core-0.15.3-zarr"
GOLDEN_NAMES = [str(layout) for layout in states.GOLDEN]
KEYS = {**states.MODEL, **states.OPTIMIZER}
OBJECT_KEYS = {
    f"objects.{kind}/shard_{i}_2" for kind in ("rng", "fp8_meta", "amax") for i in range(2)
}


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# The golden checkpoints


@pytest.mark.parametrize("written", GOLDEN_NAMES)
def test_golden_read_whole_and_left_as_it_was(written: str) -> None:
    before = digest(GOLDEN / written)
    assert wrong(WHOLE, GOLDEN / written) == []
    assert digest(GOLDEN / written) == before


@pytest.mark.parametrize("read", ["tp2dp2", "tp1dp4"])
def test_golden_read_by_ranks(read: str) -> None:
    places = [GOLDEN / written for written in GOLDEN_NAMES]
    assert wrong(states.Layout.parse(read), *places) == []


@pytest.mark.parametrize("written", GOLDEN_NAMES)
def test_golden_metadata(written: str) -> None:
    path = str(GOLDEN / written)
    assert shardstore.check_is_distributed_checkpoint(path)
    config = core.maybe_load_config(path)
    assert (config.sharded_backend, config.sharded_backend_version) == ("zarr", 1)
    tensors = shardstore.load_tensors_metadata(path)
    assert {key: (t.global_shape, t.dtype) for key, t in tensors.items()} == {
        key: (spec.global_shape, spec.dtype) for key, spec in KEYS.items()
    }  # and no folder of lock files among them
    everything = serialization.load_sharded_metadata(path)
    assert set(everything) == set(KEYS) | OBJECT_KEYS
    common = shardstore.load_common_state_dict(path)
    assert (
        states.differences(common, {**states.COMMON, "content_metadata": states.CONTENT_METADATA})
        == []
    )
    assert shardstore.load_content_metadata(path) == states.CONTENT_METADATA


@pytest.mark.parametrize("written", GOLDEN_NAMES)
def test_golden_plain_tensors(written: str) -> None:
    """Whole tensors by key, beside the common values: as Megatron-Core gives them."""
    loaded = shardstore.load_plain_tensors(str(GOLDEN / written))
    want = {key: states.values(key) for key in KEYS}
    want |= {**states.COMMON, "content_metadata": states.CONTENT_METADATA}
    assert states.differences(loaded, want) == []


def test_golden_has_nothing_missing_or_unexpected() -> None:
    with torch.serialization.safe_globals([io.BytesIO]):
        _, missing, unexpected = shardstore.load(
            states.build(mapping, WHOLE, 0, empty=True), str(GOLDEN / "tp2dp2"), strict="return_all"
        )
    assert (set(missing), set(unexpected)) == (set(), set())


@pytest.mark.parametrize("rows", [10, 16])
@pytest.mark.parametrize("written", ["tp1dp1", "tp2dp2"])
def test_golden_under_another_shape(written: str, rows: int) -> None:
    """A smaller tensor takes the leading part; a larger one is zero beyond what is stored."""
    key = "embedding.weight"
    request = mapping.ShardedTensor.from_rank_offsets(
        key, torch.full((rows, 6), 7.0), allow_shape_mismatch=True
    )
    got = shardstore.load({"it": request}, str(GOLDEN / written))["it"]
    want = torch.zeros(rows, 6)
    want[: min(rows, 12)] = states.values(key)[:rows]
    assert states.differences(got, want) == []


@pytest.mark.parametrize(
    "chunk", ["embedding.weight/1.0", "optimizer.param.decoder.proj.weight/2.0.1"]
)
def test_a_missing_chunk_is_an_error(tmp_path: Path, chunk: str) -> None:
    shutil.copytree(GOLDEN / "tp2dp2", tmp_path / "damaged")
    (tmp_path / "damaged" / chunk).unlink()
    key = chunk.split("/")[0]
    request = mapping.ShardedTensor.from_rank_offsets(
        key, torch.zeros(KEYS[key].global_shape, dtype=KEYS[key].dtype)
    )
    with pytest.raises(ChunkMissingError, match=key):
        shardstore.load({"it": request}, str(tmp_path / "damaged"))


# What we write in that format


@pytest.mark.parametrize("layout_text", ["tp1dp1", "tp2dp2"])
def test_written_arrays_are_as_those_of_megatron(tmp_path: Path, layout_text: str) -> None:
    """The documents say the same as the golden ones; TensorStore alone reads the same values."""
    save(states.Layout.parse(layout_text), "zarr", tmp_path / "ours")
    for key in KEYS:
        ours = json.loads((tmp_path / "ours" / key / ".zarray").read_text())
        golden = json.loads((GOLDEN / layout_text / key / ".zarray").read_text())
        for field in ("zarr_format", "shape", "dtype", "order", "compressor", "filters"):
            assert ours[field] == golden[field], (key, field)
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/ours/{key}/"}
        stored = ts.open(spec, read=True).result().read().result()
        want = states.values(key).contiguous()
        assert stored.tobytes() == want.flatten().view(torch.uint8).numpy().tobytes(), key
    theirs = json.loads((GOLDEN / layout_text / "metadata.json").read_text())
    assert json.loads((tmp_path / "ours" / "metadata.json").read_text()) == theirs


@pytest.mark.parametrize(("written", "read"), [("tp1dp1", "tp2dp2"), ("tp1dp4", "tp1dp1")])
def test_written_here_and_read_here(tmp_path: Path, written: str, read: str) -> None:
    save(states.Layout.parse(written), "zarr", tmp_path / "ours")
    assert wrong(states.Layout.parse(read), tmp_path / "ours") == []


def test_a_scalar_tensor_is_saved_in_the_format_of_zarr_v2(tmp_path: Path) -> None:
    """Megatron-Core cannot save one there; nothing in the format is against it."""

    def step(value: int) -> dict[str, Any]:
        data = torch.tensor(value)
        return {"step": mapping.ShardedTensor.from_rank_offsets("step", data)}

    shardstore.save(step(41), str(tmp_path / "ours"), sharded_strategy=("zarr", 1))
    loaded = shardstore.load(step(0), str(tmp_path / "ours"))
    assert states.differences(loaded["step"], torch.tensor(41)) == []


def test_the_comparison_sees_one_changed_byte(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "tp1dp1", tmp_path / "changed")
    chunk = tmp_path / "changed" / "final_norm.weight" / "0"
    content = bytearray(chunk.read_bytes())
    content[3] ^= 1
    chunk.write_bytes(content)
    (found,) = wrong(WHOLE, tmp_path / "changed")
    assert "final_norm.weight" in found
