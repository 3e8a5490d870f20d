"""Checksums at the ends of blocks, taken while rows are gathered: with the compiled part and
without, the same bytes and the same sums as of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.storage.movers import chunk_bytes as block_sums
from shardstore.storage.movers.checksums import crc32c
from shardstore.storage.movers.chunk_bytes import Sums, pieces, sum_blocks

WAYS = [
    pytest.param(
        True,
        id="compiled",
        marks=pytest.mark.skipif(not block_sums.COMPILED, reason="no compiler at the installation"),
    ),
    pytest.param(False, id="plain"),
]


@pytest.mark.parametrize("compiled", WAYS)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    row=st.integers(1, 5000),
    gaps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    block=st.sampled_from([1, 7, 64, 4096, 65536]),
    position=st.integers(0, 70_000),
    crc=st.integers(0, 2**32 - 1),
    turned=st.booleans(),
)
def test_rows_are_gathered_and_summed_at_the_ends_of_blocks(
    compiled: bool,
    shape: list[int],
    row: int,
    gaps: list[int],
    block: int,
    position: int,
    crc: int,
    turned: bool,
) -> None:
    whole = (*(n * gap for n, gap in zip(shape, gaps, strict=False)), row + 3)
    memory = np.random.default_rng(row).integers(0, 256, whole, np.uint8)
    source = memory[(*(slice(None, None, gap) for gap in gaps[: len(shape)]), slice(2, 2 + row))]
    if turned:
        source = source[::-1]
    flat = source.tobytes()
    target = np.full(len(flat) + 9, 255, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sums, "COMPILED", compiled)
        found = sum_blocks(source, target[:-9].data, block, crc, position)
        dense = sum_blocks(flat, None, block, crc, position)
    assert target[:-9].tobytes() == flat
    assert (target[-9:] == 255).all()
    ends = [n for n in range(1, len(flat) + 1) if (position + n) % block == 0]
    expected = (crc32c(flat, crc), [crc32c(flat[:n], crc) for n in ends[:50]])
    for last, running in (found, dense):
        assert (last, running[:50]) == expected
        assert len(running) == len(ends)


@pytest.mark.parametrize("compiled", WAYS)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    lost=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    first=st.integers(0, 4),
    most=st.sampled_from([None, 1, 100]),
    dtype=st.sampled_from(["u1", "<f4", "<c16"]),
)
def test_a_chunk_comes_in_pieces_with_its_sums(
    compiled: bool,
    rows: int,
    columns: int,
    lost: tuple[int, int],
    first: int,
    most: int | None,
    dtype: str,
) -> None:
    """Whole chunks, columns of a wider shard, and chunks that reach beyond the array."""
    memory = np.random.default_rng(rows).integers(0, 256, (rows, first + columns)).astype(dtype)
    there = memory[: max(1, rows - lost[0]), first : first + max(1, columns - lost[1])]
    chunk = np.zeros((rows, columns), dtype)
    chunk[: there.shape[0], : there.shape[1]] = there
    expected = chunk.tobytes()
    sums = Sums(64)
    found = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_sums, "COMPILED", compiled)
        for piece in pieces(there, chunk.shape, sums, most):
            found += piece
            assert (sums.position, sums.crc) == (len(found), crc32c(found, 0))
    assert found == expected
    assert sums.running == [crc32c(found[:n], 0) for n in range(64, len(found) + 1, 64)]


@pytest.mark.skipif(not block_sums.COMPILED, reason="no compiler at the installation")
def test_the_compiled_part_refuses_what_does_not_fit() -> None:
    from shardstore.storage.movers import _copy_crc

    gaps = np.zeros((4, 4), np.uint8)[:, :3]
    with pytest.raises(ValueError, match="12 bytes do not go into 11"):
        _copy_crc.sum_blocks(gaps, bytearray(11), 4, 0, 0)
    with pytest.raises(ValueError, match="12 bytes do not go into 0"):
        _copy_crc.sum_blocks(gaps, None, 4, 0, 0)
    with pytest.raises(ValueError, match="last axis"):
        _copy_crc.sum_blocks(np.zeros((4, 4), np.uint8)[:, ::2], bytearray(8), 4, 0, 0)
    with pytest.raises(ValueError, match="blocks of 0 bytes"):
        _copy_crc.sum_blocks(gaps, bytearray(12), 0, 0, 0)
