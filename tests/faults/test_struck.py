"""Faults at points of saves and deletions: a few fixed ones, and those of ``scripts/faults``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRIKE = """import json, sys
from pathlib import Path
from tests.helpers.strikes import strike_disk
for fault in json.loads(sys.argv[1]):
    place = Path(sys.argv[2], "-".join(map(str, fault)))
    place.mkdir()
    print(json.dumps(strike_disk(*fault, place)))"""

FAULTS = [
    ("kill", "overwrite", "rename", 1),
    ("power", "first", "syncfs", 1),
    ("full", "base", "pwrite64", 2),
    ("read-only", "retain", "mkdir", 1),
    ("EIO", "delete", "fsync", 1),
    ("EIO", "delete", "fsync", 2),
    ("slow", "later", "openat", 1),
]


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")


@needs_strace
def test_nothing_is_lost_by_a_fault_at_a_fixed_point(tmp_path: Path) -> None:
    # In a process without threads: the strikes fork it.
    command = [sys.executable, "-c", STRIKE, json.dumps(FAULTS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    for fault, line in zip(FAULTS, done.stdout.splitlines(), strict=True):
        outcome, wrong = json.loads(line)
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
