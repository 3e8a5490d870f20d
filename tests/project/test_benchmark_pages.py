"""The page of figures from a run's JSON, losses as plainly as wins; and small runs of the benchmark
itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_to_end

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    return run_to_end(
        [sys.executable, "-m", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=250,
    )


def sample(client: str, measure: str, value: float, unit: str = "s") -> dict[str, Any]:
    about = {"case": "save-load", "world": 1, "repeat": 0, "unit": unit}
    return {**about, "client": client, "measure": measure, "value": value}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which a peer loads faster, and saves more slowly, than we do."""
    data = {
        "notes": {
            "machine": {"processor": "a processor", "cores": 2, "file_system": "ext4 (rw)"},
            "command": "scripts/benchmark disk --repeats 5",
            "date": "2026-01-02",
            "cases": ["save-load"],
            "repeats": 5,
            "scale": 1.0,
        },
        "samples": [
            sample("raw-1", "save", 1.0),
            sample("shardstore", "save", 2.0),
            sample("a-peer", "save", 5.0),
            sample("shardstore", "load", 2.0),
            sample("a-peer", "load", 0.5),
            sample("another", "load", 900.0),
            sample("shardstore", "memory", 2.0, "bytes"),
        ],
        "failures": [{"case": "save-load", "world": 1, "client": "orbax", "reason": "not there"}],
        "targets": [
            {"case": "save-load", "target": "save at most 3x raw", "value": 2.0, "ok": True},
            {"case": "save-load", "target": "load no slower", "value": 0.25, "ok": False},
            {"case": "save-load", "target": "that of another", "value": None, "ok": None},
        ],
    }
    file = tmp_path / "disk.json"
    file.write_text(json.dumps(data))
    return file


def test_the_page_says_what_is_missed_and_who_is_faster(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs.md"
    ended = bench("page", run, "--markdown", page)
    assert ended.returncode == 0, ended.stderr
    text = page.read_text()
    assert "**disk**: 1 of 3 targets met." in text
    assert "missed: save-load, load no slower: 0.25" in text
    assert "not measured: save-load, that of another" in text
    losses, _, wins = text.partition("### Where a peer")[2].partition("### Where no peer is")
    assert "| disk | save-load | 1 | load | a-peer | 0.25 |" in losses
    assert "| disk | save-load | 1 | save | a-peer | 2.50 |" in wins
    assert "raw-1 |" not in losses.partition("##")[0]
    assert "`scripts/benchmark disk --repeats 5`, 2026-01-02; 5 rounds" in text
    assert "orbax gave no figure in save-load with 1 rank(s): not there" in text
    assert (tmp_path / "docs" / "disk.svg").stat().st_size > 5000
    bench("page", run, "--markdown", page)
    assert page.read_text() == text


@pytest.mark.long
def test_notes_stay_when_the_page_is_made_again(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs.md"
    page.write_text(
        "# Old\n\n<!-- notes: begin -->\n\nA note.\n\n<!-- notes: end -->\n\nold figures\n"
    )
    assert bench("page", run, "--markdown", page).returncode == 0
    text = page.read_text()
    assert text.startswith("# Benchmarks\n")
    assert text.count("A note.") == 1
    assert "old figures" not in text
    assert text.count("## disk\n") == 1
    bench("page", run, "--markdown", page)
    assert page.read_text() == text


@pytest.mark.long
def test_sections_of_other_runs_stay(run: Path, tmp_path: Path) -> None:
    page, other = tmp_path / "docs.md", Path(shutil.copy(run, tmp_path / "earlier.json"))
    assert bench("page", run, other, "--markdown", page).returncode == 0
    before = page.read_text()
    run.write_text(run.read_text().replace("--repeats 5", "--repeats 7"))
    other.unlink()
    assert bench("page", run, "--markdown", page).returncode == 0
    assert page.read_text() == before.replace("--repeats 5", "--repeats 7", 1)
    assert "**earlier**: 1 of 3 targets met." in before
    assert "| earlier | save-load | 1 | load | a-peer | 0.25 |" in before


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


@pytest.mark.long
def test_the_page_of_the_repository_is_what_its_json_says(tmp_path: Path) -> None:
    docs = SCRIPTS.parent / "docs"
    page = Path(shutil.copy(docs / "benchmarks.md", tmp_path))
    shutil.copytree(docs / "benchmarks", tmp_path / "benchmarks")
    for picture in (tmp_path / "benchmarks").glob("*.svg"):
        picture.unlink()
    ended = bench("page", "--markdown", page)
    assert ended.returncode == 0, ended.stderr
    assert page.read_text() == (docs / "benchmarks.md").read_text()
    drawn = sorted(file.name for file in (tmp_path / "benchmarks").iterdir())
    assert drawn == sorted(file.name for file in (docs / "benchmarks").iterdir())
    for name in drawn:
        assert texts(tmp_path / "benchmarks" / name) == texts(docs / "benchmarks" / name), name
    assert "0.71 s" in texts(docs / "benchmarks" / "overview.svg")


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What a small run wrote, after a page was made of it."""
    found = tmp_path / "found.json"
    ended = bench(*arguments, "--repeats", "1", "--dir", tmp_path, "--json", found)
    assert found.exists(), ended.stderr
    page = bench("page", found, "--markdown", tmp_path / "page.md")
    assert page.returncode == 0, page.stderr
    data: dict[str, Any] = json.loads(found.read_text())
    assert data["failures"] == []
    return data


@pytest.mark.long
def test_a_disk_is_measured(tmp_path: Path) -> None:
    """Every client has every figure, in rounds; other clients' environments are not asked for."""
    data = measured(
        tmp_path,
        *("disk", "--only", "save-load", "--ranks", "2", "--scale", "0.002"),
        *("--clients", "raw-1,shardstore"),
    )
    figures = {(s["client"], s["measure"]): s["value"] for s in data["samples"]}
    for client in ("raw-1", "shardstore"):
        for measure in ("save + one sync", "save, no sync", "load, warm cache", "load, cold cache"):
            assert figures[client, measure] > 0
    assert figures["raw-1", "bytes read / wanted, worst rank"] == pytest.approx(1, abs=0.1)
    assert list(data["notes"]["versions"]) == ["shardstore"]


@pytest.mark.long
def test_resharding_is_measured(tmp_path: Path) -> None:
    case = ("disk", "--only", "reshard", "--scale", "0.002", "--clients", "shardstore")
    data = measured(tmp_path, *case)
    figures = {s["measure"]: s["value"] for s in data["samples"]}
    assert figures["bytes read / wanted, 4 -> 16 along axis 0"] >= 1


@pytest.mark.long
def test_a_small_world_is_simulated(tmp_path: Path) -> None:
    """Every measure is there for every size."""
    data = measured(tmp_path, "scale", "--ranks", "4,16", "--scale", "0.001")
    measures = {(s["world"], s["measure"]) for s in data["samples"]}
    for world in (4, 16):
        for tensors in ("1", "10", "100"):
            assert (world, f"preparation of one rank, {tensors} tensors") in measures
            assert (world, f"manifest of one rank, bytes, {tensors} tensors") in measures
        for chunks in ("10", "100", "1,000"):
            assert (world, f"commit, {chunks} chunks") in measures
            assert (world, f"commit, memory beyond the reports, {chunks} chunks") in measures
