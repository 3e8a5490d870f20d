"""The checkpoint manager in a world of one: names, deletion, damage, what dead programs left."""

from __future__ import annotations

import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore import (
    CheckpointManager,
    ShardedObject,
    ShardedTensor,
    delete_checkpoint,
    latest,
)
from shardstore.errors import (
    CheckpointExistsError,
    DamagedCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardstore.manager.checkpoint_manager import BEHIND
from shardstore.manager.steps import Steps, what_is_missing
from shardstore.progress import Progress
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.managed import SIZE, managed, restored, state_of, wanted, warnings_of
from tests.helpers.programs import run_text
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.users import another_user, folder_for_all


def test_saved_steps_are_restored(place: tuple[str, dict[str, Any]]) -> None:
    with managed(place) as manager:
        assert manager.latest() is None
        assert manager.restore(wanted()[0]) is None
        record = manager.save(2, state_of(2), metrics={"loss": 0.5})
        manager.save(10, state_of(10))
        assert record["stored_bytes"] == 64 * 32 * 4 + 4
        assert manager.steps() == [2, 10]
        assert manager.latest() == 10
        state, data = wanted()
        found = restored(manager, state)
        assert (found.step, found.damaged, found.url) == (10, (), manager.url(10))
        assert found.state["iteration"] == 10
        assert found.state.keys() == state_of(10).keys()  # a model takes no others
        assert data.eq(10).all()
        found = restored(manager, state, 2)
        assert found.step == 2
        assert data.eq(2).all()
        with pytest.raises(CheckpointExistsError):
            manager.save(10, state_of(11))
        manager.save(10, state_of(11), overwrite=True)
        assert restored(managed(place), state).step == 10
        assert data.eq(11).all()
        with pytest.raises(NotACheckpointError, match=r"no step 3 .*2, 10"):
            manager.restore(state, 3)


def test_old_steps_go_and_others_folders_stay(place: tuple[str, dict[str, Any]]) -> None:
    root = Location.of(*place)
    with managed(place, keep_last=2, keep_every=40, best=1, metric="loss") as manager:
        # Somebody's own save, names that are almost ours, and a file.
        options = {"storage_options": place[1] or None}
        shardstore.save(state_of(1), f"{place[0]}/step-1", **options)
        shardstore.save(state_of(1), f"{place[0]}/step-010", **options)
        shardstore.save(state_of(1), f"{place[0]}/other-10", **options)
        root.write("notes.txt", b"mine")
        losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 9.0, 50: 8.0, 60: float("nan")}
        for step, loss in losses.items():
            manager.save(step, state_of(step), metrics={"loss": torch.tensor(loss)})
            assert manager.wait(60)
        assert manager.steps() == [1, 20, 40, 50, 60]
    names = ["notes.txt", "other-10", "step-010", "step-1"]
    assert root.listing() == [*names, "step-20", "step-40", "step-50", "step-60"]
    # Nothing but what is on the store tells another process the metrics, the NaN included.
    again = managed(place, keep_last=1, best=1, metric="loss", mode="max")
    again.save(70, state_of(70))
    again.close()
    assert again.steps() == [1, 40, 70]


DAMAGE: list[tuple[str, bytes | None, str]] = [
    ("step-3/w/c.0.0", b"\0" * (64 * 32 * 4 + 4), "chunk (0, 0) of key 'w'"),
    ("step-3/w/c.0.0", None, "chunk (0, 0) of key 'w' is missing"),
    ("step-3/common.pt", None, "common.pt is missing"),
    ("step-3/common.pt", b"PK\3\4 no more", "common.pt"),
    ("step-3/zarr.json", b'{"zarr_format": 3, ', "zarr.json"),
    ("step-3/metadata.json", b"{", "metadata.json"),
]


