"""A few of the faults that ``scripts/faults`` strikes with, at fixed points."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.faults_main import strike_disk

FAULTS = [
    ("kill", "overwrite", "rename", 1),
    ("power", "first", "syncfs", 1),
    ("full", "base", "pwrite64", 2),
    ("read-only", "retain", "mkdir", 1),
    ("EIO", "delete", "fsync", 1),
    ("EIO", "delete", "fsync", 2),
    ("slow", "later", "openat", 1),
]


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize(("kind", "operation", "point", "at"), FAULTS)
def test_nothing_is_lost(tmp_path: Path, kind: str, operation: str, point: str, at: int) -> None:
    outcome, wrong = strike_disk(kind, operation, point, at, tmp_path)
    assert wrong == ""
    assert outcome in ("died", "refused", "done")
