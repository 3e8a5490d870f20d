"""Documents of a hundred thousand nested lists, on which JSON parsers raise ``RecursionError``."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from shardstore.cli.app import run
from shardstore.errors import CheckpointingException
from shardstore.storage.commit.checkpoints import delete_checkpoint
from shardstore.storage.stores.location import Location

NESTED = b"[" * 100_000
MARKS = [".attempts/000001.json", ".attempts/000001.nodes-0.json"]


def state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}


CALLS: dict[str, Callable[[str], object]] = {
    "load": lambda place: shardstore.load(state(), place),
    "open": shardstore.open,
    "save": lambda place: shardstore.save(state(), place),
    "overwrite": lambda place: shardstore.save(state(), place, overwrite=True),
    "delete": delete_checkpoint,
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["zarr.json", "metadata.json", *MARKS])
@pytest.mark.parametrize("kind", ["folder", "store"])
def test_calls_survive_deeply_nested_documents(
    tmp_path: Path, kind: str, name: str, call: str
) -> None:
    """Each returns, or raises an error of ours."""
    place = str(tmp_path / "c") if kind == "folder" else f"memory://{uuid.uuid4().hex}/c"
    Location.of(place).write(name, NESTED)
    Location.of(place).write("w/c.0", b"x")
    with suppress(CheckpointingException):
        CALLS[call](place)


@pytest.mark.parametrize("command", ["verify", "info", "ls", "rm --yes", "gc"])
@pytest.mark.parametrize("name", ["zarr.json", "metadata.json"])
def test_commands_survive_deeply_nested_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name).write_bytes(NESTED)
    run([*command.split(), str(tmp_path / "c")])
    said = capsys.readouterr()
    assert "unexpected" not in said.err + said.out
    assert "Traceback" not in said.err + said.out
