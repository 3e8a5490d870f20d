"""`shardstore.dcp.install(asynchronous=True)` under trainers that delete a checkpoint before they
save the next one, as accelerate does with `total_limit=1`."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from shardstore.dcp import install, writer
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS = ("model", "optimizer")


@pytest.fixture
def installed() -> Iterator[None]:
    with install(asynchronous=True, named_writers=True, durable=False):
        yield


def state() -> dict[str, Any]:
    return {"w": torch.ones(4, 3)}


def save(folder: Path, *parts: str) -> None:
    """Save the parts of a checkpoint, and a file of the trainer's own beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts or PARTS:
        dcp.save(state(), storage_writer=FileSystemWriter(folder / part))
    (folder / "scheduler.bin").touch()


def load(folder: Path) -> None:
    for part in PARTS:
        dcp.load(state(), storage_reader=FileSystemReader(folder / part))


def is_complete(folder: Path) -> bool:
    return all(is_checkpoint(Location.of(folder / part)) for part in PARTS)


@pytest.mark.usefixtures("installed")
def test_the_last_checkpoint_is_deleted_when_the_next_one_has_all_of_its_parts(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"
    save(one)
    shutil.rmtree(one)
    assert is_complete(one)
    save(two, "model")
    shutil.rmtree(one)
    assert is_complete(one)
    assert (one / "scheduler.bin").exists()
    save(two, "optimizer")
    shutil.rmtree(one)
    assert not one.exists()
    assert is_complete(two)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("repeats", [True, False], ids=["all", "the newest"])
def test_with_a_limit_of_one_two_checkpoints_are_on_the_disk(tmp_path: Path, repeats: bool) -> None:
    """accelerate deletes all folders that it finds. Another trainer deletes each one once."""
    for number in range(5):
        old = sorted(tmp_path.iterdir())
        for folder in old if repeats else old[-1:]:
            shutil.rmtree(folder)
        assert [is_complete(folder) for folder in tmp_path.iterdir()] == [True] * (number > 0)
        save(tmp_path / f"checkpoint_{number}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint_3", "checkpoint_4"]


@pytest.mark.usefixtures("installed")
def test_the_place_of_a_save_can_be_the_folder_itself(tmp_path: Path) -> None:
    for step in range(3):
        dcp.save(state(), checkpoint_id=tmp_path / f"step-{step}")
        shutil.rmtree(tmp_path / f"step-{step}")
        assert [p.name for p in tmp_path.iterdir()] == [f"step-{step}"]


@pytest.mark.parametrize("theirs", [True, False], ids=["of DCP", "ours"])
def test_the_checkpoint_that_a_run_resumed_from_stays_until_the_next(
    tmp_path: Path, theirs: bool
) -> None:
    """The remains of a killed save are deleted at once, because the run saves there again."""
    resumed, killed = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"
    with install(named_writers=not theirs, durable=False):
        save(resumed)
        save(killed, "model")
    with install(asynchronous=True, named_writers=True, durable=False):
        load(resumed)
        for folder in (resumed, killed):
            shutil.rmtree(folder)
        assert sorted(p.name for p in resumed.iterdir()) == [*PARTS, "scheduler.bin"]
        assert not killed.exists()
        save(killed)
        shutil.rmtree(resumed)
        assert not resumed.exists()


def test_of_several_loaded_checkpoints_the_last_one_stays(tmp_path: Path) -> None:
    """A run loads the one before if the newest cannot be loaded."""
    good, bad = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"
    with install(asynchronous=True, named_writers=True, durable=False):
        save(good)
        save(bad)
    with install(asynchronous=True, named_writers=True, durable=False):
        load(bad)
        load(good)
        for folder in (good, bad):
            shutil.rmtree(folder)
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_1"]


def _no_space(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.usefixtures("installed")
def test_a_failed_save_supersedes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = tmp_path / "checkpoint_1", tmp_path / "checkpoint_2"
    save(one)
    shutil.rmtree(one)
    with monkeypatch.context() as patch:
        save(two, "model")
        shutil.rmtree(tmp_path / "none", ignore_errors=True)  # waits
        patch.setattr("shardstore.storage.commit.folder.os.rename", _no_space)
        save(two, "optimizer")
        with pytest.raises(CheckpointException, match="No space"):
            shutil.rmtree(one)
    shutil.rmtree(one)
    assert is_complete(one)


@pytest.mark.usefixtures("installed")
def test_a_folder_that_the_program_uses_again_stays(tmp_path: Path) -> None:
    one, two, three = (tmp_path / f"checkpoint_{number}" for number in (1, 2, 3))
    save(one)
    shutil.rmtree(one)
    save(one)
    save(two)
    save(three)
    shutil.rmtree(two)  # also what was put off
    assert is_complete(one)
    assert not two.exists()
    shutil.rmtree(three)
    shutil.move(three, two)
    three.mkdir()  # with something else
    save(tmp_path / "checkpoint_4")
    shutil.rmtree(tmp_path / "checkpoint_4")
    assert three.exists()


@pytest.mark.usefixtures("installed")
def test_other_deletions_are_as_before(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    save(run / "checkpoint_1")
    other.mkdir()
    shutil.rmtree(other)
    assert not other.exists()
    with pytest.raises(FileNotFoundError):
        shutil.rmtree(other)
    seen: list[object] = []
    shutil.rmtree(other, onerror=lambda *args: seen.append(args))
    assert seen
    shutil.rmtree(other, True)
    shutil.rmtree(run)  # all checkpoints of a run
    assert not run.exists()
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        save(Path(folder))
        load(Path(folder))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("module", "name"),
    [(shutil, "copytree"), (shutil, "move"), (os, "rename"), (os, "replace")],
)
def test_a_folder_is_copied_or_moved_after_the_end_of_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    goes_on, put_chunks = threading.Event(), writer.put_chunks

    def held(*given: Any) -> None:
        assert goes_on.wait(60)
        put_chunks(*given)

    monkeypatch.setattr(writer, "put_chunks", held)
    save(tmp_path / "new", "model")
    (tmp_path / "other").mkdir()
    getattr(module, name)(tmp_path / "other", tmp_path / "another")  # does not wait
    threading.Timer(0.2, goes_on.set).start()
    getattr(module, name)(tmp_path / "new", tmp_path / "final")
    assert is_checkpoint(Location.of(tmp_path / "final/model"))


@pytest.mark.usefixtures("installed")
def test_a_thread_does_not_delete_the_last_checkpoint_either(tmp_path: Path) -> None:
    one = tmp_path / "checkpoint_1"
    save(one)
    shutil.rmtree(tmp_path / "none", ignore_errors=True)  # waits
    thread = threading.Thread(target=shutil.rmtree, args=(one,))
    thread.start()
    thread.join()
    assert is_complete(one)
