"""A region split along the chunk grid: each element once, from its own place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.movers.chunks import FEW_CUTS, RegionRead, chunk_parts


def _check(shape: tuple[int, ...], chunk: tuple[int, ...], region: Box) -> int:
    meta = ArrayMeta("a", "a", Grid(shape, chunk), "int32")
    whole = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int32).reshape(shape)
    order = list(np.ndindex(*meta.grid.counts))
    out = np.full(region.shape, -1, np.int32)
    parts = list(chunk_parts(RegionRead(meta, region, out)))
    for part in parts:
        box = meta.grid.box(part.index)
        stored = whole[(..., *box.slices)]
        assert order[part.number] == part.index
        assert meta.chunk_name(part.index) == ".".join(["a/c", *map(str, part.index)])
        assert (part.out.nbytes == meta.chunk_bytes) == (
            part.within == Box((0,) * len(shape), chunk)
        )
        assert (part.out == -1).all()
        part.out[...] = stored[(..., *part.within.slices)]
    assert (out == whole[(..., *region.slices)]).all()
    return len(parts)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), max_size=3), st.data())
def test_each_element_comes_once(axes: list[tuple[int, int]], data: st.DataObject) -> None:
    offset, extent = [], []
    for n, _ in axes:
        offset.append(data.draw(st.integers(0, n - 1)))
        extent.append(data.draw(st.integers(1, n - offset[-1])))
    region = Box(tuple(offset), tuple(extent))
    shape, chunk = tuple(n for n, _ in axes), tuple(c for _, c in axes)
    assert _check(shape, chunk, region) == _check(shape, chunk, region)


@pytest.mark.parametrize("chunks", [1, 2, FEW_CUTS, FEW_CUTS + 1, 100])
def test_any_number_of_chunks_has_each_element_once(chunks: int) -> None:
    for _ in range(2):
        assert _check((4, 5 * chunks), (4, 5), Box((0, 0), (4, 5 * chunks))) == chunks
        assert _check((4, 5 * chunks), (4, 5), Box((1, 2), (2, 5 * chunks - 3))) == chunks
