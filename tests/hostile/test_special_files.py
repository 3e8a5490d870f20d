"""FIFOs, devices and folders in the place of files: an error at once, and `rm` removes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedObject
from shardstore.cli.app import run
from shardstore.convert.conversion import convert
from shardstore.errors import CheckpointingException
from tests.helpers.verification import findings

pytestmark = pytest.mark.timeout(20)

FILES = ["zarr.json", "metadata.json", "manifest.npz", "common.pt", "w/c.0.0", "w/zarr.json"]
FILES += ["o/shard_0_1.pt", "packed/c.0", "packed/zarr.json", ".owner.json", "integrity.json"]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()
    (path / "more").write_bytes(b"")


def nowhere(path: Path) -> None:
    path.symlink_to(path.name)


def state(value: float = 1.0) -> dict[str, Any]:
    tensors = {"w": torch.full((4, 6), value), "packed": torch.full((9,), value)}
    return {**shardstore.shard(tensors), "o": ShardedObject("o", [value], (1,), (0,)), "lr": value}


@pytest.fixture
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    compression = getattr(request, "param", None)
    shardstore.save(state(), tmp_path / "c", compression=compression, verify_integrity=True)
    return tmp_path / "c"


def look(place: Path) -> None:
    found = shardstore.open(place)
    _ = found.common, [found.objects[key] for key in found.objects], found.info
    _ = [found[key][...] for key in found]


def load(place: Path, **options: Any) -> None:
    loaded: Any = shardstore.load(state(0.0), place, **options)
    assert (loaded["w"].sum(), loaded["o"], loaded["lr"]) == (24, [1], 1)


def check_hashes(place: Path) -> None:
    load(place, verify_integrity=True)


def convert_it(place: Path) -> None:
    convert(place, place.parent / "converted")


@pytest.mark.parametrize("put", [fifo, zeros, folder, nowhere])
@pytest.mark.parametrize(
    ("saved", "name"),
    [*((None, name) for name in FILES), ("zstd", "w/c.0.0"), ("zstd", "manifest.npz")],
    indirect=["saved"],
)
def test_special_files_in_place_of_files_are_not_read(
    saved: Path, name: str, put: Callable[[Path], None]
) -> None:
    if (saved / name).exists():
        (saved / name).unlink()
    put(saved / name)
    for read in (load, look, shardstore.load_plain_tensors, convert_it):
        with suppress(CheckpointingException):
            read(saved)
    try:
        told = any(finding.severity == "damage" for finding in findings(saved))
    except CheckpointingException:
        told = True
    assert told or name in ("manifest.npz", ".owner.json", "integrity.json")
    if name != ".owner.json":
        with pytest.raises(CheckpointingException):
            check_hashes(saved)
    assert run(["rm", "--yes", str(saved)]) == 0
    left = {path for path in saved.rglob("*") if not path.is_dir()}
    assert left <= {saved / name / "more"}  # which nobody's save wrote


@pytest.mark.parametrize("put", [fifo, zeros, folder])
def test_a_save_replaces_special_files(saved: Path, put: Callable[[Path], None]) -> None:
    for name in ("zarr.json", "manifest.npz"):
        (saved / name).unlink()
        put(saved / name)
    shardstore.save(state(), saved, overwrite=True)
    load(saved)
