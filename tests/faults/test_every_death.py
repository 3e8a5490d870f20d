"""A process that dies, or is interrupted, at any file system call of a save or a deletion.

One process that has imported everything forks another for each moment. The moment is the n-th call
that changes something; of each operation every moment comes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.storage.commit import folder
from tests.faults.test_crash_at_every_request import state, version_of
from tests.helpers.deaths import alone

FOREIGN = {"log.txt": "years of work", "config/model.yaml": "a: 1"}
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate")


def save(place: Path, version: int) -> None:
    shardstore.save(state(version), place, overwrite=True, array_documents=version != 1)


def foreign(place: Path) -> dict[str, str]:
    """What lies there beside a checkpoint."""
    files = [path for path in place.rglob("*") if path.is_file()]
    ours = ("w", "o", "only-", "zarr.json", "manifest.npz", "metadata.json", "common.pt")
    names = {str(path.relative_to(place)): path for path in files}
    return {n: p.read_text() for n, p in names.items() if not n.startswith(ours)}


def a_folder(place: Path) -> None:
    for name, text in FOREIGN.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def a_checkpoint(place: Path) -> None:
    save(place, 1)
    a_folder(place)


OPERATIONS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "overwrite": (a_checkpoint, lambda place: save(place, 2)),
    "save": (lambda place: None, lambda place: save(place, 2)),
    "save into a folder": (a_folder, lambda place: save(place, 2)),
    "remove": (a_checkpoint, lambda place: shardstore.remove_sharded_tensors(place, "only")),
    "delete": (lambda place: save(place, 1), shardstore.delete_checkpoint),
}


def at_change(number: int, work: Callable[[], None]) -> None:
    """Do some work right before the n-th call from now on that changes something."""
    calls = itertools.count()

    def step() -> None:
        if next(calls) == number:
            work()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and (arguments[2] or 0) & (os.O_CREAT | os.O_RDWR)):
            step()

    exchange = folder._exchange

    def exchanged(*paths: str) -> None:  # no audit event
        step()
        exchange(*paths)
        step()

    folder._exchange = exchanged
    sys.addaudithook(hook)


def forked(work: Callable[[], None], errors: Path) -> int:
    """Exit status of a process that does some work; what it raises is an error of the test."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            errors.write_text(traceback.format_exc())
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), errors.read_text()
    return status


def interrupted(place: Path, work: Callable[[Path], None], moment: int) -> None:
    """Ctrl-C in a process that lives on: it leaves nothing behind. Ends as one that was killed."""
    came: list[bool] = []

    def interrupt() -> None:
        came.append(True)
        raise KeyboardInterrupt

    at_change(moment, interrupt)
    before = set(os.listdir(place.parent))
    try:
        work(place)
    except KeyboardInterrupt:
        left = set(os.listdir(place.parent)) - before - {place.name}
        assert not left, (moment, left)
    if came:
        os.kill(os.getpid(), signal.SIGKILL)


def killed(place: Path, work: Callable[[Path], None], moment: int) -> None:
    at_change(moment, lambda: os.kill(os.getpid(), signal.SIGKILL))
    work(place)


def check(root: Path, wanted: dict[str, str], versions: tuple[int | None, ...]) -> None:
    """Of what a death left: the old or the new checkpoint; and two ways to go on."""
    place = root / "c"
    found = version_of(place, is_reduced=True)
    assert found in versions
    copy = root.parent / "copy"
    shutil.copytree(root, copy, symlinks=True)
    shardstore.sweep(copy, dry_run=False)
    names = [name for name in os.listdir(copy) if name.startswith(".") or name != "c"]
    assert not names, names
    assert version_of(copy / "c", is_reduced=True) == found
    assert foreign(copy / "c") == wanted
    save(place, 3)
    assert version_of(place) == 3
    assert foreign(place) == wanted
    assert os.listdir(root) == ["c"]
    assert shardstore.sweep(root) == []


def every_moment(base: str, name: str, how: str) -> int:
    """The number of moments of an operation, after a death at each."""
    torch.set_num_threads(1)
    prepare, work = OPERATIONS[name]
    die = killed if how == "killed" else interrupted
    wanted = FOREIGN if prepare in (a_checkpoint, a_folder) else {}
    found = {"overwrite": (1, 2), "delete": (1, None), "remove": (1,)}
    versions = found.get(name, (None, 2))
    errors, prepared = Path(base, "errors"), Path(base, "prepared")
    prepared.mkdir()
    # Here, so that this process imports what each of its children would have to.
    save(Path(base, "first", "c"), 1)
    assert version_of(Path(base, "first", "c")) == 1
    prepare(prepared / "c")
    status, moment = -1, -1
    while status:
        moment += 1
        root = Path(base, str(moment), "run")
        shutil.copytree(prepared, root)
        status = forked(lambda p=root / "c", m=moment: die(p, work, m), errors)  # type: ignore[misc]
        try:
            forked(lambda r=root: check(r, wanted, versions), errors)  # type: ignore[misc]
        except AssertionError as error:
            raise AssertionError(f"{name}, {how} at moment {moment}: {error}") from None
        shutil.rmtree(root.parent)
    return moment


LONG = pytest.mark.long
CASES = [
    ("overwrite", "killed"),
    ("delete", "killed"),
    ("remove", "killed"),
    ("save", "killed"),
    pytest.param("save into a folder", "killed", marks=LONG),
    pytest.param("overwrite", "interrupted", marks=LONG),
    ("save", "interrupted"),
    pytest.param("save into a folder", "interrupted", marks=LONG),
    pytest.param("delete", "interrupted", marks=LONG),
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_death_at_any_moment(tmp_path: Path, name: str, how: str) -> None:
    least = 5 if name in ("delete", "remove") else 15
    assert alone(every_moment, str(tmp_path), name, how) > least
