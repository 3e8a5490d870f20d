"""An export that dies or fails at any moment leaves no model that a reader takes for whole."""

from __future__ import annotations

import gc
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from shardstore import hf
from shardstore.errors import CheckpointExistsError, CheckpointingException, StorageError
from shardstore.hf.files import FileLayout
from shardstore.hf.places import place_for
from shardstore.storage.format.documents import array_of_one_chunk
from shardstore.storage.stores.location import Location
from testing.gcs_server import GcsServer
from testing.s3_proxy import Fault, FaultProxy, Rule
from testing.s3_servers import S3Server
from tests.helpers.deaths import alone, dies
from tests.helpers.scenarios import files_at_most

BOTH = [
    pytest.param(True, id="several files"),
    pytest.param(False, id="one file", marks=pytest.mark.long),
]
INDEX = "model.safetensors.index.json"
RECORD = ".shardstore-uploads.json"


def export(
    place: str, version: int, options: Any = None, several: bool = True, overwrite: bool = True
) -> None:
    """Version 1 has more files than version 2."""
    state = {f"w{n}": torch.full((10,), float(version)) for n in range(4 - version)}
    hf.save(
        state,
        place,
        file_bytes=40 if several else 2**30,
        overwrite=overwrite,
        durable=False,
        files={"config.json": str(version)},
        storage_options=options,
    )


def version_of(place: Location) -> int | None:
    """The version that a reader finds, every tensor of it; None if there is no model."""
    names = place.listing()
    if "config.json" not in names:
        return None
    if "model.safetensors" in names:
        found = load(place.read("model.safetensors"))
    elif INDEX in names:
        weight_map = json.loads(place.read(INDEX))["weight_map"]
        found = {key: load(place.read(file))[key] for key, file in weight_map.items()}
    else:
        return None
    versions = {float(value) for tensor in found.values() for value in tensor}
    (version,) = versions
    assert len(found) == 4 - version
    assert place.read("config.json") == str(int(version)).encode()
    return int(version)


def every_death(folder: str, several: bool) -> int:
    """The number of moments of an export, after a death at each."""
    place = Path(folder, "models", "m")
    died, moment = True, -1
    while died:
        moment += 1
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        export(str(place), 1)
        (place / "README.md").write_text("mine")
        died = dies(lambda: export(str(place), 2, several=several), moment, str(place.parent))
        found = version_of(Location.of(place))
        assert found in ((1, 2) if died else (2,)), moment
        export(str(place), 2, several=several)
        assert version_of(Location.of(place)) == 2
        weights = {path.name for path in place.glob("*.safetensors")}
        assert len(weights) == (2 if several else 1), (moment, weights)
        assert (place / "README.md").read_text() == "mine", moment
        assert [path.name for path in place.parent.iterdir()] == ["m"], moment
    return moment


@pytest.mark.parametrize("several", BOTH)
def test_a_death_at_any_moment_in_a_folder(tmp_path: Path, several: bool) -> None:
    assert alone(every_death, str(tmp_path), several) > 10


def _uploads(server: S3Server, bucket: str) -> list[str]:
    fs = Location.of(f"s3://{bucket}/x", server.storage_options).remote
    found = fs.call("call_s3", "list_multipart_uploads", Bucket=bucket)
    return [upload["UploadId"] for upload in found.get("Uploads") or []]


def refusing(
    proxy: FaultProxy, moment: int, count: int | None, *exported: Any
) -> tuple[bool, bool]:
    """Whether an export fails whose requests are refused from a moment on, and whether any was."""
    proxy.rules[:] = [Rule(fault=Fault.DENIED, skip=moment, count=count)]
    failed = False
    try:
        export(*exported)
    except CheckpointingException:
        failed = True
    refused = proxy.rules[0].hits > 0
    proxy.rules.clear()
    return failed, refused


