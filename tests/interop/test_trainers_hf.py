"""Models of transformers: loaded by ranges, and exported for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.trainers import run


@pytest.mark.long
def test_models_of_transformers_under_tensor_and_expert_parallelism(
    python: Path, tmp_path: Path
) -> None:
    """Qwen2 by tensor parallelism; Qwen3-MoE, whose files have a tensor for each expert, and
    GPT-OSS by expert parallelism."""
    assert "equal logits" in run(python, "hf_load.py", tmp_path)


@pytest.mark.long
def test_transformers_loads_what_fsdp2_and_tensor_parallelism_trained(
    python: Path, tmp_path: Path
) -> None:
    assert "equal logits" in run(python, "hf_export.py", tmp_path, ranks=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["later", "now"]
