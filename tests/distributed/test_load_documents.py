"""Loads of several ranks: one reads the documents for all, and an error of one reaches all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.errors import CheckpointingException
from shardstore.loading import run as loading
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from tests.helpers.ranks_helper import run_ranks

WORLD = 3


def _state(rank: int, world: int, *, filled: bool = False) -> dict[str, Any]:
    data = torch.full((2, 3), float(rank)) if filled else torch.zeros(2, 3)
    return {
        "w": ShardedTensor.from_rank_offsets("w", data, (0, rank, world)),
        "step": 7 if filled else 0,
    }


def _loads(rank: int, world: int, folder: str) -> tuple[bool, list[str]]:
    shardstore.save(_state(rank, world, filled=True), folder)
    names: list[str] = []
    read = loading.read_documents

    def reading(*args: Any, **options: Any) -> StoredCheckpoint:
        names.extend(args[1])
        return read(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_documents", reading)
        state = shardstore.load(_state(rank, world), folder)
    assert isinstance(state, dict)
    return bool(state["step"] == 7 and (state["w"] == float(rank)).all()), names


def test_one_rank_reads_the_documents_for_all(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(_loads, WORLD, str(tmp_path / "x"))):
        assert found == (True, [*loading.DOCUMENTS] if rank == 0 else [])


def _fails(rank: int, world: int, folder: str) -> list[str]:
    shardstore.save(_state(rank, world, filled=True), folder)
    texts = []

    def attempt(state: dict[str, Any], place: str) -> None:
        try:
            shardstore.load(state, place)
            texts.append("")
        except CheckpointingException as error:
            texts.append(f"{type(error).__name__}: {error}")

    attempt(_state(rank, world), folder if rank != 1 else f"{folder}-not-here")
    attempt(_state(rank, world), f"{folder}-nowhere")
    twice = _state(0, world)
    attempt(twice, folder)
    assert not twice["w"].data.any(), "nothing is read once a rank has failed"
    return texts


def test_what_is_wrong_on_one_rank_reaches_all(tmp_path: Path) -> None:
    folder = str(tmp_path / "x")
    for rank, texts in enumerate(run_ranks(_fails, WORLD, folder)):
        place, nowhere, twice = texts
        assert "NotACheckpointError" in place if rank == 1 else "rank 1: " in place
        assert "does not exist" in place
        assert nowhere.startswith("NotACheckpointError"), nowhere
        assert "does not exist" in nowhere
        assert twice.startswith("AccessPatternError"), twice
