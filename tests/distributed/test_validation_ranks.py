"""What validation does between ranks: gathering, checking on rank 0, comparing the common part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import validation
from shardstore.errors import AccessPatternError
from shardstore.mapping import ShardedObject, ShardedTensor
from tests.helpers.ranks_helper import run_ranks


def _cell(index: int, parts: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("grid", torch.zeros(2), (0, index, parts))


def _gathered(rank: int, world_size: int) -> tuple[list[Any], str, str]:
    state = {"a": _cell(rank, world_size), "o": [ShardedObject("o", 5, (world_size,), (rank,))]}
    local, everywhere = validation.determine_global_metadata(state)
    assert len(local) == 2
    good = _raised(everywhere)
    bad = _raised(validation.determine_global_metadata({"a": _cell(0, world_size)})[1])
    return [[(item.key, item.global_offset) for item in one] for one in everywhere], good, bad


def _raised(metadata: list[Any]) -> str:
    try:
        validation.validate_sharding_integrity(metadata)
    except AccessPatternError as error:
        return str(error)
    return ""


def _all(rank: int, world_size: int, folder: Path) -> tuple[Any, str, list[str]]:
    found = _gathered(rank, world_size)
    return found, _unpicklable(rank, world_size), _save_with_one_main(rank, world_size, folder)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(_all, 3, tmp_path_factory.mktemp("told"), timeout_s=60)


def test_metadata_of_all_ranks_is_checked_on_rank_0(told: list[Any]) -> None:
    for rank, ((everywhere, good, bad), *_) in enumerate(told):
        assert everywhere == [[("grid", (2 * r,)), ("o", (r,))] for r in range(3)]
        assert good == ""
        assert ("ranks [0, 1, 2]" in bad) == (rank == 0)


def _unpicklable(rank: int, world_size: int) -> str:
    try:
        common = {"f": (lambda: 1) if rank == 0 else None}
        validation.validate_sharding_integrity([[]], common)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_common_state_that_cannot_be_sent_is_an_error_on_all(told: list[Any]) -> None:
    first, *others = (text for _, text, _ in told)
    assert "lambda" in first
    assert all(text.startswith("RanksError") and "rank 0" in text for text in others)


def _save_with_one_main(rank: int, world_size: int, folder: Path) -> list[str]:
    """Each rank has copies of what another one writes, and rank 2 holds copies alone."""
    keys = ["a", "b"]
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.ones(2), replica_id=(0, int(rank != main)))
        for main, key in enumerate(keys)
    }
    state["o"] = ShardedObject("o", 1, (1,), (0,), replica_id=2 - rank)
    shardstore.save(state, folder / "step")
    return sorted(shardstore.load_tensors_metadata(folder / "step"))


def test_copies_of_what_another_rank_writes_are_fine(told: list[Any]) -> None:
    assert [names for *_, names in told] == [["a", "b"]] * 3
