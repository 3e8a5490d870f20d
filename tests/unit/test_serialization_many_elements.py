"""An array of more elements than 31 bits can count: saved, and read around that place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import shardstore
from shardstore.mapping import ShardedTensor

pytestmark = pytest.mark.long

ROWS, COLUMNS = 2**16 + 3, 2**15
EDGE = 2**31
"""First element of the row at which the count no longer fits."""


def at(start: int, stop: int) -> torch.Tensor:
    """Elements of the flattened array."""
    value = torch.arange(start, stop, dtype=torch.int64)
    return torch.where((value - EDGE).abs() < 2 * COLUMNS, value % 251 + 1, 0).to(torch.uint8)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("many")
    data = torch.zeros(ROWS, COLUMNS, dtype=torch.uint8)  # pages that nobody wrote take no memory
    assert data.numel() > EDGE
    data.view(-1)[EDGE - 3 * COLUMNS :] = at(EDGE - 3 * COLUMNS, data.numel())
    shardstore.save({"w": ShardedTensor.from_rank_offsets("w", data)}, folder / "c")
    yield folder / "c"
    shutil.rmtree(folder)


def test_rows_beyond_31_bits_are_read(place: Path) -> None:
    region = (slice(2**16 - 1, ROWS), slice(5, COLUMNS - 5))
    loaded = shardstore.load_plain_tensors(place, keys=["w"], region=region)
    wanted = at(EDGE - COLUMNS, ROWS * COLUMNS).view(-1, COLUMNS)[:, 5:-5]
    assert torch.equal(loaded["w"], wanted)
    assert wanted.any(dim=1)[:3].all()


def test_a_range_across_31_bits_is_read(place: Path) -> None:
    bounds = slice(EDGE - 100_000, EDGE + 70_001)
    part = ShardedTensor.from_rank_offsets_flat(
        "w", torch.ones(170_001, dtype=torch.uint8), (ROWS, COLUMNS), flattened_range=bounds
    )
    loaded = shardstore.load({"w": part}, place, validate_access_integrity=False)
    assert isinstance(loaded, dict)
    assert torch.equal(loaded["w"], at(bounds.start, bounds.stop))


def test_plain_zarr_reads_it(place: Path) -> None:
    array = zarr.open_group(place, mode="r")["w"]
    assert isinstance(array, zarr.Array)
    assert array.shape == (ROWS, COLUMNS)
    found = np.asarray(array[2**16 - 2 :, 7])
    wanted = at(EDGE - 2 * COLUMNS, ROWS * COLUMNS).view(-1, COLUMNS)[:, 7].numpy()
    assert (found == wanted).all()
