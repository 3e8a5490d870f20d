"""A chunk's bytes in pieces, from arrays of any strides, with checksums at the ends of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.storage.movers import chunk_bytes
from shardstore.storage.movers.chunk_bytes import pieces, whole_chunk
from shardstore.storage.runtime.checksums import Sums, crc32c
from shardstore.storage.runtime.parallel import kept_memory


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    lost=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    first=st.integers(0, 4),
    most=st.sampled_from([1, 100, 1 << 20]),
    scratch=st.sampled_from([16, 100, 4096, 1 << 20]),
    block=st.sampled_from([1, 7, 64, 4096]),
    dtype=st.sampled_from(["u1", "<f4", "<c16"]),
)
def test_a_chunk_comes_in_pieces_with_its_sums(
    rows: int,
    columns: int,
    lost: tuple[int, int],
    first: int,
    most: int,
    scratch: int,
    block: int,
    dtype: str,
) -> None:
    """Whole chunks, columns of a wider shard, and chunks that reach beyond the array."""
    memory = np.random.default_rng(rows).integers(0, 256, (rows, first + columns)).astype(dtype)
    there = memory[: max(1, rows - lost[0]), first : first + max(1, columns - lost[1])]
    chunk = np.zeros((rows, columns), dtype)
    chunk[: there.shape[0], : there.shape[1]] = there
    expected = chunk.tobytes()
    sums = Sums(block)
    found = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_bytes, "SCRATCH_BYTES", scratch)
        for piece in pieces(there, chunk.shape, most):
            sums.add(piece)
            found += piece
            assert (sums.position, sums.crc) == (len(found), crc32c(found, 0))
        kept_memory.__dict__.clear()
    assert found == expected
    assert sums.running == [crc32c(found[:n], 0) for n in range(block, len(found) + 1, block)]
    assert whole_chunk(there, chunk.shape).tobytes() == expected