@pytest.mark.parametrize("several", BOTH)
def test_a_failure_at_any_request(s3_server: S3Server, several: bool) -> None:
    """The store refuses everything from a request on, as it does for a process that is gone."""
    bucket = s3_server.new_bucket()
    place = Location.of(f"s3://{bucket}/m", s3_server.storage_options)
    fs = place.remote
    theirs = fs.call("call_s3", "create_multipart_upload", Bucket=bucket, Key="m/theirs")
    known: set[str] = set()
    orphans = 0
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        for moment in itertools.count():
            export(place.url, 1, s3_server.storage_options)
            failed, refused = refusing(proxy, moment, None, place.url, 2, options, several)
            found = version_of(place)
            assert found in ((None, 1, 2) if failed else (2,)), moment
            export(place.url, 2, s3_server.storage_options, several)
            assert version_of(place) == 2
            names = [name for name in place.listing() if name.endswith(".safetensors")]
            assert len(names) == (2 if several else 1), (moment, names)
            assert RECORD not in place.listing()
            left = {*_uploads(s3_server, bucket)} - {theirs["UploadId"]}
            orphans += len(left - known)
            known |= left
            if not refused:
                break
    assert moment > 8
    assert theirs["UploadId"] in _uploads(s3_server, bucket)
    # One upload for each file may have begun when its record could not be written.
    assert orphans <= (2 if several else 1)


@pytest.mark.parametrize(
    ("several", "count"), [(True, None), (True, 1), (False, 1)], ids=["died", "failed", "one file"]
)
def test_a_new_model_is_saved_again_without_overwrite(
    s3_server: S3Server, several: bool, count: int | None
) -> None:
    """An export that died or failed left nothing in the way, or a whole model, which stays."""
    bucket, options = s3_server.new_bucket(), s3_server.storage_options
    outcomes = set()
    with FaultProxy(s3_server.endpoint_url) as proxy:
        for moment in itertools.count():
            place = Location.of(f"s3://{bucket}/{moment}", options)
            through = s3_server.at(proxy.endpoint_url).storage_options
            failed, refused = refusing(proxy, moment, count, place.url, 2, through, several)
            found = version_of(place)
            outcomes.add((failed, found))
            if found is None:
                if count:
                    assert [n for n in place.listing() if n.endswith(".safetensors")] == [], moment
                export(place.url, 2, options, several, overwrite=False)
            else:
                with pytest.raises(CheckpointExistsError):
                    export(place.url, 1, options, several, overwrite=False)
            assert version_of(place) == 2, moment
            assert RECORD not in place.listing()
            if not refused:
                break
    assert outcomes == {(True, None), (False, 2)}
    assert moment >= 8


def test_the_record_of_another_export_and_its_files_stay(s3_server: S3Server) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    arrays = [array_of_one_chunk(key, (8,), "uint8") for key in "ab"]
    layout = FileLayout.of(arrays, 8, {})
    late = place_for(place, overwrite=False, durable=False)
    late.begin(layout)
    record = json.dumps(dict.fromkeys(layout.heads, "another")).encode()
    place.write(RECORD, record)
    place.write(next(iter(layout.heads)), b"completed")
    late.abandon()
    assert place.read(RECORD) == record
    assert place.read(next(iter(layout.heads))) == b"completed"


@pytest.mark.parametrize(
    ("scheme", "at_once", "several"),
    [("s3", False, True), ("s3", True, True), ("memory", True, True), ("memory", True, False)],
)
def test_an_export_during_which_another_one_begins_is_told(
    s3_server: S3Server, scheme: str, at_once: bool, several: bool
) -> None:
    """If both look for the record before there is one, their files could be mixed."""
    bucket, options = s3_server.new_bucket(), {"s3": s3_server.storage_options}.get(scheme)
    place = Location.of(f"{scheme}://{bucket}/m", options)
    layout = FileLayout.of(
        [array_of_one_chunk(f"w{n}", (10,), "float32") for n in range(3)], 40, {}
    )
    late = place_for(place, overwrite=False, durable=False)
    late.join(late.begin(layout), layout)
    if at_once:
        place.delete(RECORD)
    export(place.url, 1, options, several, overwrite=False)

    def go_on() -> None:
        for name, size in layout.sizes.items():
            late.write(name, 0, [memoryview(bytes(size))])
        late.commit(layout, [late.finish()], ())

    with pytest.raises(StorageError, match=r"another export.*init_process_group"):
        go_on()
    with pytest.raises(StorageError, match=r"another export"):
        late.commit(layout, [late.finish()], ())
    late.abandon()
    assert version_of(place) == 1
    assert RECORD not in place.listing()


