"""The root document: what a save writes is read back, what is damaged is an error of ours."""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import CheckpointingException
from shardstore.storage.format import documents
from shardstore.storage.format.documents import ArrayMeta, array_document, parse_root
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.names import node_name


def _meta(key: str, shape: tuple[int, ...], dtype: str, cut: bool, codecs: Any) -> ArrayMeta:
    chunk = tuple(max(1, n // 2) for n in shape)
    shards = chunk if cut else None
    return ArrayMeta(key, node_name(key), Grid(shape, chunk), dtype, codecs, shard_shape=shards)


# Few layouts and many keys, as a model has them.
metas = st.builds(
    _meta,
    st.text(st.sampled_from('ab.:,]}[{/ä"\\'), min_size=1, max_size=6),
    st.sampled_from([(), (4,), (4, 6), (6, 4), (0, 3)]),
    st.sampled_from(["bfloat16", "float32"]),
    st.booleans(),
    st.sampled_from([("crc32c",), ("zstd", "crc32c"), ()]),
)
members = st.lists(metas, max_size=6, unique_by=lambda meta: meta.node)


def _text(found: list[ArrayMeta]) -> bytes:
    sums = {m.node: b64encode(bytes(range(4 * m.grid.size))).decode() for m in found[::2]}
    about = {"format_version": 1, documents.CHUNK_SUMS: sums}
    pairs = [(m.node, array_document(m)) for m in found]
    return documents.root_document(pairs, {"shardstore": about, "user": {"ä": [1, None]}})


@given(members, st.booleans())
def test_a_root_gives_back_what_was_put_in(found: list[ArrayMeta], spaced: bool) -> None:
    text = _text(found)
    parsed = parse_root(json.dumps(json.loads(text), indent=1).encode() if spaced else text, "x")
    assert parsed.arrays() == {meta.key: meta for meta in found}
    crcs = {key: meta.crcs for key, meta in parsed.arrays().items()}
    wanted = {m.key: bytes(range(4 * m.grid.size)) if m in found[::2] else None for m in found}
    assert crcs == wanted
    texts = {node: json.loads(text) for node, text in parsed.texts.items()}
    assert texts == {meta.node: json.loads(array_document(meta)) for meta in found}
    assert (parsed.format_version, parsed.attributes["user"]) == (1, {"ä": [1, None]})


@given(members.filter(bool), st.data())
def test_a_changed_character_is_read_or_an_error_of_ours(
    found: list[ArrayMeta], data: st.DataObject
) -> None:
    text = _text(found)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from([b"", *(bytes([c]) for c in b'017",]}{\\a ')]))
    changed = text[:at] + new + text[at + data.draw(st.integers(0, 2)) :]
    with contextlib.suppress(CheckpointingException):
        parse_root(changed, "the-url").arrays()
