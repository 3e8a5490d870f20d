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
from tests.golden.make_shardstore import write_all
from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_text

COMMIT = "7853ef5"
"""Of version 0.1.0."""
NAMES = ["plain", "chunked", "flattened", "objects", "common", "zstd", "no-array-documents"]
UNKNOWN_TYPES = ["float8_e8m0fnu", "float4_e2m1fn_x2"]
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


def write_unknown(folder: Path) -> None:
    """Checkpoints with data types that version 0.1.0 lacks, and in the format in which other
    readers take a missing chunk for fill values."""
    tensor = torch.arange(12, dtype=torch.uint8)
    for name in UNKNOWN_TYPES:
        state = {"w": tensor.view(getattr(torch, name)), "other": torch.ones(3)}
        for compression in (None, "zstd"):
            place = folder / f"{name}-{compression}"
            shardstore.save(shardstore.shard(state), place, compression=compression)
    for option in ("constants", "pack"):
        state = {"w": tensor, "step": torch.tensor(7)}
        shardstore.save(shardstore.shard(state), folder / option, **{option: True})


@pytest.fixture(scope="module")
def answers(
    old: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What version 0.1.0 and this one find in checkpoints, by their names."""
    folder = tmp_path_factory.mktemp("written")
    write_all(NAMES, folder)
    write_unknown(folder)
    places = sorted(map(str, folder.iterdir()))
    alone = {"PYTHONPATH": str(old), "PATH": "/usr/bin:/bin", "HOME": str(old)}
    before = run_to_end([sys.executable, "-c", PROGRAM, *places], env=alone, cwd=old)
    now = run_text(PROGRAM, *places)
    found = []
    for done, package in ((before, old), (now, ROOT)):
        assert done.returncode == 0, done.stderr[-3000:]
        said: dict[str, Any] = json.loads(done.stdout.rsplit("FOUND", 1)[1])
        assert said.pop("file").startswith(str(package))
        assert list(said) == places
        found.append({Path(place).name: answer for place, answer in said.items()})
    return found[0], found[1]


def test_the_old_version_reads_what_is_written_now(answers: Any) -> None:
    before, now = answers
    for name in NAMES:
        assert before[name] == now[name]
        assert before[name]["verify"] == 0
        assert before[name]["tensors"]


def test_the_old_version_refuses_what_it_does_not_know(answers: Any) -> None:
    """By name, and not with other values."""
    before, now = answers
    unknown = before.keys() - {*NAMES}
    assert len(unknown) == 6
    for place in unknown:
        name = place.partition("-")[0]
        refused = f"data type '{name}' is not one that this version reads"
        assert (refused if name in UNKNOWN_TYPES else "FormatVersionError") in before[place], place
        assert now[place]["verify"] == 0
