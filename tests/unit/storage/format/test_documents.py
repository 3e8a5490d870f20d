"""The JSON documents: built, parsed back, and refused where strange."""

from __future__ import annotations

import contextlib
import copy
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import (
    CheckpointingException,
    DTypeMismatchError,
    FormatVersionError,
    NotACheckpointError,
)
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format import documents
from shardstore.storage.format.documents import (
    ArrayMeta,
    parse_array,
    parse_root,
    parse_v2_array,
)
from shardstore.storage.format.grid import Grid
from shardstore.storage.format.names import node_name
from shardstore.storage.stores.location import Location

GOLDEN = Path(__file__).parents[3] / "golden" / "megatron-core-0.15.3-zarr"


def meta_of(key: str, shape: tuple[int, ...], dtype: str = "float32", **more: Any) -> ArrayMeta:
    chunk = tuple(max(1, n // 2) for n in shape)
    return ArrayMeta(key, node_name(key), Grid(shape, chunk), dtype, **more)


def metas_of(
    keys: st.SearchStrategy[str], shapes: st.SearchStrategy[Any], *dtypes: str
) -> st.SearchStrategy[ArrayMeta]:
    def made(key: str, shape: Any, dtype: str, codecs: Any, is_cut: bool) -> ArrayMeta:
        shard = tuple(max(1, n // 2) for n in shape) if is_cut else None
        return meta_of(key, tuple(shape), dtype, codecs=codecs, shard_shape=shard)

    codecs = st.sampled_from([(), ("crc32c",), ("zstd", "crc32c"), ("blosc", "crc32c")])
    return st.builds(made, keys, shapes, st.sampled_from(dtypes), codecs, st.booleans())


PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
metas = metas_of(
    st.text(PRINTABLE, min_size=1, max_size=20),
    st.lists(st.integers(0, 99), max_size=4),
    *("bool", "bfloat16", "float8_e5m2", "int8", "float64", "complex64"),
)
# Few layouts and many keys, as a model has them.
members = st.lists(
    metas_of(
        st.text(st.sampled_from('ab.:,]}[{/ä"\\'), min_size=1, max_size=6),
        st.sampled_from([(), (4,), (4, 6), (6, 4), (0, 3)]),
        *("bfloat16", "float32"),
    ),
    max_size=6,
    unique_by=lambda meta: meta.node,
)


@given(metas)
def test_documents_of_arrays_are_what_the_specification_asks_for_and_lead_back(
    meta: ArrayMeta,
) -> None:
    text = documents.array_document(meta)
    assert parse_array(meta.node, text.encode(), "x") == meta
    about: dict[str, Any] = {"key": meta.key}
    if meta.shard_shape is not None:
        about["shard_shape"] = list(meta.shard_shape)
    found = json.loads(text)
    assert [codec["name"] for codec in found["codecs"]] == ["bytes", *(meta.codecs or ())]
    del found["codecs"], found["fill_value"]
    assert found == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(meta.shape),
        "data_type": meta.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(meta.grid.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": meta.separator}},
        "dimension_names": [f"{meta.key}:{axis}" for axis in range(len(meta.shape))],
        "attributes": {"shardstore": about},
    }
    # Cut out of the root's text again byte for byte, so nothing may lie between the members.
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_v2_documents_lead_back() -> None:
    for dtype in ("bfloat16", "float32", "bool"):
        meta = meta_of("a", (5, 6), dtype, codecs=(), zarr_format=2)
        assert parse_v2_array("a", documents.array_document(meta).encode(), "x") == meta
        assert meta.chunk_name((1, 2)) == f"{meta.node}/1.2"
    assert meta_of("a", (), zarr_format=2).chunk_name(()) == "a/0"
    assert meta_of("a", ()).chunk_name(()) == "a/c"
    assert meta_of("a", (3,)).chunk_name((2,)) == "a/c.2"


def test_a_group_without_consolidated_metadata_is_listed(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path)
    group.create_array("x", shape=(4,), chunks=(2,), dtype="float32")
    group.create_group("sub")
    assert list(StoredCheckpoint(Location.of(tmp_path)).arrays) == ["x"]


def test_an_absent_checkpoint_has_no_arrays(tmp_path: Path) -> None:
    stored = StoredCheckpoint(Location.of(tmp_path / "nothing"))
    assert stored.arrays == {}
    with pytest.raises(NotACheckpointError, match="not a distributed checkpoint"):
        stored.require()


@pytest.mark.parametrize("case", sorted(p.name for p in GOLDEN.iterdir()))
def test_the_layout_of_megatron_is_listed_without_its_locks(case: str) -> None:
    folders = {p.parent.name for p in (GOLDEN / case).glob("*/.zarray")}
    assert any(name.endswith(".sync") for name in folders)
    stored = StoredCheckpoint(Location.of(GOLDEN / case))
    stored.require()
    assert set(stored.arrays) == {name for name in folders if not name.endswith(".sync")}
    for meta in stored.arrays.values():
        assert meta.zarr_format == 2


def test_a_v2_array_whose_name_ends_in_sync_is_an_array(tmp_path: Path) -> None:
    meta = meta_of("a.sync", (4,), codecs=(), zarr_format=2)
    place = Location.of(tmp_path)
    place.write("a.sync/.zarray", documents.array_document(meta).encode())
    assert set(StoredCheckpoint(place).arrays) == {"a.sync"}
    place.write("b/.zarray", b"")
    with pytest.raises(NotACheckpointError, match=r"b/\.zarray"):
        _ = StoredCheckpoint(place).arrays


def root_of(found: list[ArrayMeta]) -> bytes:
    sums = {m.node: "AAAA" for m in found}  # of no number of chunks
    sums |= {m.node: b64encode(bytes(range(4 * m.grid.size))).decode() for m in found[::2]}
    about = {"format_version": 1, documents.CHUNK_SUMS: sums}
    pairs = [(m.node, documents.array_document(m)) for m in found]
    return documents.root_document(pairs, {"shardstore": about, "user": {"ä": [1, None]}})


@given(members, st.booleans())
def test_a_root_gives_back_what_was_put_in(found: list[ArrayMeta], spaced: bool) -> None:
    text = root_of(found)
    parsed = parse_root(json.dumps(json.loads(text), indent=1).encode() if spaced else text, "x")
    assert parsed.arrays() == {meta.key: meta for meta in found}
    crcs = {key: meta.crcs for key, meta in parsed.arrays().items()}
    wanted = {m.key: bytes(range(4 * m.grid.size)) if m in found[::2] else None for m in found}
    assert crcs == wanted
    texts = {node: json.loads(text) for node, text in parsed.texts.items()}
    assert texts == {meta.node: json.loads(documents.array_document(meta)) for meta in found}
    assert (parsed.format_version, parsed.attributes["user"]) == (1, {"ä": [1, None]})


@given(members.filter(bool), st.data())
def test_a_changed_character_is_read_or_an_error_of_ours(
    found: list[ArrayMeta], data: st.DataObject
) -> None:
    text = root_of(found)
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from([b"", *(bytes([c]) for c in b'017",]}{\\a ')]))
    changed = text[:at] + new + text[at + data.draw(st.integers(0, 2)) :]
    with contextlib.suppress(CheckpointingException):
        parse_root(changed, "the-url").arrays()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"zarr_format": 2}, NotACheckpointError),
        ({"node_type": "array"}, NotACheckpointError),
        ({"attributes": {"shardstore": {"format_version": 3}}}, FormatVersionError),
        ({"attributes": {"shardstore": {}}}, FormatVersionError),
        ({"attributes": {"shardstore": {"format_version": "1"}}}, FormatVersionError),
    ],
)
def test_strange_roots_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    root = json.loads(documents.root_document([], {"shardstore": {"format_version": 1}}))
    with pytest.raises(error, match="the-url"):
        parse_root(json.dumps(root | change).encode(), "the-url")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff\xfe", b"null", b"3"])
