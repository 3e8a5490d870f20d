"""Runs programs of ``tests/interop/trainers`` in the environment that has the trainers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardstore.inspection.verify import verify
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the Python of the environment with the trainers; skip the test without one."""
    found = ROOT / ".envs" / "trainers" / "bin" / "python"
    if not found.exists():
        pytest.skip("no environment with the trainers: scripts/trainers_env makes it")
    return found


def run(python: Path, program: str, *arguments: object, ranks: int = 2, **environment: str) -> None:
    """Run a program on so many ranks under torchrun."""
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = run_to_end(
        [*command, ROOT / "tests" / "interop" / "trainers" / program, *arguments],
        env={
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            **environment,
        },
    )
    assert ended.returncode == 0, ended.stderr[-20000:]


def whole(place: str | Path, **options: Any) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    return verify(StoredCheckpoint(Location.of(place, options)), lambda finding: None).ok
