"""Verification: damage of every kind is found and named, and all that is done is logged."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zarr

import shardstore
from shardstore.convert import convert
from shardstore.dcp import StorageWriter
from shardstore.errors import DamagedCheckpointError
from shardstore.inspection.verify import Finding, verify
from shardstore.progress import EVENTS, Progress
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.cli_checkpoints import Cli, flip, values
from tests.helpers.store_suite import flipped
from tests.helpers.verification import findings, verified


def one(place: Path, kind: str, **options: Any) -> Finding:
    """The only finding."""
    result, found = verified(place, **options)
    assert [finding.kind for finding in found] == [kind], found
    assert (result.damage, result.notes) == ((1, 0) if found[0].severity == "damage" else (0, 1))
    assert "\n" not in found[0].message
    assert found[0].path in found[0].message or kind in ("root-damaged", "config-missing")
    return found[0]


def test_files_for_other_programs_belong_to_a_checkpoint(tmp_path: Path) -> None:
    """The hashes that Megatron-Core compares, and the file that DCP looks for."""
    tensor = torch.arange(4.0)
    shardstore.save(shardstore.shard({"w": tensor}), tmp_path / "hashed", verify_integrity=True)
    writer = StorageWriter(tmp_path / "marked", dcp_marker=True)
    dcp.save({"w": tensor}, storage_writer=writer, no_dist=True)
    for name, file in (("hashed", "integrity.json"), ("marked", ".metadata")):
        assert (tmp_path / name / file).is_file()
        assert findings(tmp_path / name) == []


@pytest.mark.parametrize(("hashes", "threads"), [(False, 1), (True, 3)])
def test_an_intact_checkpoint_has_no_findings(pristine: Path, hashes: bool, threads: int) -> None:
    seen: list[Progress] = []
    result, found = verified(pristine, hashes=hashes, threads=threads, progress=seen.append)
    assert found == []
    assert result.ok
    assert (result.arrays, result.objects, result.unchecked) == (7, 2, 0)
    manifest = StoredCheckpoint(Location.of(pristine)).manifest
    assert result.chunks == len(manifest.crc)
    assert result.bytes == manifest.stored.sum()
    last = seen[-1]
    assert (last.operation, last.phase) == ("verify", "done")
    assert (last.bytes_done, last.chunks_done) == (last.bytes_total, last.chunks_total)
    assert last.chunks_done == result.chunks
    done = [event.bytes_done for event in seen]
    assert sorted(done) == done


def chunks(place: Path) -> list[Path]:
    return sorted(place.glob("layers.0.weight/c.*"))


@pytest.mark.parametrize("threads", [1, 2])
def test_every_flipped_chunk_is_named(place: Path, threads: int) -> None:
    damaged = chunks(place)
    assert len(damaged) > 2
    for path in damaged:
        flip(path)
    result, found = verified(place, threads=threads)
    assert result.damage == len(damaged)
    assert {finding.path for finding in found} == set(map(str, damaged))
    half = len(damaged) // 2
    for finding in found:
        assert finding.kind == "chunk-crc"
        assert finding.key == "layers.0.weight"
        assert finding.rank == (finding.chunk[0] >= half)
        assert f"rank {finding.rank}" in finding.message
        assert str(finding.chunk) in finding.message


def test_missing_short_long_and_unreadable_chunks(place: Path) -> None:
    path = chunks(place)[1]
    data = path.read_bytes()
    for wrong in (b"", data[:-1], data[:100], data + b"x"):
        path.write_bytes(wrong)
        finding = one(place, "chunk-size")
        assert f"has {len(wrong)} bytes, not {len(data)}" in finding.message
    path.unlink()
    assert one(place, "chunk-missing").chunk == (1, 0)
    path.mkdir()
    assert "no regular file" in one(place, "chunk-unreadable").message
    path.rmdir()
    path.symlink_to(path.name)
    assert "cannot be read" in one(place, "chunk-unreadable").message


def test_hashes_are_compared_only_when_asked(place: Path) -> None:
    stored = StoredCheckpoint(Location.of(place))
    manifest = stored.manifest
    assert manifest is not None
    manifest.digest[3, 5] ^= 1
    (place / "manifest.npz").write_bytes(manifest.to_bytes())
    assert one(place, "manifest-damaged").chunk is None  # the digest of all of them is another
    assert [f.kind for f in findings(place, hashes=True)] == ["manifest-damaged", "chunk-manifest"]


def test_missing_and_damaged_documents_are_found(place: Path) -> None:
    path = place / "counts" / "zarr.json"
    text = path.read_text()
    path.unlink()
    assert one(place, "document-missing").key == "counts"
    path.write_text(text[:-5])
    one(place, "document-damaged")
    path.write_text("[]")
    one(place, "document-damaged")
    path.write_text(text.replace('"int64"', '"uint64"'))
    assert "data_type" in one(place, "document-differs").message
    path.write_text(json.dumps(json.loads(text), indent=3))
    assert findings(place) == []


def test_files_beside_the_arrays(place: Path) -> None:
    lost = place / "rng" / "shard_0_2.pt"
    own = lost.read_bytes()
    lost.unlink()
    assert "(0,)" in one(place, "object-missing").message
    lost.write_bytes(flipped(own, len(own) // 2))
    assert one(place, "object-damaged").key == "rng"
    shutil.copy(place / "common.pt", lost)  # whole, and not what was committed
    assert one(place, "object-damaged").key == "rng"
    lost.write_bytes(own)
    others = {path: path.read_bytes() for path in (place / "rng").iterdir()}
    shutil.rmtree(place / "rng")  # of what is not there at all only the commit knows
    result, found = verified(place)
    assert [(finding.kind, finding.key) for finding in found] == [("object-missing", "rng")] * 2
    assert result.damage == 2
    assert findings(place, keys=["w*"]) == []
    (place / "rng").mkdir()
    for path, data in others.items():
        path.write_bytes(data)
    common = (place / "common.pt").read_bytes()
    data = flipped(common, common.index(b"iteration"))
    (place / "common.pt").write_bytes(data)
    one(place, "common-damaged")
    (place / "common.pt").write_bytes(b"")
    one(place, "common-damaged")
    (place / "common.pt").unlink()
    one(place, "common-missing")


def test_a_name_that_claims_many_objects_ends(place: Path) -> None:
    shutil.copy(place / "common.pt", place / "rng" / "shard_0_99999999999.pt")
    result, found = verified(place)
    assert {finding.kind for finding in found} == {"object-missing"}
    assert 0 < result.damage < 20


def test_config_manifest_and_root(place: Path) -> None:
    config = (place / "metadata.json").read_bytes()
    (place / "metadata.json").unlink()
    one(place, "config-missing")
    (place / "metadata.json").write_bytes(config[:9])
    one(place, "config-damaged")
    (place / "metadata.json").write_bytes(config)

    manifest = (place / "manifest.npz").read_bytes()
    (place / "manifest.npz").write_bytes(manifest[:-30])
    one(place, "manifest-damaged")
    (place / "manifest.npz").unlink()
    assert one(place, "manifest-missing").severity == "note"
    flip(chunks(place)[0])  # is found without it, though not who wrote it
    _, found = verified(place)
    assert [finding.rank for finding in found if finding.kind == "chunk-crc"] == [None]
    flip(chunks(place)[0])
    (place / "manifest.npz").write_bytes(manifest)

    flip(chunks(place)[0])
    (place / "zarr.json").write_text("{")
    kinds = [finding.kind for finding in findings(place)]
    assert kinds == ["root-damaged", "chunk-crc"]  # the rest is checked all the same
    (place / "zarr.json").unlink()
    assert [finding.kind for finding in findings(place)] == ["root-missing", "chunk-crc"]


def test_what_does_not_belong_is_a_note(place: Path) -> None:
    (place / "train.log").write_text("x")
    (place / "plots").mkdir()
    (place / "plots" / "a.png").write_text("x")
    (place / "counts" / "c.1").write_text("x")
    (place / "counts" / "notes.txt").write_text("x")
    result, found = verified(place)
    assert result.ok
    assert result.notes == 4
    paths = {finding.path.removeprefix(f"{place}/") for finding in found}
    assert paths == {"train.log", "plots/a.png", "counts/c.1", "counts/notes.txt"}
    assert sorted(str(finding.key) for finding in found) == ["None", "None", "counts", "counts"]


def test_only_the_keys_asked_for(place: Path) -> None:
    flip(chunks(place)[0])
    assert findings(place, keys=["counts", "layers.1*"]) == []
    one(place, "chunk-crc", keys=["layers.*"])


def test_an_array_that_another_program_rewrote(place: Path) -> None:
    shutil.rmtree(place / "counts")
    array = zarr.create_array(place / "counts", shape=(30,), chunks=(7,), dtype="f4")
    array[:] = np.arange(30)
    root = json.loads((place / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["counts"] = json.loads(
        (place / "counts" / "zarr.json").read_text()
    )
    (place / "zarr.json").write_text(json.dumps(root))
    assert one(place, "manifest-stale").severity == "note"


def test_arrays_of_unknown_types_are_no_damage_in_zarr_of_another_program(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    group.create_array("when", data=np.zeros(3, "datetime64[s]"))
    group.create_array("w", data=np.ones(4))
    result, found = verified(tmp_path / "g")
    assert (result.damage, result.arrays) == (0, 1)
    (unread,) = found
    assert (unread.kind, unread.key) == ("type-unknown", "when")
    assert "not verified" in unread.message


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_of_other_programs_may_lack_chunks(tmp_path: Path, zarr_format: Any, cli: Cli) -> None:
    """They are fill values. A checkpoint has all chunks, and an array has its document."""
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format, attributes={"title": "t"})
    group.create_group("empty").attrs["unit"] = "m"
    for key in ("w", "v"):
        array = group.create_array(key, shape=(6,), chunks=(2,), dtype="f4", fill_value=9)
        array[:2] = 1
    zarr.consolidate_metadata(tmp_path / "g", zarr_format=zarr_format)
    result, found = verified(tmp_path / "g", keys=["w"])
    assert (result.ok, result.arrays, result.chunks) == (True, 1, 3)
    (note,) = found
    assert (note.kind, note.severity, note.key) == ("chunk-missing", "note", "w")
    assert "2 of 3 chunks of key 'w'" in note.message
    assert verified(tmp_path / "g")[0].notes == 2
    root = tmp_path / "g" / ("zarr.json" if zarr_format == 3 else ".zgroup")
    root.rename(tmp_path / "root")
    alone = cli("verify", "--json", tmp_path / "g" / "w").json
    assert (alone["ok"], alone["arrays"], alone["chunks"], alone["notes"]) == (True, 1, 3, 1)
    assert cli("report", tmp_path / "g" / "w", "-o", tmp_path / "page.html").code == 0
    (tmp_path / "root").rename(root)
    if zarr_format == 3:  # documents of the members of Zarr v2 are read themselves
        zarr.open_array(tmp_path / "g" / "w", mode="a").resize((7,))
        with pytest.raises(DamagedCheckpointError, match=r"/w/zarr\.json differs from the copy"):
            shardstore.open(tmp_path / "g")["w"][0]
        zarr.open_array(tmp_path / "g" / "w", mode="a").resize((6,))
        assert shardstore.open(tmp_path / "g")["w"][5] == 9
        shutil.rmtree(tmp_path / "g" / "v")
        assert [one.kind for one in findings(tmp_path / "g") if one.severity == "damage"] == [
            "document-missing"
        ]
        with pytest.raises(DamagedCheckpointError, match=r"/v/zarr\.json is missing"):
            shardstore.open(tmp_path / "g")["v"][0]
        with pytest.raises(DamagedCheckpointError, match=r"/v/zarr\.json is missing"):
            _ = shardstore.open(tmp_path / "g")["v"].tensorstore


def test_an_unknown_type_in_a_checkpoint_is_damage(tmp_path: Path) -> None:
    """Also without a checksum, as in those of Megatron-Core's Zarr backend."""
    shardstore.save(shardstore.shard({"w": torch.ones(4)}), tmp_path / "c", ("zarr", 1))
    document = tmp_path / "c" / "w" / ".zarray"
    document.write_text(document.read_text().replace("<f4", "<f5"))
    result, found = verified(tmp_path / "c")
    assert result.damage == 1
    assert [one.key for one in found if one.severity == "damage"] == ["w"]


