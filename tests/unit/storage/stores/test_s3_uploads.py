"""The body of an upload: the parts one after the other, in pieces, from any position again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardstore.storage.stores import s3_uploads
from shardstore.storage.stores.s3_uploads import Body


def read_all(body: Body) -> bytes:
    return b"".join(iter(body.read, memoryview(b"")))


@given(st.lists(st.binary(max_size=40)), st.integers(1, 9), st.integers(0, 100))
def test_a_body_is_its_parts_in_order(parts: list[bytes], piece: int, start: int) -> None:
    whole, body = b"".join(parts), Body(parts)
    before, s3_uploads.PIECE_BYTES = s3_uploads.PIECE_BYTES, piece
    try:
        assert len(body) == len(whole)
        assert read_all(body) == whole
        assert body.seek(0, 2) == body.tell() == len(whole)
        body.seek(start)
        assert read_all(body) == whole[start:]
    finally:
        s3_uploads.PIECE_BYTES = before


def test_a_body_copies_nothing() -> None:
    data = np.arange(12, dtype=np.uint32)
    piece = Body([memoryview(data), b"crc"]).read()
    assert np.shares_memory(np.frombuffer(piece, np.uint8), data)
