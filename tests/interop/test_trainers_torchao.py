"""Weights of torchao for training in low precision, which are subclasses of tensors."""

from __future__ import annotations

from pathlib import Path

import shardstore
from tests.helpers.trainers import run


def test_a_run_in_float8_goes_on_and_its_weights_are_plain_arrays(
    python: Path, tmp_path: Path
) -> None:
    assert "Float8" in run(python, "torchao_weights.py", tmp_path)
    weight = shardstore.open(tmp_path / "own")["model.0.weight"]
    assert (weight.shape, str(weight.dtype)) == ((64, 32), "bfloat16")
