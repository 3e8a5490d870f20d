"""The root document: taken apart as a save writes it, parsed as JSON otherwise, to the same end."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import CheckpointingException
from shardstore.storage.format import documents, root
from shardstore.storage.format.documents import ArrayMeta, array_document
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


def _text(found: list[ArrayMeta]) -> str:
    sums = {m.node: b64encode(bytes(range(4 * m.grid.size))).decode() for m in found[::2]}
    about = {"format_version": 1, documents.CHUNK_SUMS: sums}
    pairs = [(m.node, array_document(m)) for m in found]
    return documents.root_document(pairs, {"shardstore": about, "user": {"ä": [1, None]}})


def _outcome(text: str, *, apart: bool) -> Any:
    """What a text says, or the kind of error that it is."""
    with pytest.MonkeyPatch.context() as patch:
        if not apart:
            patch.setattr(root, "_taken_apart", lambda text: None)
        try:
            parsed = root.parse_root(text, "the-url")
            arrays = parsed.arrays()
        except CheckpointingException as error:
            return type(error)
    said = {
        key: (meta, meta.crcs, meta.document or json.loads(array_document(meta)))
        for key, meta in arrays.items()
    }
    return parsed.attributes, parsed.format_version, parsed.consolidated, said


@given(members)
def test_both_ways_lead_to_the_same(found: list[ArrayMeta]) -> None:
    text = _text(found)
    said = _outcome(text, apart=True)
    assert said == _outcome(text, apart=False)
    assert {key: meta for key, (meta, _, _) in said[3].items()} == {m.key: m for m in found}
    spaced = json.dumps(json.loads(text), indent=1)
    assert said == _outcome(spaced, apart=True)
    assert root.parse_root(text, "x").documents == root.parse_root(spaced, "x").documents


@given(members)
def test_what_a_save_writes_is_taken_apart(found: list[ArrayMeta]) -> None:
    parsed = root.parse_root(_text(found).encode(), "x")
    escaped = any(set(meta.key) & {'"', "\\"} for meta in found)
    assert isinstance(parsed.members, dict) == escaped


@given(members.filter(bool), st.data())
def test_a_changed_character_is_met_alike(found: list[ArrayMeta], data: st.DataObject) -> None:
    text = _text(found)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", "0", "1", "7", '"', ",", "]", "}", "{", "\\", "a", " "]))
    changed = text[:at] + new + text[at + data.draw(st.integers(0, 2)) :]
    assert _outcome(changed, apart=True) == _outcome(changed, apart=False)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ('}}},"b":{', '}}}"b":{'),
        ('}}},"b":{', '}}},,"b":{'),
        ('"b":{"zarr', '"a":{"zarr'),
        ('"b:0"', '"c:0"'),
        ('"b:0"', '"b:0","b:1"'),
        ('"key":"b"', '"key":""'),
        ('"fill_value":0.0', '"fill_value":1.0'),
        ('"shard_shape":[2]', '"shard_shape":[02]'),
        ('"shard_shape":[2]', '"shard_shape":[]'),
        ('"chunk_shape":[2]', '"chunk_shape":[0]'),
        ('"float32"', '"float33"'),
        ("}}}}}}", "}}},}}}"),
        ("}}}}}}", "}}}}}}}"),
    ],
)
def test_what_no_save_writes_is_met_alike(was: str, now: str) -> None:
    text = _text([_meta(key, (4,), "float32", True, ("crc32c",)) for key in "abc"])
    assert was in text
    for changed in (text.replace(was, now), text.replace(was, now, 1)):
        assert _outcome(changed, apart=True) == _outcome(changed, apart=False)
