"""Attempts and commits: a checkpoint is there whole or not at all, whatever is in the way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import CheckpointExistsError, StorageError
from shardstore.mapping import ShardedTensor
from shardstore.storage.commit import folder as commit
from shardstore.storage.commit import publish
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.folder import FolderAttempt, begin, leftovers
from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.movers.files import sync_file_system
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.folder import LocalFolder
from shardstore.storage.stores.location import Location
from tests.helpers.rank_server import Started, start
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import files_at_most
from tests.helpers.users import another_user, folder_for_all


def save(target: Path, text: str, *, overwrite: bool = False, durable: bool = False) -> None:
    attempt = begin(Location.of(target), SaveOptions(overwrite=overwrite))
    fill(attempt, text)
    attempt.commit([], durable=durable)


def sweep(target: Path, **options: Any) -> list[str]:
    """What was left beside a target, removed."""
    found = list(leftovers(str(target.parent), target.name, **options))
    return [left.location.url for left in found if commit.sweep(left)]


def fill(attempt: Attempt, text: str) -> None:
    attempt.location.write("zarr.json", text.encode())
    attempt.location.write("w/zarr.json", b"{}")
    attempt.location.write("w/c.0", text.encode())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def alone(folder: Path) -> dict[str, str]:
    """The content of a folder that has nothing beside it."""
    assert os.listdir(folder.parent) == [folder.name]
    return content(folder)


def put(folder: Path, *names: str, text: str) -> dict[str, str]:
    """Write the same text to files below a folder, which now has this content."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return dict.fromkeys(names, text)


def checkpoint(text: str) -> dict[str, str]:
    return {"w/c.0": text, "w/zarr.json": "{}", "zarr.json": text}


@pytest.mark.parametrize("durable", [False, True])
def test_a_new_checkpoint_appears_in_one_step(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "deep" / "down" / "ckpt"
    attempt = begin(Location.of(target), SaveOptions())
    other = FolderAttempt(Location.of(target), attempt.id)
    assert other.location == attempt.location
    fill(attempt, "one")
    assert not target.exists()
    assert not is_checkpoint(attempt.target)
    sync_file_system(attempt.location)
    attempt.commit([], durable=durable)
    assert is_checkpoint(attempt.target)
    assert alone(target) == checkpoint("one")


def test_a_commit_while_the_interpreter_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 and later start no threads then; a save in the background may still commit."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    attempt = begin(Location.of(tmp_path / "checkpoint"), SaveOptions())
    attempt.put_all([("zarr.json", b"{}")])
    files = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refused)
    attempt.commit([("metadata.json", b"{}")], durable=False)
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["metadata.json", "zarr.json"]
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_an_abandoned_attempt_leaves_nothing(target: Path) -> None:
    save(target, "one")
    attempt = begin(Location.of(target), SaveOptions(overwrite=True))
    fill(attempt, "two")
    attempt.abandon()
    attempt.abandon()
    assert alone(target) == checkpoint("one")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2770, 0o777])
def test_an_existing_folder_keeps_its_mode_and_its_group(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "c"
    target.mkdir()
    group = 4242 if os.getuid() == 0 else [os.getgid(), *os.getgroups()][-1]
    os.chown(target, -1, group)
    target.chmod(mode)
    for text in ("one", "two"):
        attempt = begin(Location.of(target), SaveOptions(overwrite=True))
        fill(attempt, text)
        for folder in (attempt.location.path, target):
            about = folder.stat()
            assert (stat.S_IMODE(about.st_mode), about.st_gid) == (mode, group)
        attempt.commit([], durable=False)
    about = target.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_gid) == (mode, group)
    assert content(target)["w/c.0"] == "two"