def test_roots_that_are_no_json_object(text: bytes) -> None:
    with pytest.raises(NotACheckpointError, match="the-url"):
        parse_root(text, "the-url")


def parsed_array(node: str, document: object) -> ArrayMeta:
    meta = parse_array(node, json.dumps(document).encode(), "the-url")
    assert meta is not None
    return meta


@pytest.mark.parametrize("attributes", [[], "x", 3, None, {"shardstore": "x"}])
def test_foreign_attributes_do_no_harm(attributes: object) -> None:
    root = json.loads(documents.root_document([], {}))
    parsed = parse_root(json.dumps(root | {"attributes": attributes}).encode(), "x")
    assert parsed.format_version is None
    array = json.loads(documents.array_document(meta_of("a", (1,))))
    assert parsed_array("n", array | {"attributes": attributes}).key == "n"
    for shape in ([0], [1, 1]):
        other = {"attributes": {"shardstore": {"shard_shape": shape}}}
        assert parsed_array("n", array | other).shard_shape is None


BROKEN: list[tuple[list[str], object]] = [
    (["shape"], [-1]),
    (["shape"], [1.5]),
    (["shape"], [True]),
    (["shape"], "12"),
    (["shape"], None),
    (["shape"], [1, 2]),
    (["chunk_grid", "name"], "rectangular"),
    (["chunk_grid", "configuration", "chunk_shape"], [0]),
    (["chunk_grid"], None),
    (["chunk_key_encoding", "name"], "other"),
    (["chunk_key_encoding"], []),
    (["chunk_key_encoding", "configuration", "separator"], "/../"),
    (["codecs"], [3]),
    (["codecs"], None),
]


