"""Manifests: every chunk written exactly once, or an error that says where and by whom."""

from __future__ import annotations

import io
import json
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import AccessPatternError, DamagedCheckpointError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid, inner_blocks
from shardstore.storage.format.manifest import ChunkRecord, Manifest, RankManifest
from shardstore.storage.format.merge import merge
from shardstore.storage.format.names import node_name
from tests.helpers.processes import run_to_end


def meta_of(key: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> ArrayMeta:
    return ArrayMeta(key, node_name(key), Grid(shape, chunk), "float32")


def record_of(meta: ArrayMeta, index: tuple[int, ...]) -> ChunkRecord:
    """A record with values of its own for every chunk."""
    seed = hash((meta.key, meta.grid.linear(index))) % 2**31
    rng = np.random.default_rng(seed)
    running = rng.integers(0, 2**32, inner_blocks(meta.chunk_bytes)).tolist()
    crc, size = int(rng.integers(0, 2**32)), meta.chunk_bytes + 4
    return ChunkRecord(size, crc, rng.bytes(16), running)


def indices(meta: ArrayMeta) -> list[tuple[int, ...]]:
    return [meta.grid.index_at(i) for i in range(meta.grid.size)]


METAS = [
    meta_of("b", (10, 3000), (3, 1000)),  # 12,000 bytes a chunk, two inner boundaries
    meta_of("a/x", (5,), (2,)),
    meta_of("scalar", (), ()),
    meta_of("empty", (0, 4), (1, 4)),
    meta_of("c", (40_000,), (40_000,)),
]


@given(st.data())
def test_ranks_in_any_order_merge_to_the_same_manifest(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4))
    reports = [RankManifest(rank) for rank in range(world)]
    chunks = data.draw(st.permutations([(m, i) for m in METAS for i in indices(m)]))
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for meta in data.draw(st.permutations(METAS)):
        reports[data.draw(st.integers(0, world - 1))].add_array(meta, created=True)
    for meta, index in chunks:
        rank = data.draw(st.integers(0, world - 1))
        owners[meta.key, index] = rank
        reports[rank].add_array(meta, created=False)
        reports[rank].add_chunk(meta, index, record_of(meta, index))
    merged = merge([report.to_bytes() for report in reports])
    assert [m.key for m in merged.arrays] == sorted(m.key for m in METAS)
    manifest = Manifest.from_bytes(merged.manifest.to_bytes(), "x")
    for meta in METAS:
        for index in indices(meta):
            record = record_of(meta, index)
            rows, number = manifest.rows(meta), meta.grid.linear(index)
            assert rows is not None
            assert manifest.writer(meta, index) == owners[meta.key, index]
            assert rows.rank[number] == owners[meta.key, index]
            assert rows.crc[number] == record.crc
            assert rows.stored[number] == record.stored_bytes
            assert rows.digest[number].tobytes() == record.digest
            assert rows.running[number].tolist() == list(record.running)
    fewer = manifest.without({METAS[0].node, METAS[2].node})
    assert [node for node, _, _ in fewer.arrays] == ["a%2Fx", "c", "empty"]
    assert fewer.rows(METAS[0]) is None
    for meta in (METAS[1], METAS[4]):
        for index in indices(meta):
            one, other, number = fewer.rows(meta), manifest.rows(meta), meta.grid.linear(index)
            assert one is not None
            assert other is not None
            assert one.running[number].tolist() == other.running[number].tolist()
            assert fewer.writer(meta, index) == manifest.writer(meta, index)


def reports_of(*ranks: list[tuple[ArrayMeta, list[tuple[int, ...]], bool]]) -> list[bytes]:
    out = []
    for rank, entries in enumerate(ranks):
        report = RankManifest(rank)
        for meta, chunks, created in entries:
            report.add_array(meta, created=created)
            for index in chunks:
                report.add_chunk(meta, index, record_of(meta, index))
        out.append(report.to_bytes())
    return out


A = meta_of("a", (6,), (2,))


def test_a_chunk_that_no_rank_wrote_is_an_error() -> None:
    reports = reports_of([(A, [(0,)], True)], [(A, [(2,)], False)])
    with pytest.raises(AccessPatternError, match="Invalid access pattern") as caught:
        merge(reports)
    assert caught.value.key == "a"
    assert "key 'a' offset (2,) shape (2,) was written by no rank" in str(caught.value)
    assert "a rank may lack the key" in str(caught.value)
    merge(reports, check=False)


def test_a_chunk_that_two_ranks_wrote() -> None:
    reports = reports_of([(A, [(0,), (1,)], True)], [], [(A, [(1,), (2,)], False)])
    with pytest.raises(AccessPatternError, match="Invalid access pattern") as caught:
        merge(reports)
    assert "offset (2,)" in str(caught.value)
    assert "written 2 times, by rank(s) [0, 2]" in str(caught.value)
    assert merge(reports, check=False).manifest.writer(A, (1,)) == 2


