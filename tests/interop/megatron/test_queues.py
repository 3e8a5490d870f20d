"""Requests of this package in queues that fork, or send to a worker process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_releases import PROGRAMS, run

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
    program = PROGRAMS / "queues.py", module, tmp_path, *options
    assert run("0.19.2", *program, beside="nvrx triton").endswith("done\n")
