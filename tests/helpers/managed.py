"""Checkpoint managers in a world of one, on disk and on S3, for the tests of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from shardstore import CheckpointManager, ShardedTensor
from shardstore.manager.checkpoint_manager import Restored

SIZE = (64, 32)


def state_of(value: float, shape: tuple[int, int] = SIZE) -> dict[str, Any]:
    data = torch.full(shape, float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", data), "iteration": value}


def wanted(shape: tuple[int, int] = SIZE) -> tuple[dict[str, Any], torch.Tensor]:
    data = torch.full(shape, -1.0)
    return {"w": ShardedTensor.from_rank_offsets("w", data)}, data


def managed(place: tuple[str, dict[str, Any]], **options: Any) -> CheckpointManager:
    return CheckpointManager(place[0], storage_options=place[1] or None, **options)


def restored(manager: CheckpointManager, state: Any, *step: int, **options: Any) -> Restored:
    """What the manager restored, which is not nothing."""
    found = manager.restore(state, *step, **options)
    assert found is not None
    return found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
