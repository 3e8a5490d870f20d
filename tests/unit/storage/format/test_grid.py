"""The chunk grid: no chunk straddles two shards, sizes near the target, the same on every rank."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import AccessPatternError
from shardstore.storage.format.grid import (
    Box,
    Grid,
    block_bytes,
    chunk_shape_for,
    cut_gcd,
    flat_range_boxes,
    inner_blocks,
    plan_grid,
    shard_edges,
)
from tests.helpers.processes import run_to_end

MIB = 1024 * 1024


@st.composite
def planned(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int, bool]:
    """Global shape, shard edges, item size, target, leading_only."""
    shape = tuple(draw(st.lists(st.integers(0, 5000), max_size=4)))
    fragments = tuple(draw(st.integers(1, 9)) for _ in shape)
    itemsize = draw(st.sampled_from((1, 2, 4, 8, 16)))
    target = draw(st.integers(1, 64 * MIB))
    return shape, shard_edges(shape, fragments), itemsize, target, draw(st.booleans())


@given(planned())
def test_no_chunk_straddles_two_shards(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int, bool],
) -> None:
    shape, edges, itemsize, target, leading = case
    grid = plan_grid(shape, edges, itemsize, target, leading_only=leading)
    assert grid.shape == shape
    for n, edge, chunk in zip(shape, edges, grid.chunk_shape, strict=True):
        assert 1 <= chunk <= max(1, edge)
        # Either there is one shard along the axis, or its edge is a whole number of chunks.
        assert edge >= n or edge % chunk == 0


@given(planned())
def test_chunks_are_near_the_target(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int, bool],
) -> None:
    shape, _, itemsize, target, leading = case
    # Unsharded arrays can be cut anywhere: never above the target, unless one element is.
    edges = tuple(max(1, n) for n in shape)
    chunk = plan_grid(shape, edges, itemsize, target, leading_only=leading).chunk_shape
    size = math.prod(chunk) * itemsize
    assert size <= max(target, itemsize)
    if leading:
        whole = math.prod(edges) * itemsize
        row = whole // edges[0] if edges else whole
        # Cut no finer than needed: half of the target, or all there is, as far as rows allow.
        assert size == whole or 2 * size >= target - row or row > target


@pytest.mark.parametrize("edge", [2**25, 3 * 2**24, 5 * 7 * 11 * 13 * 17 * 19 * 9])
@pytest.mark.parametrize("target", [MIB, 32 * MIB])
def test_sharded_chunks_are_within_four_times_the_target(edge: int, target: int) -> None:
    (chunk,) = plan_grid((4 * edge,), (edge,), 4, target).chunk_shape
    assert edge % chunk == 0
    assert target / 4 <= chunk * 4 <= target * 4


@given(planned())
def test_leading_only_chunks_are_one_range_of_the_flattened_shard(
    case: tuple[tuple[int, ...], tuple[int, ...], int, int, bool],
) -> None:
    shape, edges, itemsize, target, _ = case
    chunk = plan_grid(shape, edges, itemsize, target, leading_only=True).chunk_shape
    edges = tuple(max(1, min(e, n)) for e, n in zip(edges, shape, strict=True))
    first_long = next((i for i, c in enumerate(chunk) if c != 1), len(chunk))
    assert chunk[first_long + 1 :] == edges[first_long + 1 :]


def test_an_inner_sharding_is_cut_further_along_its_axis() -> None:
    """A reader of twice as many shards then reads no chunk that another one reads too."""
    grid = plan_grid((8192, 8192), (8192, 2048), 2)
    assert 2048 % grid.chunk_shape[1] == 0
    assert grid.chunk_shape[1] in (512, 1024)
    assert plan_grid((8192, 8192), (8192, 2048), 2, leading_only=True).chunk_shape[1] == 2048


@pytest.mark.parametrize(
    ("edges", "cut", "target", "leading_only", "chunk"),
    [
        ((12, 5), (True, False), 25, False, (4, 5)),  # the next smaller divisor
        ((202, 5), (True, False), 250, False, (101, 2)),  # the next larger one, which is nearer
        ((202, 5), (True, False), 100, False, (202, 1)),  # no divisor is near: the next axis is cut
        ((202, 5), (True, False), 100, True, (2, 5)),  # which flattened shards do not allow
        ((101, 5), (True, False), 100, True, (101, 5)),  # nor do they have chunks of single rows
        ((6, 202), (True, False), 120, True, (1, 101)),
        ((64, 1 << 14), (False, True), 1 << 40, False, (64, 1 << 12)),  # four to an inner shard
        ((64, 1 << 14), (False, True), 1 << 40, True, (64, 1 << 14)),
        ((1 << 16, 256), (False, True), 1 << 40, False, (1 << 16, 128)),  # two, for runs of 128 B
        ((32, 1 << 14), (False, True), 1 << 40, False, (32, 1 << 13)),  # two, for 256 KiB a chunk
        ((16, 1 << 14), (False, True), 1 << 40, False, (16, 1 << 14)),
        ((1, 1 << 20), (True, True), 1 << 40, False, (1, 1 << 20)),  # which has no outer axis
    ],
)
def test_a_shard_is_always_cut_in_the_same_way(
    edges: tuple[int, ...],
    cut: tuple[bool, ...],
    target: int,
    leading_only: bool,
    chunk: tuple[int, ...],
) -> None:
    """Other chunks would be no copies of those of a base that an earlier version saved."""
    assert chunk_shape_for(edges, cut, 1, target, leading_only) == chunk


def test_small_tensors_are_one_chunk_a_shard() -> None:
    assert plan_grid((1000, 30), (250, 30), 4).chunk_shape == (250, 30)
    assert plan_grid((), (), 8).chunk_shape == ()
    assert plan_grid((), (), 8).size == 1
    assert plan_grid((0, 5), (1, 5), 4) == Grid((0, 5), (1, 5))
    assert plan_grid((0, 5), (1, 5), 4).size == 0


def test_every_process_plans_the_same() -> None:
    script = (
        "from shardstore.storage.format.grid import plan_grid\n"
        "print([plan_grid((n * 17, 4096), (n, 4096 // (1 + n % 3)), 2, 1 << 20 + n % 4)"
        ".chunk_shape for n in range(1, 400)])"
    )
    outputs = {
        run_to_end(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PATH": ""}, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("(") == 399


def test_planning_many_tensors_of_few_kinds_is_done_once_a_kind() -> None:
    chunk_shape_for.cache_clear()
    for n in range(20_000):
        plan_grid((4096 + n % 50, 4096), (1024 + n % 7, 4096), 2)
    assert chunk_shape_for.cache_info().misses == 7
    # An edge with no divisor but itself, for which looking at every number would take minutes.
    assert plan_grid((10**12 + 39 * 4,), (10**12 + 39,), 4).chunk_shape == (10**12 + 39,)


@given(st.data())
def test_cut_gcd_cells_are_crossed_by_no_shard(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    shards = [Box((), ())]
    for axis in cuts:
        shards = [
            Box((*box.offset, a), (*box.shape, b - a)) for box in shards for a, b in pairwise(axis)
        ]
    cells = cut_gcd(shape, shards)
    for cell, axis, n in zip(cells, cuts, shape, strict=True):
        inner = [c for c in axis if 0 < c < n]
        assert cell == (math.gcd(*inner) if inner else n)


@given(st.data())
def test_flat_ranges_are_exact(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    boxes = flat_range_boxes(shape, start, stop)
    numbers = np.arange(total).reshape(shape)
    found = [n for box in boxes for n in numbers[box.slices].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.size for box in boxes)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 13), (5, 4)])
def test_flat_ranges_outside_are_refused(start: int, stop: int) -> None:
    with pytest.raises(AccessPatternError, match="12 elements"):
        flat_range_boxes((3, 4), start, stop)


@given(st.data())
def test_overlapping_boxes_and_numbers(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    grid = Grid(shape, tuple(data.draw(st.integers(1, n + 2)) for n in shape))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    region = Box(
        offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    )
    owner = np.zeros(shape, int)
    for linear in range(grid.size):
        index = grid.index_at(linear)
        assert grid.linear(index) == linear
        owner[grid.box(index).slices] += 1 + linear
    # Each element is in one chunk: the numbers add up to the position of its chunk.
    wanted = sorted({int(n) - 1 for n in owner[region.slices].reshape(-1)})
    assert [grid.linear(i) for i in grid.overlapping(region)] == wanted
    covered = sum(grid.box(i).size for i in grid.overlapping(region))
    assert grid.is_aligned(region) == (covered == region.size)
    for index in grid.overlapping(region):
        common = grid.box(index).intersect(region)
        assert common.relative_to(offset).size == common.size > 0


def test_an_empty_region_overlaps_nothing() -> None:
    grid = Grid((4, 4), (2, 2))
    assert list(grid.overlapping(Box((1, 1), (0, 2)))) == []
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None


@given(st.integers(1, 10**12))
def test_blocks_are_few_and_not_tiny(size: int) -> None:
    block = block_bytes(size)
    assert block >= 4096
    assert block & (block - 1) == 0
    assert inner_blocks(size) <= 31
    assert inner_blocks(size) == len(range(block, size, block))
    assert block == 4096 or inner_blocks(size) >= 16
