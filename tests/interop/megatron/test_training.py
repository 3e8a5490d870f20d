"""A GPT that Megatron-Core's distributed optimizer trains on CUDA, through ``install()``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from tests.helpers.megatron_releases import ENVIRONMENT, PROGRAMS, ROOT, run

pytestmark = pytest.mark.megatron


def train(ranks: int, *, cuda: bool, **task: Any) -> Any:
    """Run ``training.py`` on ranks; return the losses that it prints."""
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks
    program = PROGRAMS / "training.py", json.dumps(task, default=str)
    settings = {"CUDA_VISIBLE_DEVICES": ""}
    if cuda:  # a torch for CUDA has its own triton; that of the environment compiles nothing
        settings = {"PYTHONPATH": f"{ROOT}:{ENVIRONMENT / '0.19.2'}"}
    return json.loads(run("0.19.2", *launcher, *program, **settings).splitlines()[-1])


def require_equal(first: Path, second: Path) -> None:
    """Compare two checkpoints of the same state bit for bit."""
    (one, other) = (shardstore.load_plain_tensors(place) for place in (first, second))
    assert one.keys() == other.keys()
    tensors = {key: value for key, value in one.items() if isinstance(value, torch.Tensor)}
    assert any("exp_avg_sq" in key for key in tensors)
    assert len(tensors) > 30
    for key, value in tensors.items():
        assert torch.equal(value, other[key]), key


@pytest.mark.long
def test_optimizer_states_move_between_layouts(tmp_path: Path) -> None:
    """The same without CUDA, and without training."""
    train(2, cuda=False, tp=1, pp=1, steps=-1, save=tmp_path / "a")
    train(2, cuda=False, tp=1, pp=2, steps=-1, load=tmp_path / "a", save=tmp_path / "b")
    require_equal(tmp_path / "a", tmp_path / "b")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_training_continues_under_another_layout(tmp_path: Path) -> None:
    ranks = min(2, torch.cuda.device_count())
    trained, moved = tmp_path / "trained", tmp_path / "moved"
    first, last = train(ranks, cuda=True, tp=1, pp=1, steps=20, save=trained)
    assert last < first
    # On the CPU, because there may be one device alone.
    train(2, cuda=False, tp=1, pp=2, steps=-1, load=trained, save=moved)
    require_equal(trained, moved)
    losses = train(ranks, cuda=True, tp=ranks, pp=1, steps=1, load=moved)
    assert math.isclose(losses[0], last, rel_tol=0.01)
    assert losses[1] < first
