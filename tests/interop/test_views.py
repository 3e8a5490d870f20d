"""Of a view of a large tensor, every format stores the view alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.convert import convert
from shardstore.dcp import StorageWriter
from shardstore.distributed.coordinator import Ranks
from shardstore.saving.plain import PlainValues
from shardstore.validation import comparable, compare_common, pickled
from tests.helpers.nested import same

pytestmark = pytest.mark.filterwarnings("ignore")

BIG = 1_000_000
MOST_BYTES = 64 * 1024


def state(sharded: bool = True) -> dict[str, Any]:
    base = torch.arange(float(BIG))
    values = {
        "view": base[500:600],
        "in a tuple": (1, base[7:9]),
        "step": base.view(1000, -1)[3:5, :4],
    }
    if not sharded:
        return values
    return {
        "w": ShardedTensor.from_rank_offsets("w", base[:100]),
        "object": ShardedObject("o", {"tensor": base[3:5]}, (1,), (0,)),
        **values,
    }


def plain(loaded: Any) -> Any:
    """The expected result of a load."""
    if isinstance(loaded, ShardedTensor):
        return loaded.data
    if isinstance(loaded, ShardedObject):
        return plain(loaded.data)
    return {k: plain(v) for k, v in loaded.items()} if isinstance(loaded, dict) else loaded


SAVES: dict[str, tuple[Any, ...]] = {
    "zarr 2": (shardstore.save, ("zarr", 2)),
    "zarr 1": (shardstore.save, ("zarr", 1)),
    "zarr 2, later": (shardstore.async_save, ("zarr", 2)),
    "torch_dist": (shardstore.save, ("torch_dist", 1)),
    "torch_dist, later": (shardstore.async_save, ("torch_dist", 1)),
    "torch_dist, common too": (shardstore.save, ("torch_dist", 1), ("torch_dist", 1)),
}


def bytes_below(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


@pytest.mark.parametrize("how", SAVES)
def test_every_strategy_writes_the_bytes_of_a_view_alone(tmp_path: Path, how: str) -> None:
    function, *strategies = SAVES[how]
    if (handle := function(state(), tmp_path / "c", *strategies)) is not None:
        handle.result()
    assert bytes_below(tmp_path / "c") < MOST_BYTES
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(100)),
        "object": ShardedObject("o", None, (1,), (0,)),
    }
    assert same(shardstore.load(wanted, tmp_path / "c"), plain(state()))


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_the_writer_for_dcp_writes_the_bytes_of_a_view_alone(
    tmp_path: Path, allow_pickle: bool
) -> None:
    values = state(sharded=False)
    if allow_pickle:
        indices = torch.zeros(1, 1, dtype=torch.int64)
        part = torch.arange(float(BIG))[3:4]
        values["no JSON form"] = (torch.sparse_coo_tensor(indices, part, (3,)),)
    writer = StorageWriter(tmp_path / "c", allow_pickle=allow_pickle)
    dcp.save(values, storage_writer=writer, no_dist=True)
    assert bytes_below(tmp_path / "c") < MOST_BYTES
    assert same(shardstore.load_plain_tensors(tmp_path / "c")["view"], values["view"])


@pytest.mark.parametrize("target_format", ["dcp", "megatron", "shardstore"])
def test_conversions_write_the_bytes_of_a_view_alone(tmp_path: Path, target_format: str) -> None:
    shardstore.save(state(), tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", target_format=target_format)
    assert bytes_below(tmp_path / "b") < MOST_BYTES


def test_ranks_compare_the_bytes_of_a_view_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Of the common values of rank 0, which the other ranks receive."""
    common = state(sharded=False)
    sent = pickled(comparable(common))
    assert len(sent) < MOST_BYTES
    compare_common({**common, "step": 1}, sent, Ranks(rank=1, members=range(2)))
    assert "step" in caplog.text
    assert "view" not in caplog.text
    own = PlainValues(common, {}, common, has_shards=False)
    assert len(own.differing({})) < MOST_BYTES
