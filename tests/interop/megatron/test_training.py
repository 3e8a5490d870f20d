"""A GPT that Megatron-Core's distributed optimizer trains on CUDA, through ``install()``."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".envs" / "megatron"
pytestmark = pytest.mark.megatron


def run(ranks: int, *, cuda: bool, **task: Any) -> Any:
    """Run ``training.py`` on ranks; return the losses that it prints."""
    if not (ENVIRONMENT / "0.19.2").is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    paths = [ROOT, ENVIRONMENT / "0.19.2"]
    if not cuda:  # a torch for CUDA has its own
        paths.append(ENVIRONMENT / "triton")
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths))}
    if not cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), Path(__file__).with_name("training.py")),
            json.dumps(task, default=str),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def require_equal(first: Path, second: Path) -> None:
    """Compare two checkpoints of the same state bit for bit."""
    (one, other) = (shardstore.load_plain_tensors(place) for place in (first, second))
    assert one.keys() == other.keys()
    tensors = {key: value for key, value in one.items() if isinstance(value, torch.Tensor)}
    assert any("exp_avg_sq" in key for key in tensors)
    assert len(tensors) > 30
    for key, value in tensors.items():
        assert torch.equal(value, other[key]), key


def test_optimizer_states_move_between_layouts(tmp_path: Path) -> None:
    """The same without CUDA, and without training."""
    run(2, cuda=False, tp=1, pp=1, steps=-1, save=tmp_path / "a")
    run(2, cuda=False, tp=1, pp=2, steps=-1, load=tmp_path / "a", save=tmp_path / "b")
    require_equal(tmp_path / "a", tmp_path / "b")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_training_continues_under_another_layout(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    trained, moved = tmp_path / "trained", tmp_path / "moved"
    first, last = run(ranks, cuda=True, tp=1, pp=1, steps=20, save=trained)
    assert last < first
    # On the CPU, because there may be one device alone.
    run(2, cuda=False, tp=1, pp=2, steps=-1, load=trained, save=moved)
    require_equal(trained, moved)
    losses = run(ranks, cuda=True, tp=ranks, pp=1, steps=1, load=moved)
    assert math.isclose(losses[0], last, rel_tol=0.01)
    assert losses[1] < first
