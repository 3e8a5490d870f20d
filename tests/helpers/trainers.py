"""Runs programs of ``tests/interop/trainers`` in the environment that has the trainers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardstore.inspection.verify import verify
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location
from tests.helpers.megatron_releases import ENVIRONMENT
from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "interop" / "trainers"


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the Python of the environment with the trainers; skip the test without one."""
    found = ROOT / ".envs" / "trainers" / "bin" / "python"
    if not found.exists():
        pytest.skip("no environment with the trainers: scripts/trainers_env makes it")
    return found


def run(python: Path, program: str, *arguments: object, ranks: int = 2, **environment: str) -> str:
    """Run a program on so many ranks under torchrun; return its output."""
    ended = run_torchrun(python, program, *arguments, ranks=ranks, **environment)
    assert ended.returncode == 0, ended.stderr[-20000:]
    return ended.stdout


def run_torchrun(
    python: Path, program: str, *arguments: object, ranks: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Do what :func:`run` does, for a program that may fail."""
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_to_end(
        [*command, PROGRAMS / program, *arguments],
        env={
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
    )


def for_bridge() -> dict[str, str]:
    """Return the environment in which Megatron-Bridge 0.3.1 runs on the CPU; skip without one."""
    core = ENVIRONMENT / "0.17.1"  # the newest Megatron-Core that it works with
    if not core.is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    paths = (PROGRAMS / "without_cuda", ROOT, core, ENVIRONMENT / "triton")
    return {"PYTHONPATH": ":".join(map(str, paths)), "PYTHONWARNINGS": "ignore"}


def whole(place: str | Path, **options: Any) -> bool:
    """Return whether every byte of a checkpoint is as it was written."""
    return verify(StoredCheckpoint(Location.of(place, options)), lambda finding: None).ok
