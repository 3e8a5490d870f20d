"""Version 0.1.0 reads what is written now: the package as it was, from the history of git."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import shardstore
from shardstore import ShardedTensor
from tests.golden.make_shardstore import write_all
from tests.helpers.processes import run_to_end

COMMIT = "7853ef5"
"""Of version 0.1.0."""
NAMES = ["plain", "chunked", "flattened", "objects", "common", "zstd", "no-array-documents"]
ROOT = Path(__file__).parents[2]

PROGRAM = """
import hashlib, json, sys, warnings
import torch
warnings.filterwarnings("ignore")
import shardstore
from shardstore.cli.app import run

def exact(value):
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(raw).hexdigest()]
    if isinstance(value, dict):
        return {repr(key): exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(exact, value)]
    return repr(value) if not hasattr(value, "__dict__") else exact(vars(value))

found = {"file": shardstore.__file__}
for place in sys.argv[1:]:
    try:
        shardstore.load_plain_tensors(place)
    except (shardstore.errors.DTypeMismatchError, shardstore.errors.FormatVersionError) as error:
        found[place] = f"{type(error).__name__}: {error}"
        continue
    found[place] = {
        "tensors": exact(shardstore.load_plain_tensors(place)),
        "objects": sorted(shardstore.load_sharded_metadata(place)),
        "verify": run(["verify", place]),
    }
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of version 0.1.0, if this checkout has it."""
    command = ["git", "-C", str(ROOT), "archive", "--format=zip", COMMIT, "shardstore"]
    try:
        made = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no git here")
    if made.returncode:
        pytest.skip(f"this checkout is no repository with commit {COMMIT}: {made.stderr[:200]!r}")
    folder = tmp_path_factory.mktemp("old")
    with zipfile.ZipFile(BytesIO(made.stdout)) as archive:
        archive.extractall(folder)
    return folder


def answers(package: Path, places: list[str]) -> dict[str, Any]:
    """What a version of the package, in a process of its own, finds in checkpoints."""
    environment = {"PYTHONPATH": str(package), "PATH": "/usr/bin:/bin", "HOME": str(package)}
    done = run_to_end([sys.executable, "-c", PROGRAM, *places], env=environment, cwd=package)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.rsplit("FOUND", 1)[1])
    assert found.pop("file").startswith(str(package))
    return found


def test_the_old_version_reads_what_is_written_now(old: Path, tmp_path: Path) -> None:
    write_all(NAMES, tmp_path)
    places = [str(tmp_path / name) for name in NAMES]
    before, now = answers(old, places), answers(ROOT, places)
    assert before.keys() == now.keys() == set(places)
    for place in places:
        assert before[place] == now[place]
        assert before[place]["verify"] == 0
        assert before[place]["tensors"]


def test_the_old_version_refuses_what_it_does_not_know(old: Path, tmp_path: Path) -> None:
    """By name, and not with other values: data types that it lacks, and the format in which other
    readers take a missing chunk for fill values."""
    names = ["float8_e8m0fnu", "float4_e2m1fn_x2"]
    tensor = torch.arange(12, dtype=torch.uint8)
    wanted = {}
    for name in names:
        state = {"w": tensor.view(getattr(torch, name)), "other": torch.ones(3)}
        for compression in (None, "zstd"):
            place = str(tmp_path / f"{name}-{compression}")
            shardstore.save(sharded(state), place, compression=compression)
            wanted[place] = f"data type '{name}' is not one that this version reads"
    for option in ("constants", "pack"):
        place = str(tmp_path / option)
        shardstore.save(sharded({"w": tensor, "step": torch.tensor(7)}), place, **{option: True})
        wanted[place] = "FormatVersionError"
    for place, text in answers(old, list(wanted)).items():
        assert wanted[place] in text, place
    for answer in answers(ROOT, list(wanted)).values():
        assert answer["verify"] == 0


def sharded(state: dict[str, torch.Tensor]) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, one) for key, one in state.items()}
