"""A file of ``torch.save`` whose directory names places outside of the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedObject, ShardedTensor
from shardstore.errors import DamagedCheckpointError
from tests.helpers.verification import findings

FILES = ["common.pt", "o/shard_0_1.pt"]
ENTRY, OFFSET = b"PK\x01\x02", 42
"""A record's entry in the directory begins so; in it, the offset of the record's header (APPNOTE,
4.3.12)."""


def state() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(4)),
        "o": ShardedObject("o", {"a": 1}, (1,), (0,)),
        "step": 3,
    }


@pytest.mark.parametrize("before_end", [-(2**31), -1, 0, 1, 3, 4, 29])
@pytest.mark.parametrize("name", FILES)
def test_a_header_beyond_the_end_is_damage(tmp_path: Path, name: str, before_end: int) -> None:
    place = tmp_path / "c"
    shardstore.save(state(), place)
    data = bytearray((place / name).read_bytes())
    at = data.index(ENTRY) + OFFSET
    struct.pack_into("<I", data, at, len(data) - before_end)
    (place / name).write_bytes(data)
    damage = [finding for finding in findings(place) if finding.severity == "damage"]
    assert any(finding.path.endswith(name) for finding in damage)
    with pytest.raises(DamagedCheckpointError, match=name):
        shardstore.load(state(), place)