def test_a_file_whose_end_is_missing_is_not_completed_later(gcs_server: GcsServer) -> None:
    """A rank that failed in the middle of it; fsspec's files complete themselves as garbage."""
    place = Location.of(f"gs://{gcs_server.new_bucket()}/m", gcs_server.storage_options)
    layout = FileLayout.of([array_of_one_chunk(key, (99,), "uint8") for key in "ab"], 99, {})
    failed = place_for(place, overwrite=False, durable=False)
    failed.join(failed.begin(layout), layout)
    failed.write(next(iter(layout.heads)), 0, [memoryview(bytes(50))])
    failed.finish()
    del failed
    gc.collect()
    assert place.listing() == [RECORD]


def test_a_file_of_another_program_in_the_place_of_an_open_upload_stays(
    s3_server: S3Server,
) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    layout = FileLayout.of([array_of_one_chunk(key, (8,), "uint8") for key in "ab"], 8, {})
    place_for(place, overwrite=False, durable=False).begin(layout)  # and dies
    theirs = next(iter(layout.heads))
    place.write(theirs, b"theirs")
    with pytest.raises(CheckpointExistsError, match=theirs):
        export(place.url, 1, s3_server.storage_options, overwrite=False)
    assert place.read(theirs) == b"theirs"


def test_an_upload_that_the_store_does_not_say_to_be_complete_is_looked_for(
    s3_server: S3Server,
) -> None:
    """A proxy may cut an answer that the store began before it had done the work."""
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        proxy.add(Fault.HOLLOW, methods=("POST",), path="uploadId")
        with pytest.raises(StorageError, match=r"/model-00001-of-00003.*export again"):
            export(place.url, 1, options)
    assert version_of(place) is None


def test_an_upload_with_checksums_is_completed_with_those_of_its_parts(
    s3_server: S3Server,
) -> None:
    """Amazon refuses it without them, in a bucket with an object lock too."""
    place = f"s3://{s3_server.new_bucket()}/m"
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        sums = {"s3_additional_kwargs": {"ChecksumAlgorithm": "SHA256"}}
        export(place, 1, {**options, **sums}, several=False)
        (completed,) = proxy.passed("POST", "uploadId")
    assert b"<ChecksumSHA256>" in completed.body


def test_a_record_that_cannot_be_removed_is_no_failure(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        proxy.rules[:] = [Rule(fault=Fault.DENIED, methods=("POST",), path=r"\?delete", count=None)]
        export(place.url, 1, options)
        assert proxy.rules[0].hits > 0
    assert version_of(place) == 1
    assert re.search(rf"/m: .* committed.*{RECORD} .*AccessDenied", caplog.text)
    export(place.url, 2, s3_server.storage_options)
    assert version_of(place) == 2
    assert RECORD not in place.listing()


def test_lost_answers_and_busy_stores_do_not_hinder(s3_server: S3Server) -> None:
    busy = Fault.SLOW_DOWN, Fault.TOO_MANY
    faults = itertools.cycle([Fault.DROP_ANSWER, Fault.RESET_BEFORE, *busy])
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        for moment, fault in zip(range(1, 24, 2), faults, strict=False):
            proxy.rules[:] = [Rule(fault=fault, skip=moment)]
            export(place.url, 1, options)
            assert version_of(place) == 1


@pytest.mark.parametrize("loads", [False, True])
def test_exports_and_loads_wait_for_an_asynchronous_export_to_the_same_place(
    s3_server: S3Server, loads: bool
) -> None:
    """Else the older weights would be committed last or loaded, or its uploads be taken for those
    of an export that died."""
    place = Location.of(f"s3://{s3_server.new_bucket()}/m", s3_server.storage_options)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        options = s3_server.at(proxy.endpoint_url).storage_options
        proxy.add(Fault.DELAY, methods=("PUT",), path="partNumber", delay_s=0.5, count=None)
        state = {"w": torch.ones(10)}
        handle = hf.async_save(state, place.url, storage_options=options)
        if loads:
            hf.load(wanted := {"w": torch.zeros(10)}, place.url, storage_options=options)
            assert wanted["w"].eq(1).all()
        else:
            export(place.url, 2, options)
            assert version_of(place) == 2
        assert handle.done()
        assert handle.exception() is None


def test_a_full_disk_leaves_the_old_model(tmp_path: Path) -> None:
    export(str(tmp_path / "m"), 1)
    with pytest.raises(CheckpointingException, match="m"), files_at_most(50):
        export(str(tmp_path / "m"), 2)
    assert version_of(Location.of(tmp_path / "m")) == 1
    assert load_file(tmp_path / "m" / "model-00001-of-00003.safetensors").keys() == {"w0"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
