"""One call loads a checkpoint of this package or of PyTorch DCP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardstore
from shardstore.dcp.reader import load_either
from shardstore.errors import NotACheckpointError
from shardstore.storage.stores.location import Location


def test_both_kinds_are_loaded_and_other_folders_are_an_error(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6.0), "step": 3}
    shardstore.save(saved, tmp_path / "own")
    dcp.save(saved, checkpoint_id=tmp_path / "dcp")
    for name in ("own", "dcp"):
        state = {"w": torch.zeros(6), "step": 0}
        loaded = load_either(state, Location.of(tmp_path / name))
        assert torch.equal(loaded["w"], saved["w"])
        assert loaded["step"] == 3
    (tmp_path / "none").mkdir()
    with pytest.raises(NotACheckpointError, match="the folder of one step"):
        load_either({}, Location.of(tmp_path / "none"))
