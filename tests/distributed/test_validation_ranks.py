"""What validation does between ranks: gathering, checking on rank 0, comparing the common part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import validation
from shardstore.errors import AccessPatternError, CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor
from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import logged


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


def test_metadata_of_all_ranks_is_checked_on_rank_0() -> None:
    results = run_ranks(_gathered, 3)
    for rank, (everywhere, good, bad) in enumerate(results):
        assert everywhere == [[("grid", (2 * r,)), ("o", (r,))] for r in range(3)]
        assert good == ""
        assert ("ranks [0, 1, 2]" in bad) == (rank == 0)


def _common(rank: int, world_size: int, differ: bool) -> list[str]:
    common: dict[str, Any] = {"step": 5, "t": torch.arange(3), "deep": {"list": [1, 2]}}
    common["float8"] = torch.ones(2).to(torch.float8_e5m2)
    common["float4"] = torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    if differ and rank == 1:
        del common["step"]
        common["mine"] = 1
        common["deep"]["list"][1] = 3
    metadata = validation.determine_global_metadata({"a": _cell(rank, world_size)})[1]
    with logged() as texts:
        validation.validate_sharding_integrity(metadata, common)
    return texts


def test_common_state_that_differs_is_logged_by_the_rank_itself() -> None:
    first, second, third = run_ranks(_common, 3, True)
    assert (first, third) == ([], [])
    assert second == [
        "The common values of rank 1 differ from those of rank 0, which are saved. "
        "Only on rank 0: [('step',)]; only on rank 1: [('mine',)]; "
        "different: [(('deep', 'list', 1), <class 'int'>, <class 'int'>)]"
    ]


def test_common_state_that_agrees_is_not_mentioned() -> None:
    assert run_ranks(_common, 2, False) == [[], []]


def _unpicklable(rank: int, world_size: int) -> str:
    try:
        common = {"f": (lambda: 1) if rank == 0 else None}
        validation.validate_sharding_integrity([[]], common)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_common_state_that_cannot_be_sent_is_an_error_on_all() -> None:
    first, second = run_ranks(_unpicklable, 2, timeout_s=60)
    assert "lambda" in first
    assert second.startswith("RanksError")
    assert "rank 0" in second


def _save_without_main(rank: int, world_size: int, folder: Path, kind: str) -> str:
    fine = ShardedTensor.from_rank_offsets("fine", torch.ones(2), replica_id=rank)
    lost: Any = ShardedTensor.from_rank_offsets("lost", torch.ones(2), replica_id=rank + 1)
    if kind == "object":
        lost = ShardedObject("lost", 1, (1,), (0,), replica_id=(0, rank + 1))
    if kind == "on one rank" and rank == 0:
        lost = []
    try:
        shardstore.save({"fine": fine, "lost": lost}, folder / kind)
    except CheckpointingException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["tensor", "object", "on one rank"])
def test_what_has_no_main_replica_anywhere_is_not_lost_without_a_word(
    tmp_path: Path, kind: str
) -> None:
    for rank, text in enumerate(run_ranks(_save_without_main, 2, tmp_path, kind)):
        assert "'lost" in text, rank
        assert "no main replica" in text, rank
    assert not (tmp_path / kind).exists()


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


def test_copies_of_what_another_rank_writes_are_fine(tmp_path: Path) -> None:
    assert run_ranks(_save_with_one_main, 3, tmp_path) == [["a", "b"]] * 3