def test_compressed_arrays_are_decoded(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "g")
    array = root.create_array("a", shape=(50, 3), chunks=(20, 3), dtype="f4")
    array[:] = np.random.default_rng(1).random((50, 3))
    zarr.consolidate_metadata(root.store)
    result, found = verified(tmp_path / "g")
    assert (result.chunks, found) == (3, [])
    path = tmp_path / "g" / "a" / "c" / "1" / "0"
    path.write_bytes(path.read_bytes()[:-20])
    assert one(tmp_path / "g", "chunk-crc").chunk == (1, 0)
    shutil.rmtree(path.parent)
    one(tmp_path / "g", "chunk-missing")


def test_the_old_layout_as_far_as_it_goes(tmp_path: Path, cli: Cli) -> None:
    place = tmp_path / "old"
    state = {"a/w": torch.randn(12, 4).bfloat16(), "step": 1}
    shardstore.save(shardstore.shard(state), place, ("zarr", 1))
    result, found = verified(place)
    assert (found, result.chunks, result.unchecked) == ([], 1, 1)
    assert "1 without checksums" in cli("verify", place).out
    assert cli("ls", "--json", place).json["arrays"][0]["dtype"] == "bfloat16"
    chunk = place / "a%2Fw" / "0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    one(place, "chunk-size")
    chunk.unlink()
    one(place, "chunk-missing")


