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
kind, operation, point, at, place = json.loads(sys.argv[1])
print(json.dumps(strike_disk(kind, operation, point, at, Path(place))))"""

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
@pytest.mark.parametrize(("kind", "operation", "point", "at"), FAULTS)
def test_nothing_is_lost_by_a_fault_at_a_fixed_point(
    tmp_path: Path, kind: str, operation: str, point: str, at: int
) -> None:
    # In a process without threads: the strikes fork it.
    fault = json.dumps([kind, operation, point, at, str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", STRIKE, fault], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    outcome, wrong = json.loads(done.stdout.splitlines()[-1])
    assert wrong == ""
    assert outcome in ("died", "refused", "done")


@pytest.mark.long
@pytest.mark.timeout(0)
@needs_strace
def test_nothing_is_lost_by_faults_at_random_points() -> None:
    """``scripts/faults`` says how many, with which seed, and where; it shows the table."""
    given = json.loads(os.environ.get("SHARDSTORE_FAULTS", '["20", "0", ""]'))
    code = "import sys; from tests.helpers.strikes import *; sys.exit(strike_all(*sys.argv[1:]))"
    assert subprocess.run([sys.executable, "-c", code, *given], cwd=ROOT).returncode == 0