@pytest.mark.parametrize(
    ("place", "name", "data", "named"),
    [*(("disk", *case) for case in DAMAGE), *(("s3", *case) for case in DAMAGE[1:3])],
    indirect=["place"],
)
def test_damage_is_passed_over_loudly(
    place: tuple[str, dict[str, Any]],
    name: str,
    data: bytes | None,
    named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = managed(place, keep_last=1, keep_every=1)
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    manager.close()
    root = Location.of(*place)
    if data is None:
        root.delete(name)
    else:
        root.write(name, data)
    state, tensor = wanted()
    found = restored(manager, state)
    assert (found.step, found.damaged) == (2, (3,))
    assert tensor.eq(2).all()
    assert found.state["iteration"] == 2
    (text,) = warnings_of(caplog)
    assert "step 3" in text
    assert named in text
    # Training goes on from 2 and comes by 3 again, which takes the damaged one's place.
    manager.save(3, state_of(33))
    manager.close()
    found = restored(managed(place), state)
    assert (found.step, found.damaged) == (3, ())
    assert tensor.eq(33).all()


@pytest.mark.parametrize("place", ["disk", "s3"], indirect=True)
def test_a_step_that_is_deleted_during_a_restore_is_not_called_damaged(
    place: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    manager = managed(place)
    for step in (1, 2):
        manager.save(step, state_of(step))
    doomed = [Location.of(*place).child("step-2")]

    def progress(event: Progress) -> None:
        while doomed:
            delete_checkpoint(doomed.pop())

    state, tensor = wanted()
    found = manager.restore(state, progress=progress)
    assert found is not None
    assert (found.step, found.damaged) == (1, ())
    assert tensor.eq(1).all()
    (text,) = warnings_of(caplog)
    assert "step 2" in text
    assert "does not exist any more" in text
    assert "damaged" not in text


def restored_with_memory_for_a_file_but_not_for_its_values(
    rank: int, world_size: int, root: str, file_bytes: int
) -> None:
    manager = CheckpointManager(root)
    assert restored(manager, wanted()[0], 1).step == 1
    pages, *_ = Path("/proc/self/statm").read_text().split()
    most = int(pages) * os.sysconf("SC_PAGE_SIZE") + file_bytes * 3 // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with pytest.raises(MemoryError):
        manager.restore(wanted()[0])


def test_a_process_without_memory_passes_no_step_over(tmp_path: Path) -> None:
    large = torch.zeros(2**25)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_of(1))
        manager.save(2, {**state_of(2), "values": large})
    run_ranks(
        restored_with_memory_for_a_file_but_not_for_its_values, 1, str(tmp_path), large.nbytes
    )


def test_verify_first_finds_what_no_rank_asks_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        other = ShardedTensor.from_rank_offsets("other", torch.ones(4))
        manager.save(step, {**state_of(step), "other": other})
    (tmp_path / "step-2/other/c.0").write_bytes(bytes(20))
    state, _ = wanted()
    assert restored(manager, state).step == 2
    events: list[Progress] = []
    found = restored(manager, state, verify_first=True, progress=events.append)
    assert found.step == 1
    assert "'other'" in warnings_of(caplog)[-1]
    assert [(e.operation, e.phase) for e in events if e.finished] == [
        ("verify", "failed"),
        ("verify", "done"),
        ("load", "done"),
    ]
    with pytest.raises(DamagedCheckpointError, match="'other'"):
        manager.restore(state, 2, verify_first=True)


def test_content_metadata_of_any_type_are_restored(tmp_path: Path) -> None:
    """A step that no manager saved may have a value of this name."""
    shardstore.save({"content_metadata": 5, **state_of(1)}, tmp_path / "step-1")
    assert restored(CheckpointManager(tmp_path), wanted()[0]).state["content_metadata"] == 5


def test_no_whole_step_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    for step in (1, 2):
        (tmp_path / f"step-{step}/w/c.0.0").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"step 2: .*step 1: "):
        manager.restore(wanted()[0])
    with pytest.raises(DamagedCheckpointError, match="missing"):
        manager.restore(wanted()[0], 2)


