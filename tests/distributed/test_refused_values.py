"""What a save could not give back is refused on every rank, and nothing is committed."""

from __future__ import annotations

import argparse
import collections
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardstore
from shardstore import ShardedObject, ShardedTensor
from tests.helpers.scenarios import raised, remains_of_all

WORLD = 2


def _weight(rank: int, world_size: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, rank, world_size))


def _save_later(*given: Any) -> None:
    shardstore.async_save(*given).result()


def what_cannot_be_given_back_is_refused_on_every_rank(
    rank: int, world_size: int, folder: Path
) -> None:
    """At once and in the background."""
    text = np.array(["a"])
    empty = ShardedTensor.from_rank_offsets_flat(
        "e", torch.ones(0), (4,), replica_id=rank, flattened_range=slice(0, 0)
    )
    part = ShardedObject("part", text if rank else 1, (2,), (rank,))
    mesh = init_device_mesh("cpu", (2,))
    average = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    whole = DTensor.from_local(torch.ones(2), mesh, [Replicate()])  # would have rank 0's place
    held = ShardedObject("held", argparse.Namespace(ema=average), (2,), (rank,))
    cases: list[tuple[Any, tuple[str, ...]]] = [
        ([{"bad": text if rank == 0 else 1}], ("at.0.bad", "numpy.ndarray")),
        (part, ("part/shard_1_2", "numpy.ndarray")),
        ((_weight(rank, 2),) if rank else 1, ("'at'", "tuple")),
        (empty, ("'e'", "empty range")),
        (argparse.Namespace(ema=average), ("'at'", "argparse.Namespace", "DTensor")),
        (argparse.Namespace(ema=whole), ("'at'", "DTensor", "full_tensor()")),
        ([collections.deque([average])], ("'at.0'", "deque", "DTensor")),
        (held, ("'held/shard_", "argparse.Namespace", "DTensor")),
    ]
    for (bad, words), save in itertools.product(cases, (shardstore.save, _save_later)):
        raised(partial(save, {"w": _weight(rank, world_size), "at": bad}, folder / "c"), *words)
    assert remains_of_all(folder) == []


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


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
