"""Locations: what is a path, a URL, or neither; folders and object stores give the same answers."""

from __future__ import annotations

import os
import pickle
import uuid
from datetime import timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, DamagedCheckpointError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.saving.run import SaveRequest
from shardstore.saving.session import SplitState
from shardstore.storage.commit.checkpoints import latest, sweep
from shardstore.storage.commit.publish import RootContent
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores import folder
from shardstore.storage.stores.folder import LocalFolder, fsync
from shardstore.storage.stores.location import Location
from shardstore.storage.stores.prefix import ObjectPrefix
from tests.helpers.range_server import Quiet, answering


def state() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}


def test_a_folder_with_the_name_of_a_store_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL that was made a path is none: it is refused."""
    monkeypatch.chdir(tmp_path)
    for made in (Path("memory://run/step-1"), "memory:/run/step-1"):
        with pytest.raises(ArgumentError, match="memory://"):
            shardstore.save(state(), made)
        assert os.listdir(tmp_path) == []
    shardstore.save(state(), "./memory:/run/step-1")
    assert shardstore.check_is_distributed_checkpoint(tmp_path / "memory:/run/step-1")


def test_a_whole_store_is_a_place() -> None:
    step = f"step-{10**40}"  # the newest in a store that other tests also use
    shardstore.save(state(), f"memory://{step}")
    try:
        assert Location.of("memory://").url == "memory://"
        assert latest("memory://") == f"memory:///{step}"
        assert sweep("memory://", older_than=timedelta(days=300)) == []
    finally:
        shardstore.delete_checkpoint(f"memory://{step}")


def test_a_file_system_that_can_not_be_had_is_an_error_of_ours() -> None:
    with pytest.raises(StorageError, match="connecting to ftp://"):
        shardstore.load(state(), "ftp://127.0.0.1:1/x")
    with pytest.raises(StorageError, match="storage options do not fit"):
        shardstore.load(state(), "s3://b/x", storage_options={"config_kwargs": "none"})


def test_calls_and_places_do_not_show_their_options() -> None:
    options = {"key": "AKOFATRAINER00000", "secret": "of-a-trainer-123456"}
    place = Location.of("s3://bucket/x", options)
    given: Any = SaveOptions(storage_options=options)
    about: Any = RootContent(common_backend=None)
    for one in (
        SplitState(
            target=place, options=given, shards=[], common={}, strategies=given, about=about
        ),
        SaveRequest(state={}, checkpoint_dir=place, ranks=Ranks(), options=given, strategies=None),
        given,
        place,
        StorageWriter("s3://b/x", storage_options=options),
    ):
        assert "of-a-trainer" not in f"{one!r} {one}"
    with pytest.raises(ArgumentError) as caught:
        shardstore.load({}, "s3://b/x", storage_options="secret=of-a-trainer-123456")  # type: ignore[arg-type]
    assert "of-a-trainer" not in str(caught.value)


def test_a_pickled_writer_of_dcp_still_reaches_its_store() -> None:
    """DCP hands it to the process that saves in the background."""
    options = {"key": "AKOFATRAINER00000", "secret": "of-a-trainer-123456"}
    for kind in (StorageWriter, StorageReader):
        copied = pickle.loads(pickle.dumps(kind("s3://bucket/x", storage_options=options)))
        assert copied._place.options == options


def test_a_range_beyond_the_end_of_a_file(tmp_path: Path) -> None:
    """As the metadata of a damaged checkpoint may ask for."""
    (tmp_path / "a").write_bytes(b"0123")
    ranges = [(0, 3), (2, 9), (4, 5), (9, 2**70), (2**70, 2**71), (3, 1)]
    found = [Location.of(tmp_path).read_range("a", *one) for one in ranges]
    assert found == [b"012", b"23", b"", b"", b"", b""]


@pytest.mark.parametrize(
    ("size_mib", "count", "threads"),
    [(0, 1, 1), (63, 1, 1), (128, 4, 3), (1024, 32, 8), (1024, 10**5, 1)],
)
def test_one_thread_reads_small_files(
    monkeypatch: pytest.MonkeyPatch, size_mib: int, count: int, threads: int
) -> None:
    monkeypatch.setattr(folder, "default_threads", lambda: 8)
    assert folder.LocalFolder("/").threads(size_mib * 2**20, count) == threads


@pytest.fixture(params=["folder", "prefix"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "folder":
        return Location.of(tmp_path / "run" / "step-1")
    return Location.of(f"memory://{uuid.uuid4().hex}/step-1")


def test_the_url_chooses_the_class(tmp_path: Path) -> None:
    assert type(Location.of(tmp_path)) is type(Location.of(f"file://{tmp_path}")) is LocalFolder
    assert type(Location.of("s3://bucket/x")) is type(Location.of("memory://x")) is ObjectPrefix
    place = Location.of("s3://bucket/x", {"key": "k"})
    assert place.child("a", "b").options == place.at("s3://bucket/y").options == {"key": "k"}
    assert Location.of(tmp_path, {"key": "k"}).options == {"key": "k"}  # for exports from there
    again = pickle.loads(pickle.dumps(place))
    assert (type(again), again.url, again.options) == (ObjectPrefix, place.url, {})


def test_what_was_written_is_read(place: Location) -> None:
    assert place.read_range("a/b") is None
    assert place.read_if_there("a/b") is None
    with pytest.raises(FileNotFoundError):
        place.read("a/b")
    place.write("a/b", b"0123456789")
    assert place.read("a/b") == b"0123456789"
    assert place.read_if_there("a") is None
    assert place.read_range("a/b", 3, 5) == b"34"
    assert place.read_range("a/b", 8, 20) == b"89"
    with pytest.raises(DamagedCheckpointError, match="more than 4 bytes"):
        place.read("a/b", 4)
    place.replace("a/b", b"new")
    assert place.read_many(["a/b", "none"], [3, None]) == [b"new", None]
    assert place.stamp("none") is None
    assert (place.stamp("a/b") or (0,))[0] == place.sizes(["a/b", "none"])["a/b"] == 3
    assert "none" not in place.sizes(["a/b", "none"])


def test_one_of_two_creates_a_document(place: Location) -> None:
    assert place.create("claim", b"first")
    assert not place.create("claim", b"second")
    assert place.read("claim") == b"first"


def test_names_are_listed(place: Location) -> None:
    assert place.listing() == place.walk() == []
    for name in ("zarr.json", "w/c.0", "w/deep/x"):
        place.write(name, b"x")
    assert place.listing() == ["w", "zarr.json"]
    assert place.listing("w") == ["c.0", "deep"]
    assert sorted(place.walk()) == ["w/c.0", "w/deep/x", "zarr.json"]
    assert sorted(place.walk("w")) == ["w/c.0", "w/deep/x"]
    assert sorted(place.walk_all()) == sorted(place.walk())
    assert place.exists("w")
    assert place.exists("w/c.0")
    assert not place.exists("none")


def test_documents_and_their_folders_are_deleted(place: Location) -> None:
    for name in ("w/c.0", "w/c.1", "b/c.0", "b/shard_0_1.pt"):
        place.write(name, b"x")
    place.delete_all(["w/c.0", "w/c.1", "b/c.0"], ["w", "b"])
    assert place.walk() == ["b/shard_0_1.pt"]
    assert place.listing() == ["b"]
    place.delete("none")
    place.delete("b")
    assert place.listing() == []


def test_a_file_is_copied_unless_there_is_one(place: Location) -> None:
    source, target = place.child("base"), place.child("new")
    source.write("w/c.0", b"base")
    target.write("zarr.json", b"")
    assert target.shares_store(source)
    assert target.copy_from(source, "w/c.0")
    assert target.read("w/c.0") == b"base"
    with pytest.raises(FileNotFoundError):
        target.copy_from(source, "w/c.1")


def test_files_are_not_copied_between_stores(tmp_path: Path) -> None:
    folder, prefix = Location.of(tmp_path), Location.of("memory://x")
    assert not folder.shares_store(prefix)
    assert not prefix.shares_store(folder)


def test_a_finished_file_is_published(place: Location) -> None:
    place.write("work", b"whole")
    place.child("model").publish(place.child("work"))
    assert place.read("model") == b"whole"


def test_a_place_is_inside_of_itself_and_those_above(place: Location) -> None:
    place.write("w/c.0", b"x")
    assert place.is_within(place)
    assert place.child("w").is_within(place)
    assert place.child("none", "new").is_within(place)
    assert not place.is_within(place.child("w"))
    assert not place.child("w2").is_within(place.child("w"))


def test_a_folder_may_be_missing_and_a_prefix_not(place: Location) -> None:
    assert place.is_missing() == place.is_local
    place.write("x", b"")
    assert not place.is_missing()
    assert place.is_dir() == place.is_local
    assert place.child("x").is_file() == place.is_local


@pytest.mark.parametrize(
    ("url", "above"),
    [
        ("/a/b", "/a"),
        ("/a", "/"),
        ("/", None),
        ("s3://bucket/a/b", "s3://bucket/a"),
        ("s3://bucket/a", "s3://bucket"),
        ("s3://bucket", None),
    ],
)
def test_the_place_above(url: str, above: str | None) -> None:
    found = Location.of(url).parent()
    assert (None if found is None else found.url) == above


def test_a_folder_has_no_client_of_object_stores(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is a local folder"):
        _ = Location.of(tmp_path).remote


def test_errors_of_a_disk_are_damage_and_those_of_a_store_not(place: Location) -> None:
    assert place.is_damage(StorageError("no answer")) == place.is_local
    assert place.is_damage(ValueError("wrong bytes"))


def test_a_file_that_cannot_be_looked_at_is_an_error_and_not_missing(tmp_path: Path) -> None:
    """A link to itself is one for every user, as is a folder without permission for some."""
    (tmp_path / "a").symlink_to("a")
    place = LocalFolder(str(tmp_path))
    for look in (place.exists, place.stamp, lambda name: place.sizes([name])):
        with pytest.raises(StorageError, match=r"looking for .*/a/b failed: Too many levels"):
            look("a/b")


def test_a_file_system_without_a_sync_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc has none, as some network file systems. For a file it is an error."""
    fsync("/proc")
    with pytest.raises(OSError, match="Invalid argument"):
        fsync("/proc/self/status")
    monkeypatch.setattr(os, "fsync", lambda _: os.readlink("/dev/null/x"))
    with pytest.raises(NotADirectoryError):  # any other error of the disk, of a folder too
        fsync("/proc")


class Whole(Quiet, SimpleHTTPRequestHandler):
    """Sends whole files, whatever range is asked for, as ``python -m http.server`` does."""


def test_a_web_server_that_sends_whole_files_is_no_damage(tmp_path: Path) -> None:
    state = shardstore.shard({f"w{i}": torch.arange(2**19) + i for i in range(2)})
    small = shardstore.shard({f"w{i}": torch.arange(9) + i for i in range(2)})
    shardstore.save(state, tmp_path / "plain")
    shardstore.save(small, tmp_path / "packed", pack=True)
    with answering(partial(Whole, directory=str(tmp_path))) as url:  # type: ignore[arg-type]
        plain, packed = (shardstore.open(f"{url}/{name}")["w1"] for name in ("plain", "packed"))
        assert plain[7:9].tolist() == [8, 9]
        for array, rows in ((plain, slice(2**18, None)), (packed, slice(None))):
            with pytest.raises(StorageError, match="sends whole files"):
                array[rows]
