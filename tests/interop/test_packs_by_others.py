"""Packs and constants, read by programs that know nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import torch.distributed.checkpoint as dcp
import xarray
import zarr

import shardstore
from shardstore import ShardedTensor
from shardstore.cli.app import run
from shardstore.dcp import StorageReader, StorageWriter, install
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from testing.s3_servers import S3Server

STATE = {
    **{f"block/{i}": torch.arange(12.0).reshape(3, 4) * i for i in range(1, 30)},
    "half": torch.arange(6).bfloat16(),
    "big": torch.arange(400_000.0),
    "zeros": torch.zeros(5, 5),
    "cut": torch.arange(6000.0).reshape(60, 100),
}


def sharded(state: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in state.items()}


def save(place: str | Path, **options: Any) -> None:
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=8192)
    shardstore.save(sharded(STATE), place, strategy, pack=True, **options)


PACKED = STATE.keys() - {"zeros"}


@pytest.fixture(scope="module", params=[None, "blosc"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packs") / "c"
    save(place, compression=request.param)
    return place


def values(key: str) -> Any:
    return shardstore.storage.format.dtypes.as_numpy(STATE[key])


def test_a_pack_is_a_zarr_hierarchy_for_each_reader(place: Path) -> None:
    packs = sorted((place / ".packs").iterdir())
    found = set()
    for pack in packs:
        group = zarr.open_group(zarr.storage.ZipStore(pack, mode="r"), mode="r")
        dataset = xarray.open_zarr(zarr.storage.ZipStore(pack, mode="r"), consolidated=False)
        for node, array in group.arrays():
            key = str(array.attrs["shardstore"]["key"])
            found.add(key)
            assert np.array_equal(np.asarray(array[...]), values(key))
            assert np.array_equal(np.asarray(dataset[node]), values(key))
            base = {"driver": "file", "path": str(pack)}
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "zip", "base": base, "path": f"{node}/"},
            }
            assert np.array_equal(tensorstore.open(spec).result().read().result(), values(key))
    assert found == PACKED


def test_the_root_lists_no_array_whose_chunks_lie_elsewhere(place: Path) -> None:
    """zarr would read fill values, and say nothing."""
    group = zarr.open_group(place, mode="r")
    assert set(group.array_keys()) == {"zeros"}
    assert np.array_equal(np.asarray(group["zeros"]), values("zeros"))


def test_xarray_takes_no_constant_for_missing_values(tmp_path: Path) -> None:
    state = {"i": torch.full((3,), 7), "z": torch.zeros(2, 2), "b": torch.ones(3, dtype=torch.bool)}
    shardstore.save(sharded(state), tmp_path / "c", constants=True)
    dataset = xarray.open_zarr(tmp_path / "c")
    for key, tensor in state.items():
        assert dataset[key].dtype == tensor.numpy().dtype
        assert dataset[key].values.tolist() == tensor.tolist()


def test_references_show_every_array_at_once(place: Path, tmp_path: Path) -> None:
    file = tmp_path / "references.json"
    assert run(["references", str(place), str(file)]) == 0
    group = zarr.open_group(
        "reference://", mode="r", storage_options={"fo": str(file), "remote_protocol": "file"}
    )
    nodes = {key: meta.node for key, meta in shardstore.open(place).metas.items()}
    assert set(group.array_keys()) == set(nodes.values())
    for key, node in nodes.items():
        assert np.array_equal(np.asarray(group[node]), values(key))


@pytest.mark.parametrize("name", ["c/block.json", "c/big", "there.json"])
def test_references_are_not_written_over_or_into_a_checkpoint(tmp_path: Path, name: str) -> None:
    save(tmp_path / "c")
    (tmp_path / "there.json").write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*"))
    assert run(["references", str(tmp_path / "c"), str(tmp_path / name)]) == 2
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "there.json").read_text() == "mine"


def test_handles_of_packed_arrays_are_those_of_zarr_and_tensorstore(place: Path) -> None:
    opened = shardstore.open(place)
    for key in STATE:
        assert np.array_equal(opened[key][...], values(key))
        assert np.array_equal(np.asarray(opened[key].zarr[...]), values(key))
        assert np.array_equal(opened[key].tensorstore.read().result(), values(key))
    assert np.array_equal(opened["cut"][7:50:3, 99], values("cut")[7:50:3, 99])


def test_the_listing_says_what_is_packed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(place), "--json"]) == 0
    entries = {entry["key"]: entry for entry in json.loads(capsys.readouterr().out)["arrays"]}
    assert {key for key, entry in entries.items() if entry["packs"]} == PACKED
    assert {key for key, entry in entries.items() if entry["constant"]} == {"zeros"}
    assert run(["ls", str(place), "--flat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("half")).count("in a pack") == 1
    assert run(["info", str(place)]) == 0
    assert f"{len(PACKED)} arrays in 1 pack" in capsys.readouterr().out


def test_a_packed_checkpoint_equals_a_plain_one_and_is_converted(tmp_path: Path) -> None:
    save(tmp_path / "packed")
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=8192)
    shardstore.save(sharded(STATE), tmp_path / "plain", strategy)
    assert run(["diff", str(tmp_path / "packed"), str(tmp_path / "plain")]) == 0
    assert run(["convert", str(tmp_path / "packed"), str(tmp_path / "m.safetensors")]) == 0
    assert run(["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "back")]) == 0
    assert run(["diff", "--no-files", str(tmp_path / "packed"), str(tmp_path / "back")]) == 0


def test_zarr_reads_a_pack_in_a_bucket(s3_server: S3Server) -> None:
    bucket = s3_server.new_bucket()
    save(f"s3://{bucket}/c", storage_options=s3_server.storage_options)
    chained = zarr.open_group(
        f"zip::s3://{bucket}/c/.packs/0.0.zip",
        mode="r",
        storage_options={"s3": dict(s3_server.storage_options)},
    )
    assert np.array_equal(np.asarray(chained["block%2F7"]), values("block/7"))
    opened = shardstore.open(f"s3://{bucket}/c", s3_server.storage_options)
    assert np.array_equal(np.asarray(opened["cut"].zarr[...]), values("cut"))
    assert np.array_equal(opened["cut"].tensorstore.read().result(), values("cut"))


@pytest.mark.parametrize("by", ["writer", "install"])
def test_dcp_packs_if_asked_to(tmp_path: Path, by: str) -> None:
    state: dict[str, Any] = {"model": dict(STATE), "step": 7}
    place = tmp_path / "c"
    if by == "writer":
        dcp.save(state, storage_writer=StorageWriter(place, pack=True))
    else:
        with install(pack=True):
            dcp.save(state, checkpoint_id=place)
    assert [path.name for path in (place / ".packs").iterdir()] == ["0.0.zip"]
    empty = {key: torch.zeros_like(value) for key, value in STATE.items()}
    found = {"model": empty, "step": 0}
    dcp.load(found, storage_reader=StorageReader(place))
    assert found["step"] == 7
    assert all(torch.equal(empty[key], value) for key, value in STATE.items())