def test_a_run_that_begins_anew_beside_steps_of_dcp_is_told(
    place: tuple[str, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, options = place
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    root = Location.of(url, options or None)
    for step in (9, 100):
        root.child(f"step-{step}").write(".metadata", (tmp_path / "dcp/.metadata").read_bytes())
    root.write("step-200", b"")
    with managed(place, keep_last=1) as manager:
        assert manager.restore(state_of(0)) is None
        assert latest(url, storage_options=options or None) is None
        texts = warnings_of(caplog)
        assert [text.partition(": ")[0] for text in texts] == [manager.url(100)] * 2
        assert all("shardstore convert" in text for text in texts)
        manager.save(300, state_of(300))
        manager.save(301, state_of(301))
    assert len(warnings_of(caplog)) == 2
    assert root.child("step-100").exists(".metadata")


def gated(manager: CheckpointManager) -> threading.Event:
    """Keep the background busy until the event is set."""

    def work() -> None:
        assert gate.wait(60)

    gate = threading.Event()
    manager._later(work)
    return gate


@pytest.mark.parametrize(
    ("name", "said"),
    [("w/c.0.0", "has 5 bytes, not 8196"), ("rng/shard_0_1.pt", "shard_0_1.pt is missing")],
)
def test_the_newest_whole_step_is_never_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, said: str
) -> None:
    """The step that would be kept lost a file right after its commit."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state_of(1))
    manager.close()
    gate = gated(manager)
    manager.save(2, {**state_of(2), "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,))})
    lost = tmp_path / "step-2" / name
    lost.write_bytes(b"short") if "bytes" in said else lost.unlink()
    gate.set()
    manager.close()
    assert manager.steps() == [1, 2]
    assert said in warnings_of(caplog)[-1]
    manager.save(3, state_of(3))
    manager.close()
    assert manager.steps() == [3]


def test_a_metric_that_no_step_has_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a wrong name deletes the best step, and nobody hears of it."""
    manager = CheckpointManager(tmp_path, keep_last=1, best=1, metric="val_loss")
    for step in (1, 2):
        manager.save(step, state_of(step), metrics={"loss": 1.0, "accuracy": 0.5})
    manager.close()
    (text,) = warnings_of(caplog)
    assert "best=1 keeps no step" in text
    assert "'val_loss'" in text
    assert "step 1 has accuracy, loss" in text
    caplog.clear()
    with CheckpointManager(tmp_path, best=1, metric="loss") as manager:
        manager.save(3, state_of(3))
    assert manager.steps() == [2, 3]
    assert warnings_of(caplog) == []


def test_incomplete_steps_are_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three steps lose a chunk before the background work; each of its three jobs sees them all."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state_of(1))
    manager.close()
    gate = gated(manager)
    for step in (2, 3, 4):
        manager.save(step, state_of(step))
        (tmp_path / f"step-{step}/w/c.0.0").write_bytes(b"short")
    gate.set()
    manager.close()
    (text,) = warnings_of(caplog)
    assert text.startswith("3 incomplete step(s) not counted as kept: step 4: ")
    assert "; step 3: " in text
    assert "; step 2: " in text
    assert manager.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("later", [False, True])
def test_deletions_that_are_slower_than_saves_fill_no_disk(tmp_path: Path, later: bool) -> None:
    most, slow = 0, lambda _: time.sleep(0.02)  # for each step that there is
    with CheckpointManager(tmp_path, keep_last=1, keep_if=slow) as manager:
        for step in range(30):
            (manager.async_save if later else manager.save)(step, state_of(step), durable=False)
            most = max(most, len(manager.steps()))
    assert most <= BEHIND + 3
    assert manager.steps() == [29]


def test_a_step_in_use_stays_until_it_is_not(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, state_of(1))
    manager.close()
    seen: list[list[int]] = []

    def progress(event: Progress) -> None:
        if event.phase == "begin":  # while step 1 is being restored
            manager.save(2, state_of(2))
            manager.close()
            seen.append(manager.steps())

    state, data = wanted()
    manager.restore(state, 1, progress=progress)
    assert seen == [[1, 2]]
    assert data.eq(1).all()
    manager.save(3, state_of(3))
    manager.close()
    assert manager.steps() == [3]
    # A base is in use while a save is linked to it; the links hold when it is gone.
    manager.save(4, state_of(3), base=manager.url(3))
    manager.close()
    assert manager.steps() == [4]
    restored(CheckpointManager(tmp_path), state)
    assert data.eq(3).all()


def test_equal_content_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step, value in ((1, 5), (2, 6), (3, 5)):
            state = state_of(value)
            state["iteration"] = step
            manager.save(step, state)
    (text,) = warnings_of(caplog)
    assert "step 3 are equal to those of step 1" in text
    caplog.clear()
    with CheckpointManager(tmp_path) as again:  # from the commits alone
        again.save(4, state_of(6))
        again.save(5, {"w": ShardedTensor.from_rank_offsets("v", torch.full(SIZE, 6.0))})
        again.save(6, state_of(6, (32, 64)))
        for step in (7, 8):  # no tensors
            again.save(step, {"n": step})
    (text,) = warnings_of(caplog)
    assert "step 4 are equal to those of step 2" in text


def test_a_removed_tensor_takes_the_digest_with_it(tmp_path: Path) -> None:
    extra = ShardedTensor.from_rank_offsets("extra", torch.ones(3))
    shardstore.save({**state_of(1), "extra": extra}, tmp_path / "step-1")
    shardstore.save(state_of(1), tmp_path / "step-2")
    steps = Steps(Location.of(tmp_path), "step-")
    assert steps.info(1).content not in (None, steps.info(2).content)
    shardstore.remove_sharded_tensors(tmp_path / "step-1", "extra")
    assert steps.info(1).content == steps.info(2).content
    assert what_is_missing(steps.place(1)) is None


DIES = """
import os, sys, torch, shardstore
from shardstore.storage.commit import folder as commit
name = sys.argv[2]
def die(*args, **kwargs):
    os._exit(9)
if name == "write":
    commit.FolderAttempt.commit = die
else:
    commit.LocalFolder.delete = die
manager = shardstore.CheckpointManager(sys.argv[1], keep_last=1)
for step in (7, 8):
    manager.save(step, shardstore.shard({"w": torch.ones(8)}))
    manager.close()
"""


@pytest.mark.parametrize("moment", ["write", "delete"])
def test_what_a_dead_process_left_is_swept(tmp_path: Path, moment: str) -> None:
    """A save killed before its commit; a deletion killed before its end."""
    root = tmp_path / "run"
    foreign = root / ".mine.attempt-1"
    foreign.mkdir(parents=True)
    assert run_text(DIES, root, moment).returncode == 9
    left = [name for name in os.listdir(root) if name.startswith(".step-7.attempt-")]
    assert len(left) == 1
    manager = CheckpointManager(root)
    manager.save(9, state_of(9))
    manager.close()
    steps = ["step-8", "step-9"] if moment == "delete" else ["step-9"]
    assert sorted(os.listdir(root)) == [".mine.attempt-1", *steps]


ENDS = """
import atexit, sys, torch, shardstore
manager = shardstore.CheckpointManager(sys.argv[1], keep_last=1)
state = shardstore.shard({"w": torch.ones(8)})
if sys.argv[2] == "at exit":
    other = shardstore.shard({"w": torch.zeros(8)})
    atexit.register(manager.save, 3, other, progress=print)
for step, save in ((1, manager.save), (2, manager.async_save)):
    state["w"].data.fill_(step)
    save(step, state, progress=print)
"""


@pytest.mark.parametrize("last", ["step-2", "step-3"])
def test_a_program_that_ends_leaves_nothing_undone(tmp_path: Path, last: str) -> None:
    """One whose exit function saves, too."""
    when = "at exit" if last == "step-3" else "before"
    ended = run_text(ENDS, tmp_path, when)
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(tmp_path) == [last]
    assert ended.stdout.count("phase='done'") == int(last[-1])
    assert ended.stderr == ""


@pytest.mark.usefixtures("copies_small_objects")
def test_a_step_of_a_store_is_the_base_of_the_next(s3_server: S3Server) -> None:
    """By its URL alone: the options are the manager's."""
    place = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    with managed(place, keep_last=1) as manager:
        manager.save(1, state_of(1.0))
        record = manager.save(2, state_of(1.0), base=manager.url(1))
        assert record["reused_bytes"] > 0
        manager.async_save(3, state_of(1.0), base=manager.url(2)).result()
        manager.wait()
        found = restored(manager, wanted()[0])
        assert (found.step, manager.steps()) == (3, [3])


def test_an_interrupted_save_to_a_store_is_swept(s3_server: S3Server) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/run", s3_server.storage_options
    root = Location.of(url, options)
    CheckpointManager(url, storage_options=options).save(1, state_of(1))
    for name in root.child("step-1").remote.walk():
        if name != "zarr.json":
            root.write(f"step-2/{name}", root.child("step-1").read(name))
            root.write(f"other/{name}", root.child("step-1").read(name))
    patient = CheckpointManager(url, storage_options=options)
    assert restored(patient, wanted()[0]).step == 1
    patient.close()
    assert root.listing() == ["other", "step-1", "step-2"]
    eager = CheckpointManager(url, storage_options=options, sweep_after=timedelta(0))
    eager.save(3, state_of(3))
    eager.close()
    assert root.listing() == ["other", "step-1", "step-3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_sweep_that_failed_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says so. Here the root cannot be listed for a time."""
    root = folder_for_all(tmp_path / "run", 0o777)
    assert run_text(DIES, root, "write").returncode == 9
    root.chmod(0o733)
    manager = CheckpointManager(root)
    with another_user():
        with pytest.raises(StorageError, match="Permission denied"):
            manager.restore(wanted()[0])
        assert manager.wait(60)
    assert "is repeated after the next save" in warnings_of(caplog)[-1]
    manager.save(1, state_of(1))
    manager.close()
    assert os.listdir(root) == ["step-1"]


def test_a_deletion_that_failed_is_repeated(tmp_path: Path) -> None:
    """Such as that of a file in use on NFS. The rest of the step is no step any more."""
    root = folder_for_all(tmp_path / "run", 0o777)
    manager = CheckpointManager(root, keep_last=1)
    with another_user():
        manager.save(1, state_of(1))
        (chunk,) = root.glob("step-1/w/c*")
        chunk.parent.chmod(0o555)
        manager.save(2, state_of(2))
        assert manager.wait(60)
        (left,) = root.glob(".step-1.*/w")
        left.chmod(0o755)
        manager.save(3, state_of(3))
        manager.close()
    assert os.listdir(root) == ["step-3"]
