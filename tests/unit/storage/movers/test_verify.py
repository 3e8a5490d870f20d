"""A chunk that arrives in pieces, cut anywhere, for a part of any place and strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.movers import chunk_bytes, verify
from shardstore.storage.movers.chunks import BadChunkError, ChunkPart, EncodedChunk
from shardstore.storage.movers.verify import ChunkVerifier
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.runtime.parallel import kept_memory

IO_BYTES, SCRATCH_BYTES = 64, 256


def received(
    chunk: NDArray[np.float32], part: ChunkPart, stored: bytes, cuts: list[int]
) -> ChunkVerifier:
    """Let a whole chunk arrive, cut at these places. A small one comes as it is."""
    verifier = ChunkVerifier(part.array, 0, 0, chunk.nbytes, crc=crc32c(chunk.tobytes(), 0))
    if chunk.nbytes <= IO_BYTES and not part.array.is_compressed:
        cuts = []
    ends = sorted({cut % (len(stored) + 1) for cut in cuts} | {len(stored)})
    starts = [0, *ends]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "IO_BYTES", IO_BYTES)
        patch.setattr(chunk_bytes, "SCRATCH_BYTES", SCRATCH_BYTES)
        pieces = (stored[a:b] for a, b in zip(starts, ends, strict=False))
        try:
            verifier.receive(part, pieces)
        finally:
            kept_memory.__dict__.clear()
    return verifier


@given(data=st.data())
def test_a_chunk_that_arrives_in_pieces(data: st.DataObject) -> None:
    """Its elements reach the part, and no damage stays unseen."""
    shape = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 40)), "shape")
    first = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, first, strict=True))
    codecs = data.draw(st.sampled_from([(), ("crc32c",), ("zstd", "crc32c")]), "codecs")
    cuts = data.draw(st.lists(st.integers(0, 4000), max_size=6), "cuts")
    array = ArrayMeta("w", "w", Grid(shape, shape), "float32", codecs=codecs)
    chunk = np.random.default_rng(shape).random(shape, np.float32)
    stored = b"".join(b"".join(buffers) for buffers in EncodedChunk(array, chunk))
    out = np.zeros(size, np.float32, order=data.draw(st.sampled_from(["C", "F"]), "order"))
    part = ChunkPart(array, (0, 0), Box(first, size), out, 0)
    verifier = received(chunk, part, stored, cuts)
    assert verifier.count == len(stored)
    assert np.array_equal(out, chunk[tuple(map(slice, first, np.add(first, size)))])
    at = data.draw(st.integers(0, len(stored) - 1), "damage")
    for damaged in (
        stored[:at],
        stored + stored[: at + 1],
        stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :],
    ):
        with pytest.raises(BadChunkError):
            received(chunk, part, damaged, cuts)
