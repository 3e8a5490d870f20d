"""Requests of this package in queues that fork, or send to a worker process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".envs" / "megatron"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
MEGATRON = "megatron.core.dist_checkpointing.strategies.async_utils"
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(NVRX, [], id="nvrx", marks=pytest.mark.long),
        pytest.param(NVRX, ["--persistent"], id="nvrx-worker"),
        # Its worker process needs CUDA.
        pytest.param(MEGATRON, [], id="megatron", marks=pytest.mark.long),
    ],
)
def test_requests_run_in_queues_of_others(tmp_path: Path, module: str, options: list[str]) -> None:
    paths = [ROOT, *(ENVIRONMENT / name for name in ("nvrx", "0.19.2", "triton"))]
    if not all(path.is_dir() for path in paths):
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    done = run_to_end(
        [sys.executable, Path(__file__).with_name("queues.py"), module, tmp_path, *options],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.endswith("done\n")