def test_an_existing_checkpoint_is_refused(target: Path) -> None:
    for marker in ("zarr.json", "metadata.json"):
        there = put(target, marker, text="{}")
        with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
            begin(Location.of(target), SaveOptions())
        assert caught.value.url == str(target)
        assert isinstance(caught.value, FileExistsError)
        assert alone(target) == there
        shutil.rmtree(target)
    put(target, "zarr.json", text='{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(CheckpointExistsError, match="holds a Zarr group of another program"):
        begin(Location.of(target), SaveOptions())


def test_overwriting_replaces_it_and_keeps_what_is_not_its_own(target: Path) -> None:
    save(target, "one")
    put(target, "manifest.npz", "metadata.json", "common.pt", "rng/shard_0_1.pt", text="old")
    put(target, "gone/zarr.json", "gone/c.0", text="old")
    names = ("log.txt", "config/model.yaml", "iter_5/zarr.json", "iter_5/metadata.json")
    foreign = put(target, *names, text="{}")
    save(target, "two", overwrite=True)
    assert alone(target) == checkpoint("two") | foreign


def test_foreign_files_are_kept(target: Path) -> None:
    foreign = put(target, "logs/a.txt", "run.yaml", text="mine")
    put(target, "w", text="not an array")
    save(target, "one")
    assert content(target) == checkpoint("one") | foreign


def test_the_folder_of_an_array_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    for delete in (
        lambda: shardstore.delete_checkpoint(tmp_path / "c"),
        lambda: shardstore.save(state, tmp_path / "c", overwrite=True),
    ):
        shardstore.save(state, tmp_path / "c", overwrite=True)
        put(tmp_path / "c", "notes.txt", "w/notes.txt", text="mine")
        delete()
        assert not (tmp_path / "c/w/notes.txt").exists()
        assert (tmp_path / "c/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("names", [["w/notes.txt"], ["w/a/b"], [".zgroup", "w/.zarray", "w/0.0"]])
def test_a_folder_of_another_program_is_not_replaced_by_that_of_an_array(
    target: Path, names: list[str], overwrite: bool
) -> None:
    mine = put(target, *names, text="mine")
    (target / "empty").mkdir()
    told: list[object] = []
    with pytest.raises(CheckpointExistsError, match="'w' that no save wrote"):  # at the beginning
        shardstore.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))},
            target,
            overwrite=overwrite,
            progress=told.append,
        )
    assert not told
    with pytest.raises(CheckpointExistsError, match="'w' that no save wrote"):
        save(target, "one", overwrite=overwrite)
    assert content(target) == mine
    state = {"empty": ShardedTensor.from_rank_offsets("empty", torch.ones(3))}
    shardstore.save(state, target)
    with pytest.raises(CheckpointExistsError, match="'w' that no save wrote"):
        save(target, "two", overwrite=True)
    assert (target / names[-1]).read_text() == "mine"
    assert shardstore.open(target)["empty"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_that_comes_into_an_empty_target_at_the_last_moment_is_kept(
    target: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """As of a trainer that writes its own file beside a save in the background."""
    target.mkdir()
    attempt = begin(Location.of(target), SaveOptions())
    fill(attempt, "one")
    rename = os.rename

    def late(source: str, goal: str) -> None:
        (target / "meta.pt").write_text("of a trainer")
        monkeypatch.undo()
        rename(source, goal)

    monkeypatch.setattr(os, "rename", late)
    attempt.commit([], durable=durable)
    assert content(target) == checkpoint("one") | {"meta.pt": "of a trainer"}
    assert [path.name for path in target.parent.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("names", [[], ["log"]], ids=["absent", "with a file"])
def test_one_of_two_attempts_at_once_wins(target: Path, names: list[str]) -> None:
    others = put(target, *names, text="log")
    first, second = (begin(Location.of(target), SaveOptions()) for _ in range(2))
    fill(first, "first")
    fill(second, "second")
    second.commit([], durable=False)
    with pytest.raises(CheckpointExistsError, match="already exists: another"):
        first.commit([], durable=False)
    first.abandon()
    assert alone(target) == checkpoint("second") | others


def test_a_reader_of_the_replaced_checkpoint_reads_on(target: Path) -> None:
    """An open file of the old checkpoint stays readable; a path never leads to a mixture."""
    save(target, "one")
    with open(target / "w" / "c.0") as file:
        save(target, "two", overwrite=True)
        assert file.read() == "one"


@pytest.mark.parametrize("number", [0, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_an_exchange(target: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """In the C library (0), the kernel, or the file system."""

    def renameat2(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(
        commit, "_libc", SimpleNamespace(**({"renameat2": renameat2} if number else {}))
    )
    save(target, "one")
    (target / "log").write_text("log")
    save(target, "two", overwrite=True)
    assert alone(target) == checkpoint("two") | {"log": "log"}


def test_a_symlinked_target_stays_a_symlink(tmp_path: Path) -> None:
    real = tmp_path / "disk" / "real"
    real.mkdir(parents=True)
    link = tmp_path / "latest"
    link.symlink_to(real)
    for text in ("one", "two"):
        save(link, text, overwrite=True)
        assert link.is_symlink()
        assert content(real) == checkpoint(text)
    assert sorted(os.listdir(tmp_path)) == ["disk", "latest"]
    assert os.listdir(tmp_path / "disk") == ["real"]
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "disk" / "new")
    save(dangling, "three")
    assert content(tmp_path / "disk" / "new") == checkpoint("three")


def test_deleting_a_symlinked_checkpoint_removes_the_link_alone(tmp_path: Path) -> None:
    """As a step of a run that was moved to another disk, or somebody else's checkpoint."""
    target, link = tmp_path / "other", tmp_path / "step"
    save(target, "kept")
    link.symlink_to(target)
    commit.delete(Location.of(link))
    assert not link.is_symlink()
    assert content(target) == checkpoint("kept")


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="is a file"):
        begin(Location.of(tmp_path / "file"), SaveOptions(overwrite=True))
    with pytest.raises(StorageError, match="a file is where a folder should be") as caught:
        begin(Location.of(tmp_path / "file" / "ckpt"), SaveOptions())
    assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"
    attempt = begin(Location.of(tmp_path / "late"), SaveOptions())
    (tmp_path / "late").write_text("mine")
    with pytest.raises(StorageError):
        attempt.commit([], durable=True)
    assert (tmp_path / "late").read_text() == "mine"


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="shorten"):
        begin(Location.of(tmp_path / ("x" * 250)), SaveOptions())


# Attempts of processes that are gone.


def _begins(target: Path, told: Path) -> None:
    """Begin an attempt, tell its folder, and sleep."""
    attempt = begin(Location.of(target), SaveOptions())
    attempt.location.write("w/c.0", b"half")
    LocalFolder(str(told.parent)).replace(told.name, attempt.location.url.encode())
    time.sleep(120)


def begun_elsewhere(target: Path, told: Path) -> tuple[Started, str]:
    """An attempt of another process, which tells it in a file."""
    (process,) = start([(_begins, (target, told))])
    while not told.exists():
        assert process.exitcode is None
        time.sleep(0.01)
    return process, told.read_text()


def kill(process: Started) -> None:
    process.kill()
    process.join()


def test_attempts_of_dead_processes_are_swept_those_of_living_ones_not(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    told = tmp_path_factory.mktemp("told")
    dead, dead_attempt = begun_elsewhere(target, told / "dead")
    kill(dead)
    live, live_attempt = begun_elsewhere(target, told / "live")
    try:
        elsewhere, elsewhere_attempt = begun_elsewhere(target.parent / "ckpt2", told / "2")
        kill(elsewhere)
        assert not os.path.exists(dead_attempt)  # by the other process, as it began
        mine = begin(Location.of(target), SaveOptions())
        assert os.path.exists(live_attempt)
        assert os.path.exists(elsewhere_attempt)
        assert mine.location.path.exists()
    finally:
        kill(live)
    assert sweep(target) == [live_attempt]
    assert not os.path.exists(live_attempt)
    assert mine.location.path.exists()


def test_the_owner_of_an_attempt_is_alive_if_it_cannot_be_looked_at(target: Path) -> None:
    """A sweep of a process with too many open files removed what others were writing."""
    attempt = begin(Location.of(target), SaveOptions())
    found = commit._ATTEMPT.fullmatch(attempt.location.name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        is_dead = commit._is_dead(found, attempt.location.url, timedelta(0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_dead


@pytest.mark.parametrize("field", ["machine", "pid", "started"])
def test_an_attempt_of_another_host_is_dead_after_a_day(target: Path, field: str) -> None:
    """Of a process of another host, boot or pid namespace nobody here knows whether it lives: that
    counts as dead once nothing was written for a day."""
    here = begin(Location.of(target), SaveOptions()).location.path
    assert sweep(target) == []
    found = commit._ATTEMPT.fullmatch(here.name)
    assert found is not None
    other = {"machine": "0" * 12, "pid": "4194305", "started": "1"}[field]
    start, stop = found.span(field)
    there = here.rename(here.parent / f"{here.name[:start]}{other}{here.name[stop:]}")
    if field != "machine":
        assert sweep(target) == [str(there)]
        return
    (there / "w").mkdir()
    for days, old in ((0.9, False), (1.1, True)):
        when = time.time() - days * 86400
        for path in (there / ".owner.json", there / "w", there):
            os.utime(path, (when, when))
        assert sweep(target) == ([str(there)] if old else [])


def _dies_after_the_exchange(target: Path) -> None:
    LocalFolder.delete = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(target, "two", overwrite=True)


def test_what_a_commit_replaced_is_swept_if_it_dies_before_removing_it(target: Path) -> None:
    save(target, "one")
    (process,) = start([(_dies_after_the_exchange, (target,))])
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert content(target).items() >= checkpoint("two").items()
    assert len(os.listdir(target.parent)) == 2
    assert len(sweep(target)) == 1
    assert alone(target) == checkpoint("two")


def test_foreign_files_survive_an_abandoned_commit_that_had_exchanged(target: Path) -> None:
    """What stands in the attempt's place after the exchange is not the attempt's to remove."""
    target.mkdir()
    (target / "log").write_text("log")
    attempt = begin(Location.of(target), SaveOptions())
    fill(attempt, "one")
    attempt._replace()
    attempt.abandon()
    assert alone(target) == checkpoint("one") | {"log": "log"}


@pytest.mark.parametrize("order", ["ABab", "ABba", "AaBb"])
def test_two_savers_leave_each_other_alone(target: Path, order: str) -> None:
    """Each exchanges (capital) and removes what it replaced (small), and nothing else."""
    save(target, "one")
    (target / "log").write_text("log")
    attempts = {name: begin(Location.of(target), SaveOptions(overwrite=True)) for name in "AB"}
    for name, attempt in attempts.items():
        fill(attempt, name)
    for step in order:
        attempt = attempts[step.upper()]
        attempt._replace() if step.isupper() else attempt.remove()
    assert alone(target) == checkpoint("B") | {"log": "log"}


def test_a_last_sync_that_fails_says_that_the_checkpoint_is_there(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename is done by then: the error says that the checkpoint is there."""

    sync = commit.fsync

    def fails(path: str) -> None:
        if path == str(target.parent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    save(target, "one")
    (target / "log").write_text("log")
    monkeypatch.setattr(commit, "fsync", fails)
    with pytest.raises(StorageError, match=r"ckpt is committed and can be loaded, but .*power cut"):
        save(target, "two", overwrite=True, durable=True)
    assert alone(target) == checkpoint("two") | {"log": "log"}


# Stores that refuse.

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_a_read_only_parent(tmp_path: Path) -> None:
    parent = folder_for_all(tmp_path / "parent", 0o555)
    says = "^creating, beside the target, .*Permission denied; .*: check the owner and mode"
    with another_user(), pytest.raises(StorageError, match=says) as caught:
        begin(Location.of(parent / "ckpt"), SaveOptions())
    assert caught.value.errno == errno.EACCES
    assert os.listdir(parent) == []


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    """Such as a file in use on NFS. Chunks of the other arrays would take space meanwhile."""
    parent = folder_for_all(tmp_path / "parent", 0o777)
    target = parent / "ckpt"
    with another_user():
        attempt = begin(Location.of(target), SaveOptions())
        names = [f"{array}/{name}" for array in "awz" for name in ("zarr.json", "c/0", "c/1/0")]
        attempt.put_all([(name, b"{}") for name in ("zarr.json", *names)])
        attempt.commit([], durable=False)
        (target / "w/c/1").chmod(0o555)
        with pytest.raises(StorageError, match=r"^removing \S+/w failed") as caught:
            commit.delete(Location.of(target))
    assert caught.value.errno == errno.EACCES
    (folder,) = parent.iterdir()
    assert folder != target
    assert content(folder).keys() == {".owner.json", "w/c/1/0"}
    (folder / "w/c/1").chmod(0o755)
    begin(Location.of(target), SaveOptions()).abandon()  # the next save repeats it
    assert list(parent.iterdir()) == []


def test_a_sweep_tells_only_of_what_it_removed(tmp_path: Path) -> None:
    parent = folder_for_all(tmp_path / "parent", 0o777)
    attempt = begin(Location.of(parent / "ckpt"), SaveOptions())
    found = commit._ATTEMPT.fullmatch(attempt.location.name)
    name = attempt.location.name.replace(f"-{found['pid']}-", "-4194305-")
    attempt.location.path.rename(parent / name)
    parent.chmod(0o555)
    sweep_below = shardstore.sweep  # imported with our own rights
    with another_user():
        assert [len(sweep_below(parent, dry_run=dry)) for dry in (True, False)] == [1, 0]
    assert os.listdir(parent) == [name]
    parent.chmod(0o300)
    with another_user(), pytest.raises(StorageError, match=r"^listing \S+/parent failed: Perm"):
        sweep_below(parent)
    parent.chmod(0o755)


def leftovers_where_processes_are_hidden(rank: int, world_size: int, parent: str) -> list[int]:
    """How many another user sees while the owner of one runs, and afterwards."""
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS (Linux man-pages unshare(2))
    mount = "mount --make-rprivate / && mount -t proc -o hidepid=2 proc /proc"
    if subprocess.run(mount, shell=True, capture_output=True).returncode:
        return []
    seen = []
    with subprocess.Popen(["sleep", "60"], user=65533) as owner:
        Path(parent, f".ckpt.attempt-{commit._owner(owner.pid)}-{'0' * 16}").mkdir()
        with another_user():
            seen.append(len(list(leftovers(parent))))
        owner.kill()
    with another_user():
        return [*seen, len(list(leftovers(parent)))]


@as_root
def test_a_save_of_a_user_whose_processes_are_hidden_is_alive(tmp_path: Path) -> None:
    parent = folder_for_all(tmp_path / "parent", 0o777)
    seen = run_ranks(leftovers_where_processes_are_hidden, 1, str(parent))[0]
    if not seen:
        pytest.skip("mounting is not permitted here")
    assert seen == [0, 1]


@contextlib.contextmanager
def mounted(folder: Path, *options: str, kind: str = "tmpfs") -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", ",".join(options), "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@as_root
def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk, "size=1m"):
        with pytest.raises(StorageError, match=r"mount point.*folder below"):
            begin(Location.of(disk), SaveOptions())
        save(disk / "below", "one")
        assert content(disk / "below") == checkpoint("one")
    assert os.listdir(tmp_path) == ["disk"]


@as_root
def test_a_checkpoint_in_the_lower_layer_of_an_overlay(tmp_path: Path) -> None:
    """As in a container's image: it can be deleted, but neither renamed nor exchanged."""
    save(tmp_path / "lower" / "ckpt", "one")
    seen, disk = tmp_path / "seen", tmp_path / "disk"
    layers = f"lowerdir={tmp_path / 'lower'},upperdir={disk / 'upper'},workdir={disk / 'work'}"
    with mounted(disk, "size=1m"):
        (disk / "upper").mkdir()
        (disk / "work").mkdir()
        with mounted(seen, layers, "redirect_dir=off", kind="overlay"):
            with pytest.raises(StorageError, match=r"lower layer.*to another name"):
                save(seen / "ckpt", "two", overwrite=True)
            assert content(seen / "ckpt") == checkpoint("one")
            commit.delete(Location.of(seen / "ckpt"))
            save(seen / "ckpt", "two")
            assert content(seen / "ckpt") == checkpoint("two")


def test_a_limit_on_the_size_of_files_is_named_with_the_remedy(target: Path) -> None:
    state = shardstore.shard({"layer/w": torch.ones(2, 300_000)})
    says = "for key 'layer/w' failed: File too large.*raise the limit"
    with files_at_most(500_000), pytest.raises(StorageError, match=says):
        shardstore.save(state, target)
    assert os.listdir(target.parent) == []


def test_replacing_a_document_is_all_or_nothing(tmp_path: Path) -> None:
    place = Location.of(tmp_path)
    place.write("zarr.json", b"old")
    place.replace("zarr.json", b"new")
    assert content(tmp_path) == {"zarr.json": "new"}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("x")
    with pytest.raises(StorageError, match="replacing"):
        place.replace("folder", b"new")
    assert content(tmp_path) == {"zarr.json": "new", "folder/x": "x"}


@pytest.mark.parametrize("is_disk", [True, False])
def test_a_folder_that_only_the_coordinator_sees_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disk: bool
) -> None:
    """As on another machine whose disk is its own: a disk has nothing to show later."""
    if is_disk:
        assert commit.disk_of(Location.of(tmp_path / "c"))
        monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: 0.0))  # no sleep
    else:
        monkeypatch.setattr(commit, "_DISKS", frozenset())
        monkeypatch.setattr(commit, "SEEN_S", 0.0)
    elsewhere = FolderAttempt(Location.of(tmp_path / "c"), "0-0")
    with pytest.raises(StorageError, match="not on a file system that all ranks share"):
        elsewhere.require_seen()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_seen_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system shows it."""
    monkeypatch.setattr(commit, "_DISKS", frozenset())
    attempt = begin(Location.of(tmp_path / "c"), SaveOptions())
    here, late = attempt.location.url, tmp_path / "late"
    os.rename(here, late)

    def shows_it(seconds: float) -> None:
        os.rename(late, here)

    monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=shows_it))
    attempt.require_seen()
    assert Path(here).is_dir()


def test_a_version_that_cannot_be_read_stops_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading ``/proc/self/mem`` fails with EIO, as a disk may."""
    about = tmp_path / "shardstore-9.dist-info"
    about.mkdir()
    (about / "METADATA").symlink_to("/proc/self/mem")
    monkeypatch.syspath_prepend(tmp_path)
    assert publish._version.__wrapped__() == "unknown"
