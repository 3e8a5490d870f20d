"""What a save could not give back is refused on every rank, and nothing is committed."""

from __future__ import annotations

import argparse
import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardstore
from shardstore import CheckpointingException, ShardedObject, ShardedTensor
from tests.helpers.ranks_helper import run_ranks


def _weight(rank: int, world_size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world_size))


def _bad(kind: str, rank: int) -> dict[str, Any]:
    text = np.array(["a"])
    empty = ShardedTensor.from_rank_offsets_flat(
        "e", torch.ones(0), (4,), replica_id=rank, flattened_range=slice(0, 0)
    )
    part = ShardedObject("part", text if rank else 1, (2,), (rank,))
    average = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    held = ShardedObject("held", argparse.Namespace(ema=average), (2,), (rank,))
    return {
        "common": {"at": [{"bad": text if rank == 0 else 1}]},
        "object of rank 1": {"at": part},
        "tuple of rank 1": {"at": (_weight(rank, 2),) if rank else 1},
        "empty range": {"at": empty},
        "sharded in a namespace": {"at": argparse.Namespace(ema=average)},
        "sharded in a deque": {"at": [collections.deque([average])]},
        "sharded in an object": {"at": held},
    }[kind]


NAMED = {
    "common": ("at.0.bad", "numpy.ndarray"),
    "object of rank 1": ("part/shard_1_2", "numpy.ndarray"),
    "tuple of rank 1": ("'at'", "tuple"),
    "empty range": ("'e'", "empty range"),
    "sharded in a namespace": ("'at'", "argparse.Namespace", "DTensor"),
    "sharded in a deque": ("'at.0'", "deque", "DTensor"),
    "sharded in an object": ("'held/shard_", "argparse.Namespace", "DTensor"),
}


def _save(rank: int, world_size: int, place: str) -> list[str]:
    said = []
    for later, kind in itertools.product((False, True), NAMED):
        state = {"w": _weight(rank, world_size), **_bad(kind, rank)}
        try:
            if later:
                shardstore.async_save(state, place).result()
            else:
                shardstore.save(state, place)
            said.append("saved")
        except CheckpointingException as error:
            said.append(str(error))
    return said


def test_every_rank_is_told(tmp_path: Path) -> None:
    """At once and in the background."""
    for texts in run_ranks(_save, 2, str(tmp_path / "c")):
        for text, words in zip(texts, [*NAMED.values()] * 2, strict=True):
            for word in words:
                assert word in text, text
    assert not (tmp_path / "c").exists()


def _save_copies(rank: int, world_size: int, place: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = DTensor.from_local(torch.arange(2.0), mesh, [Replicate()])
    shardstore.save({"w": _weight(rank, world_size), "at": argparse.Namespace(ema=whole)}, place)
    loaded = shardstore.load({}, place)
    assert torch.equal(loaded["at"].ema.to_local(), torch.arange(2.0))


def test_a_whole_dtensor_in_a_value_is_saved(tmp_path: Path) -> None:
    """Any rank has all of it, unlike a sharded one."""
    run_ranks(_save_copies, 2, str(tmp_path / "c"))


def test_an_empty_range_of_a_tensor_without_elements_is_nothing(tmp_path: Path) -> None:
    empty = ShardedTensor.from_rank_offsets_flat(
        "e", torch.ones(0), (0, 3), flattened_range=slice(0, 0)
    )
    shardstore.save({"e": empty, "n": 1}, tmp_path / "c")
    assert shardstore.load({"e": empty}, tmp_path / "c") == {"n": 1}


def test_an_empty_range_keeps_its_place(tmp_path: Path) -> None:
    """Its key in a dict, and its position in a list: another element does not move there."""

    def part(key: str, start: int, stop: int, *, meta: bool = False) -> ShardedTensor:
        data = torch.arange(float(start), float(stop))
        made = ShardedTensor.from_rank_offsets_flat(
            key, data, (5, 2), flattened_range=slice(start, stop)
        )
        return made.without_data() if meta else made

    def state(meta: bool) -> dict[str, Any]:
        return {
            "d": {"whole": part("a", 0, 10, meta=meta), "none": part("a", 4, 4, meta=meta)},
            "l": [{"w": part("b", 10, 10, meta=meta)}, {"w": part("b", 0, 10, meta=meta)}],
            "tensors": [part("c", 0, 0, meta=meta), part("c", 0, 10, meta=meta)],
        }

    shardstore.save(state(False), tmp_path / "c")
    whole, none = torch.arange(10.0), torch.empty(0)
    for meta in (False, True):
        loaded = shardstore.load(state(meta), tmp_path / "c")
        expected = {
            "d": {"whole": whole, "none": none},
            "l": [{"w": none}, {"w": whole}],
            "tensors": [none, whole],
        }
        torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", [("zarr", 2), ("torch_dist", 1)], ids=str)
def test_content_metadata_is_that_of_the_call(
    tmp_path: Path, backend: tuple[str, int], overlap: bool
) -> None:
    content: dict[str, Any] = {"nested": {"step": 1}, "array": np.ones(2)}
    given = {"nested": {"step": 1}, "array": np.ones(2)}
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    handle = shardstore.async_save(
        state, tmp_path / "c", backend, content_metadata=content, overlap_staging=overlap
    )
    content["nested"]["step"] = 2
    content["array"][:] = 2
    content["later"] = 3
    handle.result()
    loaded = shardstore.load_content_metadata(tmp_path / "c")
    assert np.array_equal(loaded.pop("array"), given.pop("array"))
    assert loaded == given
    attributes = shardstore.open(tmp_path / "c").content_metadata if backend[0] == "zarr" else None
    if attributes is not None:
        assert attributes["nested"] == {"step": 1}
