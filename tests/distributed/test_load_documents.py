"""Loads of ranks of one machine: each reads the documents, and they are the same or the
coordinator's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore.distributed.coordinator import Ranks
from shardstore.errors import CheckpointingException
from shardstore.loading import documents as load_documents
from shardstore.loading import run as loading
from shardstore.mapping import ShardedTensor
from shardstore.storage.stores.location import Location
from tests.helpers.ranks_helper import run_ranks

WORLD = 3


def _state(rank: int, world: int, *, filled: bool = False) -> dict[str, Any]:
    data = torch.full((2, 3), float(rank)) if filled else torch.zeros(2, 3)
    return {
        "w": ShardedTensor.from_rank_offsets("w", data, (0, rank, world)),
        "step": 7 if filled else 0,
    }


def _save(rank: int, world: int, folder: str, *, step: int = 7, **about: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    state = _state(rank, world, filled=True)
    state["step"] = step
    shardstore.save(state, folder, **about)


def _is_loaded(state: dict[str, Any], rank: int, step: int = 7) -> bool:
    return bool(state["step"] == step and (state["w"] == float(rank)).all())


class Counted:
    """Counts what ranks do together, and who reads documents."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.meetings = self.readings = 0
        self.answers: list[int] = []
        together, read = Ranks.together, load_documents.read_documents

        def counted(ranks: Ranks, *args: Any, **about: Any) -> bytes:
            self.meetings += 1
            answer = together(ranks, *args, **about)
            self.answers.append(len(answer))
            return answer

        def reading(location: Location) -> load_documents.Documents:
            self.readings += 1
            return read(location)

        monkeypatch.setattr(Ranks, "together", counted)
        monkeypatch.setattr(loading, "read_documents", reading)


def _loads(rank: int, world: int, folder: str) -> tuple[Any, ...]:
    _save(rank, world, folder)
    found = []
    for local in (world, 1):
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        with pytest.MonkeyPatch.context() as patch:
            counted = Counted(patch)
            right = _is_loaded(shardstore.load(_state(rank, world), folder), rank)
            found.append((right, counted.meetings, counted.readings, max(counted.answers) < 512))
    return tuple(found)


def test_ranks_of_one_machine_meet_twice_and_hand_out_nothing(tmp_path: Path) -> None:
    for rank, (alone, handed) in enumerate(run_ranks(_loads, WORLD, str(tmp_path / "x"))):
        assert alone == (True, 2, 1, True)
        assert handed == (True, 3, int(rank == 0), False)


def _sees_another(rank: int, world: int, folder: str) -> tuple[bool, int]:
    """One rank reads the documents of a save that was replaced since."""
    _save(rank, world, folder, step=6)
    old = load_documents.read_documents(Location.of(folder))
    _save(rank, world, folder, overwrite=True)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        if rank == 1:
            patch.setattr(loading, "read_documents", lambda _: old)
        return _is_loaded(shardstore.load(_state(rank, world), folder), rank), counted.meetings


def test_where_ranks_see_different_documents_all_load_the_coordinators(tmp_path: Path) -> None:
    assert run_ranks(_sees_another, WORLD, str(tmp_path / "x")) == [(True, 3)] * WORLD


def _fails(rank: int, world: int, folder: str) -> list[str]:
    _save(rank, world, folder)
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


def test_a_digest_tells_documents_apart() -> None:
    names = [("u", "a"), ("u", "b")]

    def digest(*texts: bytes | None) -> bytes | None:
        return load_documents.digest_of(dict(zip(names, texts, strict=True)))

    kinds: list[tuple[bytes | None, bytes | None]] = [
        (None, None),
        (None, b""),
        (b"", None),
        (b"", b""),
        (b"x", b"y"),
        (b"xy", b""),
        (b"", b"xy"),
        (b"-", None),
        (None, b"-"),
    ]
    assert len({digest(*kind) for kind in kinds}) == len(kinds)
    assert digest(b"x", b"y") == digest(b"x", b"y")
    assert load_documents.digest_of(None) is None
