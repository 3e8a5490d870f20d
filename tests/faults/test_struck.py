"""Faults at points of saves and deletions: a few fixed ones, and those of ``scripts/faults``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.deaths import alone
from tests.helpers.strikes import strike_disk

ROOT = Path(__file__).parents[2]
FAULTS = [
    ("kill", "overwrite", "rename", 1),
    ("power", "first", "syncfs", 1),
    ("full", "base", "pwrite64", 2),
    ("read-only", "retain", "mkdir", 1),
    ("EIO", "delete", "fsync", 1),
    ("EIO", "delete", "fsync", 2),
    ("slow", "later", "openat", 1),
]


def struck(folder: str) -> list[tuple[str, str]]:
    """What comes of each fault, and what is lost by it."""
    places = [Path(folder, "-".join(map(str, fault))) for fault in FAULTS]
    for place in places:
        place.mkdir()
    return [strike_disk(*fault, place) for fault, place in zip(FAULTS, places, strict=True)]


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")


@needs_strace
def test_nothing_is_lost_by_a_fault_at_a_fixed_point(tmp_path: Path) -> None:
    for fault, (outcome, wrong) in zip(FAULTS, alone(struck, str(tmp_path)), strict=True):
        assert wrong == "", fault
        assert outcome in ("died", "refused", "done"), fault


@pytest.mark.long
@pytest.mark.timeout(0)
@needs_strace
def test_nothing_is_lost_by_faults_at_random_points() -> None:
    """``scripts/faults`` says how many, with which seed, and where; it shows the table."""
    given = json.loads(os.environ.get("SHARDSTORE_FAULTS", '["20", "0", ""]'))
    code = "import sys; from tests.helpers.strikes import *; sys.exit(strike_all(*sys.argv[1:]))"
    assert subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT).returncode == 0
