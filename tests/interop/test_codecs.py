"""Arrays of other programs with codecs, orders and chunk keys that this package never writes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from uuid import uuid4

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import zarr
import zarr.codecs
from typer.testing import CliRunner
from zarr.codecs import numcodecs as of_numcodecs

import shardstore
from shardstore import ShardedTensor
from shardstore.cli.app import app
from shardstore.errors import ChunkCorruptError, ChunkMissingError, FormatVersionError
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.verification import verified

pytestmark = pytest.mark.filterwarnings("ignore")

VALUES = np.arange(70, dtype="f4").reshape(10, 7)
BIG_ENDIAN = zarr.codecs.BytesCodec(endian="big")
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "v2 chunk keys": (3, {"chunk_key_encoding": {"name": "v2", "separator": "."}}),
    "v2 chunk keys with slashes": (3, {"chunk_key_encoding": {"name": "v2", "separator": "/"}}),
    "v2 chunk keys, packed": (
        3,
        {"chunk_key_encoding": {"name": "v2"}, "compressors": zarr.codecs.ZstdCodec()},
    ),
    "big endian": (3, {"serializer": BIG_ENDIAN}),
    "columns first": (3, {"filters": zarr.codecs.TransposeCodec(order=(1, 0))}),
    "a compressor of numcodecs": (3, {"compressors": of_numcodecs.Zlib(level=3)}),
    "a filter of numcodecs": (3, {"filters": of_numcodecs.Delta(dtype="<f4")}),
    "shards": (3, {"shards": (8, 6), "compressors": of_numcodecs.LZ4()}),
    "F order": (2, {"order": "F"}),
    "F order, packed": (2, {"order": "F", "compressors": numcodecs.Zlib()}),
    "big-endian type": (2, {"dtype": ">f4"}),
    "big-endian type, packed": (2, {"dtype": ">f4", "compressors": numcodecs.Blosc()}),
    "filters": (2, {"filters": [numcodecs.Delta(dtype="<f4")]}),
    "filters and slashes": (
        2,
        {"filters": [numcodecs.Shuffle(4)], "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    ),
    "lzma": (2, {"compressors": numcodecs.LZMA()}),
}
FEW = ("v2 chunk keys", "a compressor of numcodecs", "F order", "filters and slashes")
"""Of each format, one kind that TensorStore reads, and one that it does not."""


def put(url: str, names: list[str], options: dict[str, Any] | None = None) -> None:
    """Write an array of each kind, all of one format, without the last row of chunks."""
    zarr_format: Any = KINDS[names[0]][0]
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format, storage_options=options)
    for name in names:
        given = {"shape": (13, 7), "chunks": (4, 3), "dtype": "f4", **KINDS[name][1]}
        group.create_array(name.replace(" ", "_"), fill_value=5, **given)[:10] = VALUES


def expected() -> Any:
    return np.concatenate([VALUES, np.full((3, 7), 5, "f4")])


def of_format(zarr_format: int) -> list[str]:
    return [name for name, kind in KINDS.items() if kind[0] == zarr_format]


def assert_read(url: str, names: list[str], options: dict[str, Any] | None = None) -> None:
    ckpt = shardstore.open(url, options)
    assert ckpt.refused == {}
    for name in names:
        array = ckpt[name.replace(" ", "_")]
        assert array.dtype == np.float32
        assert np.array_equal(array[...], expected()), name
        assert np.array_equal(array[2:9:3, ::-2], expected()[2:9:3, ::-2]), name
        assert array.torch()[9, 6] == 69


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_open_reads_them(tmp_path: Path, s3_server: S3Server, zarr_format: int) -> None:
    """Through TensorStore, or through zarr if TensorStore cannot, from every store."""
    names = of_format(zarr_format)
    few = [name for name in names if name in FEW]
    for url, read, options in (
        (str(tmp_path / "x.zarr"), names, None),
        (f"memory://codecs-{uuid4().hex}/x.zarr", few, None),
        (f"s3://{s3_server.new_bucket()}/x.zarr", few, s3_server.storage_options),
    ):
        put(url, read, options)
        assert_read(url, read, options)
    alone = shardstore.open(tmp_path / "x.zarr" / names[0].replace(" ", "_"))
    assert np.array_equal(next(iter(alone.values()))[...], expected())


@pytest.mark.parametrize("name", ["a compressor of numcodecs", "v2 chunk keys", "big endian"])
def test_a_checkpoint_packed_again_by_another_program_loads(tmp_path: Path, name: str) -> None:
    """That another program packed again: a load reads it, and a missing chunk is an error."""
    place = tmp_path / "c"
    state = {k: ShardedTensor.from_rank_offsets(k, torch.from_numpy(VALUES)) for k in ("w", "v")}
    shardstore.save(state, place)
    group = zarr.open_group(place, mode="a")
    attributes = dict(group["w"].attrs)
    group.create_array(
        "w", data=VALUES, chunks=(4, 3), overwrite=True, attributes=attributes, **KINDS[name][1]
    )
    zarr.consolidate_metadata(place)
    assert np.array_equal(shardstore.open(place)["w"][...], VALUES)
    asked = ShardedTensor.from_rank_offsets("w", torch.zeros(10, 7))
    loaded: Any = shardstore.load({"w": asked}, place)
    assert np.array_equal(loaded["w"].numpy(), VALUES)
    files = sorted(p for p in (place / "w").rglob("*") if p.is_file() and p.name != "zarr.json")
    chunk, data = files[0], files[0].read_bytes()
    chunk.unlink()
    with pytest.raises(ChunkMissingError, match=r"chunk \(0, 0\) of key 'w' is missing"):
        shardstore.open(place)["w"][...]
    if name == "a compressor of numcodecs":
        chunk.write_bytes(data[:-9])
        with pytest.raises(ChunkCorruptError, match=r"chunk \(0, 0\) of key 'w'.*decoded"):
            shardstore.open(place)["w"][...]


class Called:
    """Its pickle calls a function when it is read."""

    calls = 0

    def __reduce__(self) -> Any:
        return Called.call, ()

    @staticmethod
    def call() -> bytes:
        Called.calls += 1
        return b""


@pytest.mark.parametrize("member", ["compressor", "filters"])
@pytest.mark.parametrize("store", ["folder", "memory"])
def test_no_code_of_a_file_runs(tmp_path: Path, store: str, member: str) -> None:
    """numcodecs has a codec that unpickles chunks, and zarr calls it for any data type."""
    url = str(tmp_path / "x") if store == "folder" else f"memory://pickle-{uuid4().hex}/x"
    zarr.create_array(url, data=np.arange(4.0), zarr_format=2, compressors=None)
    place, codec = Location.of(url), {"id": "pickle", "protocol": 5}
    document = json.loads(place.read(".zarray"))
    document[member] = codec if member == "compressor" else [codec]
    place.write(".zarray", json.dumps(document).encode())
    place.write("0", pickle.dumps(Called()))
    array = shardstore.open(url)["x"]
    for read in (lambda: array[...], lambda: array.zarr):
        with pytest.raises(ValueError, match="codec 'pickle' runs code"):
            read()
    assert Called.calls == 0


UNKNOWN = {
    3: ("zarr.json", "codecs", [{"name": "bytes"}, {"name": "acme.secret"}]),
    2: (".zarray", "compressor", {"id": "acme.secret"}),
}


@pytest.mark.parametrize(("zarr_format", "consolidated"), [(2, False), (3, False), (3, True)])
def test_a_codec_that_nobody_knows_is_named(
    tmp_path: Path, zarr_format: int, consolidated: bool
) -> None:
    place, names = tmp_path / "x.zarr", of_format(zarr_format)[:2]
    put(str(place), names)
    if consolidated:
        zarr.consolidate_metadata(place)
    (bad, good) = (name.replace(" ", "_") for name in names)
    file, member, codecs = UNKNOWN[zarr_format]
    document = {**json.loads((place / bad / file).read_text()), member: codecs}
    (place / bad / file).write_text(json.dumps(document))
    if consolidated:
        group = json.loads((place / file).read_text())
        group["consolidated_metadata"]["metadata"][bad] = document
        (place / file).write_text(json.dumps(group))
    ckpt = shardstore.open(place)
    assert set(ckpt) == {bad, good}
    with pytest.raises(FormatVersionError, match=rf"{bad}.*acme\.secret") as caught:
        ckpt[bad][...]
    assert "damage" not in str(caught.value)
    assert np.array_equal(ckpt[good][...], expected())
    done = CliRunner().invoke(app, ["stats", "--json", str(place)])
    entries = {entry["key"]: entry for entry in json.loads(done.stdout)["arrays"]}
    assert set(entries) == {good}
    assert entries[good]["count"] == expected().size
    assert "acme.secret" in done.stderr
    assert "damage" not in done.stderr


def with_an_unknown_codec(place: Path, *others: str) -> None:
    """Arrays of plain Zarr, of which nothing decodes ``bad``."""
    group = zarr.open_group(place, mode="w")
    for name in ("bad", *others):
        group.create_array(name, data=VALUES, chunks=(5, 7))
    document = json.loads((place / "bad/zarr.json").read_text())
    document["codecs"] = UNKNOWN[3][2]
    (place / "bad/zarr.json").write_text(json.dumps(document))


def test_diff_and_report_leave_out_what_nobody_decodes(tmp_path: Path) -> None:
    for side in "ab":
        with_an_unknown_codec(tmp_path / side, "good", "other")
    zarr.open_array(tmp_path / "b/other")[0] = 77
    done = CliRunner().invoke(app, ["diff", "--json", str(tmp_path / "a"), str(tmp_path / "b")])
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert "acme.secret" in found["unread"].pop("bad")
    assert (found["unread"], list(found["values"]), found["equal"]) == ({}, ["other"], 1)
    done = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "a")])
    assert done.exit_code == 1  # nobody knows whether bad is equal
    assert "not read" in done.stdout
    assert "2 equal, 0 with other values, 1 not read" in done.stdout
    page = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "-o", str(page)])
    assert done.exit_code == 0, done.output
    assert "acme.secret" in done.stderr
    assert all(f">{name} <span" in page.read_text() for name in ("bad", "good", "other"))


def test_verify_says_what_it_could_not_decode_and_goes_on(tmp_path: Path) -> None:
    with_an_unknown_codec(tmp_path, "cut", "good")
    chunk = tmp_path / "cut/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    result, findings = verified(tmp_path)
    assert (result.arrays, result.chunks, result.damage, result.notes) == (2, 4, 1, 1)
    found = {finding.key: finding for finding in findings}
    assert (found["bad"].kind, found["bad"].severity) == ("codec-unknown", "note")
    assert "acme.secret" in found["bad"].message
    assert "not verified" in found["bad"].message
    assert (found["cut"].kind, found["cut"].chunk) == ("chunk-crc", (1, 0))


def test_a_codec_that_nobody_knows_is_damage_in_a_checkpoint_of_ours(tmp_path: Path) -> None:
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in ("bad", "good")}
    shardstore.save(state, tmp_path / "c", ("zarr", 1))
    path, (_, member, codecs) = tmp_path / "c/bad/.zarray", UNKNOWN[2]
    path.write_text(json.dumps({**json.loads(path.read_text()), member: codecs}))
    result, (found,) = verified(tmp_path / "c")
    assert (result.ok, result.arrays) == (False, 1)
    assert (found.kind, found.severity, found.key) == ("codec-unknown", "damage", "bad")
