"""The storage writer of PyTorch DCP: what one writer does for several saves."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore.dcp import StorageReader, StorageWriter
from shardstore.errors import CheckpointExistsError


def state_of(value: float) -> dict[str, Any]:
    return {f"t{n}": torch.full((1 << 17,), value) for n in range(8)}


def values_in(place: Path) -> set[float]:
    state = state_of(-1)
    dcp.load(state, storage_reader=StorageReader(place), no_dist=True)
    return {float(one) for tensor in state.values() for one in (tensor.min(), tensor.max())}


def test_a_writer_serves_several_saves_at_the_same_time(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "unnamed")
    places = [tmp_path / f"c{n}" for n in range(4)]
    saves: list[Any] = [
        dcp.async_save(state_of(n), storage_writer=writer, checkpoint_id=place, no_dist=True)
        for n, place in enumerate(places)
    ]
    saves.append(dcp.async_save(state_of(9), storage_writer=writer, no_dist=True))
    for save in saves:
        save.result()
    assert [values_in(place) for place in places] == [{0}, {1}, {2}, {3}]
    assert values_in(tmp_path / "unnamed") == {9}
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]


def test_a_writer_serves_saves_after_one_that_failed(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "a", overwrite=True)
    bad = {**state_of(1), "w": object()}
    for save in (dcp.save, lambda *a, **k: dcp.async_save(*a, **k).result()):
        with pytest.raises(dcp.CheckpointException):
            save(bad, storage_writer=writer, no_dist=True)
        save(state_of(2), storage_writer=writer, no_dist=True)
        assert values_in(tmp_path / "a") == {2}
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_a_copy_in_another_process_writes_to_the_place_that_was_named_last(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "a")
    writer.reset(tmp_path / "b")
    copy = pickle.loads(pickle.dumps(writer))
    dcp.save(state_of(3), storage_writer=copy, no_dist=True)
    assert values_in(tmp_path / "b") == {3}
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.save(state_of(3), storage_writer=copy, no_dist=True)
    assert isinstance(raised.value.failures[0][0], CheckpointExistsError)
    assert shardstore.latest(tmp_path) == str(tmp_path / "b")
