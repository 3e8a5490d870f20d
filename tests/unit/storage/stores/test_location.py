"""What a location takes for a path, for a URL, and for neither."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import ArgumentError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.saving.run import SaveRequest
from shardstore.saving.session import SplitState
from shardstore.storage.commit.checkpoints import latest, sweep
from shardstore.storage.commit.publish import RootContent
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores import folder
from shardstore.storage.stores.location import Location


def state() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}


CALLS: tuple[Callable[[Any], object], ...] = (
    lambda place: shardstore.save(state(), place),
    lambda place: shardstore.async_save(state(), place),
    lambda place: shardstore.load(state(), place),
    shardstore.open,
    shardstore.CheckpointManager,
    StorageWriter,
    latest,
    sweep,
    shardstore.delete_checkpoint,
)
NO_NAMES = "part between slashes that is empty, '.' or '..'"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/runs//step-1", NO_NAMES),
        ("s3://b/./x", NO_NAMES),
        ("gs://b/run/../x", NO_NAMES),
        # Clients read these differently.
        ("s3://b/a?versionId=3", "give 's3://b/a'"),
        ("s3a://b/run/a?versionId=", "give 's3a://b/run/a'"),
        ("s3://b/a?x=1&versionId=3/step-1", "give 's3://b/a'"),
        ("s3://b?versionId=3", "give 's3://b'"),
        ("gs://b/a?generation=17", "give 'gs://b/a'"),
        ("az://b/a?versionid=2020-01-01", "give 'az://b/a'"),
        ("s3:///b/a", "give 's3://b/a'"),
        ("gs:////b", "give 'gs://b'"),
        ("simplecache::memory://x/s", "chain of URLs"),
        ("zip://s::file:///x.zip", "chain of URLs"),
        ("zip::x.zip", "chain of URLs"),
    ],
)
def test_a_url_that_is_not_one_place_is_refused_by_every_call(url: str, says: str) -> None:
    for call in CALLS:
        with pytest.raises(ArgumentError, match=re.escape(says)):
            call(url)


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


@pytest.mark.parametrize(
    "url", ["s3://AKNOBODY:of/a+secret@bucket/run", "s3a://AKNOBODY:of/a+secret@bucket"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    for call in (*CALLS, lambda place: latest(f"memory::{place}")):
        with pytest.raises(ArgumentError) as caught:
            call(url)
        said = f"{caught.value!r} {vars(caught.value)} {caught.value.__cause__!r}"
        assert "of/a+secret" not in said
        assert "AKNOBODY" not in said


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
