"""Pictures and the results page out of a run's JSON: losses as plainly as wins; and large worlds
simulated, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
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


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_picture(run: Path, tmp_path: Path, kind: str) -> None:
    picture = tmp_path / f"bars.{kind}"
    ended = bench("plot", run, "-o", picture)
    assert ended.returncode == 0, ended.stderr
    assert picture.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[kind])
    assert picture.stat().st_size > 5000


def test_the_page_says_what_is_missed_and_who_is_faster(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs.md"
    ended = bench("page", run, "--markdown", page)
    assert ended.returncode == 0, ended.stderr
    text = page.read_text()
    assert "**disk**: 1 of 3 targets met." in text
    assert "missed: save-load, load no slower: 0.25" in text
    assert "not measured: save-load, that of another" in text
    losses, _, wins = text.partition("### Where a peer is faster")[2].partition("### Where none is")
    assert "| disk | save-load | 1 | load | a-peer | 0.25 |" in losses
    assert "| disk | save-load | 1 | save | a-peer | 2.50 |" in wins
    assert "raw-1 |" not in losses.partition("##")[0]
    assert "`scripts/benchmark disk --repeats 5`, 2026-01-02" in text
    assert "orbax gave no figure in save-load with 1 rank(s): not there" in text
    assert (tmp_path / "docs" / "disk.svg").exists()
    bench("page", run, "--markdown", page)
    assert page.read_text() == text


def test_a_small_world_is_simulated(tmp_path: Path) -> None:
    """Every measure is there for every size, and a picture, within the limits."""
    found, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    sizes = ("--ranks", "4,16", "--tensors", "20,200", "--chunks", "1000,2000")
    ended = bench("scale", *sizes, "--dir", tmp_path, "--json", found, "--plot", picture)
    data = json.loads(found.read_text())
    assert picture.read_bytes().startswith(b"\x89PNG"), ended.stderr
    measures = {(s["world"], s["measure"]) for s in data["samples"]}
    for world in (4, 16):
        for tensors in ("20", "200"):
            assert (world, f"preparation of one rank, {tensors} tensors") in measures
            assert (world, f"preparation of one rank, DTensors, {tensors} tensors") in measures
            assert (world, f"manifest of one rank, bytes, {tensors} tensors") in measures
        for chunks in ("1,000", "2,000"):
            assert (world, f"commit, {chunks} chunks") in measures
            assert (world, f"commit, peak memory beyond the reports, {chunks} chunks") in measures
    under = [t for t in data["targets"] if "under 10 s" in t["target"]]
    assert [t["ok"] for t in under] == [True, True]