def test_the_command_prints_findings_and_sets_the_exit_code(place: Path, cli: Cli) -> None:
    outcome = cli("verify", place)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("OK: 7 arrays")
    (place / "train.log").write_text("x")
    assert cli("verify", place).code == 0
    assert cli("verify", "--strict", place).code == 1
    flip(chunks(place)[0])
    outcome = cli("verify", place)
    assert outcome.code == 1
    line = next(line for line in outcome.out.splitlines() if "chunk-crc" in line)
    assert "(0, 0)" in line
    assert "'layers.0.weight'" in line
    assert "rank 0" in line
    found = cli("verify", "--json", "--hashes", place).json
    assert (found["ok"], found["damage"], found["notes"]) == (False, 1, 1)
    assert {f["kind"]: (f["key"], f["chunk"], f["rank"]) for f in found["findings"]} == {
        "foreign": (None, None, None),
        "chunk-crc": ("layers.0.weight", [0, 0], 0),
    }
    assert cli("verify", place, "counts").code == 0
    assert cli("verify", place, "layers.0").code == 1  # a prefix, as in `ls`
    assert "no key matches" in cli.refused("verify", place, "nothing")
    (place / "zarr.json").write_text("{")
    assert cli("verify", place).code == 1


ROOT = Path(__file__).parents[3]
TOLD = re.compile(r'(?:log_event\(\s*\w+,|(?:steps|self)\.log\()\s*"(\w+)"')


