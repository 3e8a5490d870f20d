"""What is drawn of an array: its chunks as rectangles, and its values in bins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstore
from shardstore.cli.pictures import MAX_CELLS, cells, drawn_axes
from shardstore.inspection.opened import StoredArray
from shardstore.inspection.values import histogram, measure
from shardstore.mapping import ShardedTensor
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from shardstore.strategies.zarr import ZarrSaveShardedStrategy


def array_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> ArrayMeta:
    return ArrayMeta("w", "w", Grid(shape, chunk), "float32")


@pytest.mark.parametrize(
    ("shape", "chunk", "axes"),
    [
        ((), (), (None, None)),
        ((9,), (2,), (None, 0)),
        ((9, 4), (9, 4), (0, 1)),
        ((5, 7), (2, 4), (0, 1)),
        ((4, 9, 6), (1, 9, 3), (0, 2)),  # the two with the most chunks, in their order
        ((2, 3, 4), (2, 3, 4), (1, 2)),  # the last two where none has more
        ((8, 2, 6, 6), (8, 1, 1, 6), (1, 2)),
    ],
)
def test_the_axes_that_are_cut_are_drawn(
    shape: tuple[int, ...], chunk: tuple[int, ...], axes: tuple[int | None, int | None]
) -> None:
    array = array_of(shape, chunk)
    assert drawn_axes(array) == axes
    rows, columns = axes
    for index, cell, _ in cells(array, None):
        box = array.grid.box(index)
        down = (0, 1) if rows is None else (box.offset[rows], box.shape[rows])
        across = (0, 1) if columns is None else (box.offset[columns], box.shape[columns])
        assert [*zip(cell.offset, cell.shape, strict=True)] == [down, across]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4).map(
        lambda pairs: (tuple(n for n, _ in pairs), tuple(min(c, n) for n, c in pairs))
    )
)
def test_cells_cover_the_face_that_is_drawn_once(
    cut: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    array = array_of(*cut)
    rows, columns = drawn_axes(array)
    high = 1 if rows is None else array.shape[rows]
    wide = 1 if columns is None else array.shape[columns]
    face = np.zeros((high, wide), int)
    for index, cell, _ in cells(array, None):
        face[cell.slices] += 1
        others = set(range(len(array.shape))) - {rows, columns}
        assert all(index[axis] == 0 for axis in others)
    assert (face == 1).all()


def test_no_more_cells_than_can_be_seen() -> None:
    assert len(cells(array_of((10**5,), (1,)), None)) == MAX_CELLS
    assert len(cells(array_of((3000, 3000), (1, 1)), None)) <= MAX_CELLS
    assert cells(array_of((0, 4), (1, 4)), None) == []


def stored_of(values: torch.Tensor, place: Path) -> StoredArray:
    state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", values)}
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=256)
    shardstore.save(state, place, strategy)
    return shardstore.open(place)["w"]


def binned(values: torch.Tensor, place: Path, bins: int) -> tuple[list[int], list[float]]:
    array = stored_of(values, place)
    counts, edges = histogram(array, measure([array])[0]["w"], bins)
    return counts.tolist(), edges.tolist()


def test_a_histogram_counts_each_finite_value_once(tmp_path: Path) -> None:
    odd = [math.nan, math.inf, -math.inf]
    values = torch.tensor([0.0, 0.9, 1.0, 1.5, 3.99, 4.0, 4.0, *odd])
    counts, edges = binned(values, tmp_path / "a", 4)
    assert (counts, edges) == ([2, 2, 0, 3], [0.0, 1.0, 2.0, 3.0, 4.0])
    # Over many chunks, and in a type that NumPy lacks, as NumPy counts all of it.
    many = torch.randn(41, 37, generator=torch.Generator().manual_seed(1)).bfloat16()
    counts, edges = binned(many, tmp_path / "b", 50)
    flat = many.double().numpy().reshape(-1)
    wanted, wanted_edges = np.histogram(flat, 50)
    assert counts == wanted.tolist()
    assert edges == pytest.approx(wanted_edges.tolist())


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([3.0] * 5, 2.5, 3.5), ([-2.0, -2.0], -2.5, -1.5), ([1e308, -1e308, 0.0], -1e308, 1e308)],
)
def test_a_histogram_of_extreme_values_counts_all(
    tmp_path: Path, values: list[float], low: float, high: float
) -> None:
    counts, edges = binned(torch.tensor(values, dtype=torch.float64), tmp_path / "a", 7)
    assert sum(counts) == len(values)
    assert (edges[0], edges[-1]) == (low, high)


@pytest.mark.parametrize("values", [torch.zeros(0), torch.tensor([math.nan, math.inf])])
def test_a_histogram_without_finite_values_is_empty(tmp_path: Path, values: torch.Tensor) -> None:
    counts, edges = binned(values, tmp_path / "a", 5)
    assert counts == [0] * 5
    assert (edges[0], edges[-1]) == (0.0, 1.0)
