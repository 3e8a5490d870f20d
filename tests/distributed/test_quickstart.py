"""The quickstart at a small size: it passes, and it fails when anything is not as it was."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_forked

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMIT_S = 280


def _load_main() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_main", SCRIPTS / "quickstart_main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


quickstart = _load_main()


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of a whole small run that was kept. Torchrun starts the two ranks alone:
    the other ranks are forked, and need not import torch again."""
    folder, copies = (tmp_path_factory.mktemp(name) for name in ("quickstart", "scripts"))
    for script in SCRIPTS.glob("quickstart_*.py"):
        shutil.copy(script, copies)
    run = quickstart.run

    def run_most_forked(command: list[str], what: str) -> None:
        ranks = {"train on 4 ranks": 4, "resume on 4 ranks": 4, "resume on 1 rank": 1}.get(what)
        if ranks is None:
            run(command, what)
            return
        done = run_forked(copies / Path(command[-2]).name, ranks, {}, command[-1])
        assert done.returncode == 0, done.stderr

    arguments = ["main", "--small", "--steps", "6", "--keep", "--dir", str(folder)]
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    ends = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", arguments)
        patch.syspath_prepend(SCRIPTS)
        patch.setattr(quickstart, "run", run_most_forked)
        code = quickstart.main()
    signal.signal(signal.SIGTERM, ends)
    said.seek(0)
    output = said.read()
    assert code == 0, output
    return folder, output


@pytest.fixture
def folder(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that folder, to be spoilt."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def _spoil_record(folder: Path) -> str:
    """Make the record claim another hash for one tensor; returns that tensor's key."""
    record = json.loads((folder / "train.json").read_text())
    key = "optimizer.exp_avg.layers.attention.qkv"
    record["saved"][key]["sha256"] = "0" * 64
    (folder / "train.json").write_text(json.dumps(record))
    return key


def _options() -> argparse.Namespace:
    return argparse.Namespace(steps=6, small=True)


def test_whole_run_passes_and_keeps_what_it_proved(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert output.splitlines()[-1].startswith("PASS")
    assert "FAIL" not in output
    unbroken = json.loads((folder / "train.json").read_text())
    assert len(unbroken["losses"]) == 6
    for tp, dp in [(2, 2), (1, 2), (1, 1)]:
        resumed = json.loads((folder / f"resume-tp{tp}-dp{dp}.json").read_text())
        assert resumed["losses"][:3] == unbroken["losses"][:3]
        assert len(resumed["losses"]) == 6
    same = json.loads((folder / "resume-tp2-dp2.json").read_text())
    assert same["losses"] == unbroken["losses"]
    assert same["final"] == unbroken["final"]
    # The steps after the save changed the state, so equal end states are no matter of course.
    assert unbroken["saved"]["model.head"] != unbroken["final"]["model.head"]


@pytest.mark.long
def test_the_same_job_over_s3(tmp_path: Path) -> None:
    main = SCRIPTS / "quickstart_main.py"
    done = _run(main, "--s3", "--small", "--steps", 4, "--dir", tmp_path)
    assert done.returncode == 0, done.stdout
    assert "  s3://" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("PASS")
    assert list(tmp_path.iterdir()) == []


def test_the_view_by_plain_zarr_names_what_differs(folder: Path) -> None:
    key = _spoil_record(folder)
    seen = _run(SCRIPTS / "quickstart_view.py", folder / "checkpoint", folder / "train.json")
    assert seen.returncode == 1
    assert f"not what was saved: ['{key}']" in seen.stdout


@pytest.mark.long
def test_a_rank_that_fails_ends_the_others(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Rank 0 alone compares with the record; rank 1 is then waiting for it in the next step.
    key = _spoil_record(folder)
    with pytest.raises(quickstart.FailedError, match="resume on 2 ranks failed"):
        quickstart.ranks("resume", 1, 2, folder, str(folder / "checkpoint"), _options())
    assert key in capfd.readouterr().err


def _runs(losses: list[float], resumed: list[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"losses": losses, "final": {"a": 1}}, {"losses": resumed, "final": {"a": 1}}


def test_same_layout_must_be_bit_for_bit() -> None:
    losses = [5.0, 4.0, 3.0, 2.0]
    assert quickstart.compare(*_runs(losses, losses), same_layout=True)
    with pytest.raises(quickstart.FailedError, match="apart"):
        quickstart.compare(*_runs(losses, [5.0, 4.0, 3.0, 2.0 + 1e-15]), same_layout=True)
    unbroken, resumed = _runs(losses, losses)
    with pytest.raises(quickstart.FailedError, match="end state"):
        quickstart.compare(unbroken, {**resumed, "final": {"a": 2}}, same_layout=True)


@pytest.mark.parametrize(
    "resumed",
    [
        [5.0, 4.0, 3.0 + 2e-5, 2.0],  # the first step after the load
        [5.0, 4.0, 3.0, 2.002],  # a later one
        [5.0, 4.0 + 1e-7, 3.0, 2.0],  # what was restored
        [5.0, 4.0, 3.0],
        [5.0, 4.0, float("nan"), 2.0],
        [5.0, 4.0, 3.0, float("nan")],
    ],
)
def test_another_layout_has_a_tolerance(resumed: list[float]) -> None:
    losses = [5.0, 4.0, 3.0, 2.0]
    close = [5.0, 4.0, 3.0 + 1e-6, 2.0005]
    assert quickstart.compare(*_runs(losses, close), same_layout=False)
    with pytest.raises(quickstart.FailedError):
        quickstart.compare(*_runs(losses, resumed), same_layout=False)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    done = _run(SCRIPTS / "quickstart_main.py", "--small", "--dir", tmp_path)
    assert done.returncode == 2
    assert "not empty" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_help_needs_nothing_installed() -> None:
    environment = {**os.environ, "SHARDSTORE_VENV": "/nonexistent"}
    done = run_to_end(["bash", SCRIPTS / "quickstart", "--help"], env=environment)
    assert done.returncode == 0, done.stderr
    assert "--keep" in done.stdout