def events(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if hasattr(record, "event")]


def test_events_are_listed() -> None:
    sources = (file.read_text() for file in (ROOT / "shardstore").rglob("*.py"))
    told = {event for source in sources for event in TOLD.findall(source)}
    assert told == set(EVENTS)


def test_a_verification_is_logged(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(place / "counts" / "c.0")
    caplog.set_level(logging.INFO, "shardstore")
    result = verify(StoredCheckpoint(Location.of(place)), lambda finding: None)
    begin, end = events(caplog)
    assert (begin.event, begin.url) == ("verify_begin", str(place))
    assert (end.event, end.url, end.damage, end.notes) == ("verify", str(place), 1, 0)
    assert (end.arrays, end.chunks, end.bytes) == (result.arrays, result.chunks, result.bytes)
    assert end.seconds >= 0
    assert end.bytes_per_second > 0


def test_a_conversion_is_logged(
    pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shardstore")
    target = tmp_path / "m.safetensors"
    convert(pristine, target)
    begin, end = events(caplog)
    assert (begin.event, end.event) == ("convert_begin", "convert")
    for record in (begin, end):
        assert (record.url, record.source) == (str(target), str(pristine))
        assert (record.source_format, record.target_format) == ("shardstore", "safetensors")
    size = sum(value.nbytes for value in values().values())
    assert (end.tensors, end.bytes, end.resumed_bytes) == (len(values()), size, 0)
    assert end.verified is True