@pytest.mark.parametrize(("path", "value"), BROKEN, ids=str)
def test_strange_arrays_are_refused(path: list[str], value: object) -> None:
    document = json.loads(documents.array_document(meta_of("a", (4,))))
    target = document = copy.deepcopy(document)
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    with pytest.raises(FormatVersionError, match="the-url"):
        parsed_array("a", document)


def test_strange_data_types_and_codecs() -> None:
    document = json.loads(documents.array_document(meta_of("a", (4,))))
    # A type with settings of its own is an object (Zarr v3 core specification, "Data types").
    for data_type in ("r16", {"name": "numpy.datetime64", "configuration": {"unit": "s"}}):
        with pytest.raises(DTypeMismatchError, match="which this version does not read"):
            parsed_array("a", document | {"data_type": data_type})
    big = [{"name": "bytes", "configuration": {"endian": "big"}}]
    blosc = [{"name": "bytes"}, {"name": "blosc", "configuration": {}}]
    for codecs in (big, blosc, [{"name": "sharding_indexed"}]):
        parsed = parsed_array("a", document | {"codecs": codecs})
        assert parsed.codecs is None
        assert not parsed.is_plain
        assert not parsed.has_crc
    for more in ({"configuration": {"separator": "/"}}, {}):
        slash = {"chunk_key_encoding": {"name": "default", **more}}
        assert parsed_array("a", document | slash).separator == "/"


@pytest.mark.parametrize(
    "change",
    [{"zarr_format": 3}, {"order": "K"}, {"chunks": [2]}, {"shape": None}, {"chunks": "a"}],
)
def test_strange_v2_arrays_are_refused(change: dict[str, Any]) -> None:
    text = documents.array_document(meta_of("a", (4, 4), codecs=(), zarr_format=2))
    with pytest.raises(FormatVersionError, match="the-url"):
        parse_v2_array("a", json.dumps(json.loads(text) | change).encode(), "the-url")


@pytest.mark.parametrize(
    "change",
    [
        *({"order": "F"}, {"dtype": ">f4"}, {"filters": [{"id": "delta"}]}),
        {"compressor": {"id": "zlib", "level": 1}},
    ],
)
def test_v2_arrays_that_tensorstore_or_zarr_decodes(change: dict[str, Any]) -> None:
    text = documents.array_document(meta_of("a", (4, 4), codecs=(), zarr_format=2))
    data = json.dumps(json.loads(text) | change).encode()
    meta = parse_v2_array("a", data, "the-url")
    assert (meta.codecs, meta.document, meta.dtype) == (None, data, "float32")
