"""A small checkpoint of two ranks for the tests of the command line, and its commands in process.

Saved once by really spawned ranks, so that writers differ; copied before it is damaged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstore
from shardstore.cli.app import run
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

WORLD = 2
CHUNK_BYTES = 2048


def values() -> dict[str, torch.Tensor]:
    """What the checkpoint holds, whole."""
    g = torch.Generator().manual_seed(7)
    odd = torch.linspace(-3, 3, 60).bfloat16()
    odd[3], odd[4], odd[5] = float("nan"), float("inf"), float("-inf")
    return {
        "layers.0.weight": torch.randn(64, 24, generator=g),
        "layers.1.weight": torch.randn(64, 24, generator=g).bfloat16(),
        "layers.10.odd": odd,
        "embedding.f8": (torch.randn(8, 6, generator=g) * 20).to(torch.float8_e4m3fn),
        "counts": torch.arange(-5, 7, dtype=torch.int64) * 2**40,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }


CUT = {"layers.0.weight": 0, "layers.1.weight": 1}


def save(
    rank: int, world: int, place: str, scale: float = 1.0, array_documents: bool = True
) -> None:
    """Called by each rank."""
    state: dict[str, Any] = {"iteration": 7}
    for key, value in values().items():
        if key == "layers.1.weight":
            value = value * scale
        if key in CUT and world > 1:
            axis = CUT[key]
            part = value.chunk(world, axis)[rank].contiguous()
            state[key] = ShardedTensor.from_rank_offsets(key, part, (axis, rank, world))
        else:
            state[key] = ShardedTensor.from_rank_offsets(key, value, replica_id=rank)
    state["rng"] = ShardedObject("rng", {"seed": rank}, (world,), (rank,))
    strategy = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=CHUNK_BYTES)
    shardstore.save(
        state,
        place,
        strategy,
        content_metadata={"note": "<b>small & odd</b>"},
        array_documents=array_documents,
    )


@dataclass
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as strict JSON: without NaN, which it does not have."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} in JSON")

        return json.loads(self.out, parse_constant=refuse)


@dataclass
class Cli:
    """Runs commands in this process."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Outcome:
        self.capture.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = self.capture.readouterr()
        assert "Traceback" not in err
        return Outcome(code, out, err)

    def refused(self, *arguments: object) -> str:
        """One helpful line, nothing else, and exit code 2; returns the line."""
        outcome = self(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.count("\n") == 1
        assert outcome.err.startswith("shardstore: ")
        return outcome.err


def as_float64(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A tensor's values, by torch."""
    return tensor.double().numpy()


def flip(path: Path, position: int = 10) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
