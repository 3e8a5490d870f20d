"""The file of the common values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardstore
from shardstore.strategies import common


def test_large_tensors_among_the_common_values_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "LARGE_BYTES", 10_000)
    state = {"w": torch.zeros(50, 50)}
    shardstore.save({"step": 1, **shardstore.shard(state)}, tmp_path / "arrays")
    assert caplog.messages == []
    shardstore.save(state, tmp_path / "common")
    (text,) = caplog.messages
    assert f"{tmp_path}/common: " in text
    assert "shardstore.shard(state_dict)" in text