def test_many_wrong_regions_are_counted_not_listed() -> None:
    large = meta_of("large", (1000,), (1,))
    with pytest.raises(AccessPatternError, match="and 995 more regions") as caught:
        merge(reports_of([(large, [(7,)], True)]))
    assert len(str(caught.value)) < 2000


def test_an_array_that_nobody_created() -> None:
    with pytest.raises(AccessPatternError, match=r"rank 1 .*key 'a'.*first\s+shard") as caught:
        merge(reports_of([], [(A, [(0,), (1,), (2,)], False)]))
    assert (caught.value.key, caught.value.rank) == ("a", 1)


def test_ranks_that_describe_an_array_differently_are_named() -> None:
    other = meta_of("a", (6,), (3,))
    with pytest.raises(AccessPatternError, match="differently") as caught:
        merge(reports_of([(A, [(0,), (1,)], True)], [(other, [(1,)], False)]))
    assert "rank 1 and rank 0" in str(caught.value)
    assert "rank 1 has global shape (6,), data type float32, chunks of (3,)" in str(caught.value)
    assert "rank 0 has global shape (6,), data type float32, chunks of (2,)" in str(caught.value)
    with pytest.raises(AccessPatternError, match="differently"):
        merge(reports_of([(A, [(0,), (1,)], True)], [(other, [(1,)], True)]))


def test_one_rank_with_one_key_for_two_tensors() -> None:
    report = RankManifest(3)
    report.add_array(A, created=True)
    with pytest.raises(AccessPatternError, match="two different tensors on rank 3") as caught:
        report.add_array(meta_of("a", (8,), (2,)), created=False)
    assert "one has global shape (6,)" in str(caught.value)
    assert "the other has global shape (8,)" in str(caught.value)


def test_manifests_without_arrays_are_merged() -> None:
    merged = merge([RankManifest(0).to_bytes(), RankManifest(1).to_bytes()])
    assert (merged.arrays, merged.documents, merged.objects) == ([], [], {})
    assert len(merged.manifest.crc) == 0
    Manifest.from_bytes(merged.manifest.to_bytes(), "x")
    one, two = RankManifest(0), RankManifest(4)
    one.objects.append("rng/shard_0_1")
    two.objects.append("rng/shard_0_1")
    assert merge([one.to_bytes(), two.to_bytes()]).objects == {"rng/shard_0_1": [0, 4]}


def test_documents_are_those_of_the_creators() -> None:
    merged = merge(reports_of([(A, [(0,)], False)], [(A, [(1,), (2,)], True)]))
    ((node, text),) = merged.documents
    assert node == "a"
    assert json.loads(text)["shape"] == [6]
    assert merged.arrays == [A]


def test_a_manifest_of_another_grid_knows_nothing() -> None:
    manifest = merge(reports_of([(A, indices(A), True)])).manifest
    for other in (meta_of("a", (600,), (2,)), meta_of("a", (3,), (1,)), meta_of("b", (6,), (2,))):
        assert manifest.rows(other) is None
        assert manifest.writer(other, (0,)) is None


def columns_of(manifest: Manifest) -> dict[str, np.ndarray[Any, Any]]:
    with np.load(io.BytesIO(manifest.to_bytes())) as columns:
        return dict(columns)


def packed(columns: dict[str, np.ndarray[Any, Any]]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **columns)
    return out.getvalue()


@pytest.mark.parametrize(
    "name", ["arrays", "stored_bytes", "crc32c", "xxh3_128", "rank", "running_crc32c"]
)
def test_damaged_columns_are_refused(name: str) -> None:
    meta = METAS[0]
    columns = columns_of(merge(reports_of([(meta, indices(meta), True)])).manifest)
    Manifest.from_bytes(packed(columns), "the-url")
    column = columns[name]
    for wrong in (column[:-1], column[:0], column.astype("f8"), np.array([{}], dtype=object)):
        with pytest.raises(DamagedCheckpointError, match="the-url is damaged"):
            Manifest.from_bytes(packed(columns | {name: wrong}), "the-url")
    del columns[name]
    with pytest.raises(DamagedCheckpointError, match="the-url is damaged"):
        Manifest.from_bytes(packed(columns), "the-url")


def test_an_array_of_a_negative_number_of_chunks_is_refused() -> None:
    """The rows of the arrays after it would be those of others."""
    columns = columns_of(merge(reports_of([(A, indices(A), True)])).manifest)
    (row,) = json.loads(zlib.decompress(columns["arrays"].tobytes()))
    rows = json.dumps([["b", -1, 8], row, ["c", 1, 8]]).encode()
    columns["arrays"] = np.frombuffer(zlib.compress(rows), np.uint8)
    with pytest.raises(DamagedCheckpointError, match=r"the-url is damaged.*impossible size"):
        Manifest.from_bytes(packed(columns), "the-url")


def test_a_manifest_needs_no_codec_that_a_process_may_have_lost() -> None:
    """Of one that gave its rights away, each step counted as incomplete."""
    code = f"import sys, {Manifest.__module__}; print('encodings.cp437' in sys.modules)"
    assert run_to_end([sys.executable, "-c", code]).stdout == "True\n"
