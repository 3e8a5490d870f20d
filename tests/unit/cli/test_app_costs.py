"""What commands cost beside their work, by counting: modules imported, files opened, requests made.

Nothing here is timed: ``scripts/benchmark cli`` does that.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardstore
from shardstore.cli.app import run
from shardstore.convert import convert
from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import Cli
from tests.helpers.cli_processes import run_commands
from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_text

HEAVY = {"torch", "tensorstore", "zarr", "xarray", "matplotlib", "pandas"}
LISTING = HEAVY | {"numpy", "ml_dtypes", "fsspec", "asyncio"}
STORES = HEAVY | {"fsspec", "s3fs"}
# What no command before may have imported either, so the strictest are first.
COMMANDS: list[tuple[str, set[str]]] = [
    ("ls PLACE", LISTING | {"rich"}),
    ("ls --help", LISTING),
    ("info PLACE", STORES),
    ("verify PLACE", STORES),
    ("diff PLACE PLACE", HEAVY),
    ("show PLACE layers.0.weight[0]", HEAVY),
    ("stats PLACE layers", HEAVY),
    ("plot layout PLACE layers.0.weight -o OUT/p.svg", HEAVY),
    ("plot histogram PLACE layers.0.weight -o OUT/p.svg", HEAVY),
    ("report PLACE -o OUT/r.html", HEAVY),
    # Removing may come to an object store, and what talks to one is imported with it.
    ("rm PLACE --yes", HEAVY - {"tensorstore"}),
    ("convert OUT/source OUT/t.safetensors", {"torch", "xarray", "matplotlib", "pandas"}),
    ("convert OUT/t.safetensors OUT/again", {"torch", "xarray", "matplotlib", "pandas"}),
]
SMALL_ARRAYS = 30


def test_commands_import_little_of_others(place: Path, tmp_path: Path) -> None:
    """The package itself nothing, and what converts arrays of NumPy no torch."""
    save_file({"w": np.arange(6.0), "n": np.ones((2, 3), np.int8)}, tmp_path / "first.safetensors")
    convert(tmp_path / "first.safetensors", tmp_path / "source")
    given = [words.replace("PLACE", str(place)).split() for words, _ in COMMANDS]
    ran = run_commands([word.replace("OUT", str(tmp_path)) for word in words] for words in given)
    assert ran.codes == [0] * len(COMMANDS), ran.err
    before, package, *after = ran.modules
    assert {name.partition(".")[0] for name in package - before} <= {
        "shardstore",
        *sys.stdlib_module_names,
    }
    assert len(package) < 200
    for (words, forbidden), modules in zip(COMMANDS, after, strict=True):
        assert not modules & forbidden, words


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of small arrays, one chunk each."""
    place = tmp_path_factory.mktemp("many") / "step-1"
    shardstore.save(small_state(), place)
    return place


def small_state() -> dict[str, Any]:
    return shardstore.shard(
        {f"layers.{i}.w": torch.full((3, i + 1), float(i)) for i in range(SMALL_ARRAYS)}
    )


COUNTING = """
import collections, sys
opened = collections.Counter()
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and "/layers." in str(arguments[0]):
        opened[event] += 1
from shardstore.cli.app import run
import json, shardstore.inspection.verify
sys.addaudithook(hook)
told = []
for command in ("ls", "verify"):
    opened.clear()
    code = run([command, sys.argv[1]])
    told.append([code, opened["open"], opened["os.listdir"] + opened["os.scandir"]])
print(json.dumps(told))
"""


def test_listing_opens_no_file_of_an_array_and_verifying_each_once(many: Path) -> None:
    done = run_text(COUNTING, many)
    assert done.returncode == 0, done.stderr
    listed, (code, files, lists) = json.loads(done.stdout.splitlines()[-1])
    assert listed == [0, 0, 0]
    # A document and a chunk each, unless compiled code opens the chunks: the hook misses those.
    assert files in (SMALL_ARRAYS, 2 * SMALL_ARRAYS)
    assert (code, lists) == (0, SMALL_ARRAYS)


def test_requests_to_an_object_store(
    s3_server: S3Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{s3_server.new_bucket()}/run/step-1"
    shardstore.save(small_state(), url, storage_options=s3_server.storage_options)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with FaultProxy(s3_server.endpoint_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint_url)
        assert len(cli("ls", "--json", url).json["arrays"]) == SMALL_ARRAYS
        # The root document alone; s3fs asks for its size first.
        assert proxy.count() == proxy.count(path="/run/step-1/zarr.json") <= 2
        before = proxy.count()
        assert cli("info", url).code == 0
        assert proxy.count() - before <= 2 * 3  # root, configuration and manifest
        assert cli("verify", url).code == 0
        # A document and a chunk of each array, and no listing of each.
        assert proxy.count("GET") <= 2 * SMALL_ARRAYS + 20
        assert proxy.count(path="list-type") <= 6


def test_a_reader_that_has_seen_enough_is_no_failure(many: Path) -> None:
    """`shardstore ls CKPT | head -1`, in a shell that minds how each command ends."""
    loop = f"for i in 1 2; do {sys.executable} -m shardstore ls {many} --json | head -1; done"
    done = run_to_end(["bash", "-e", "-o", "pipefail", "-c", loop])
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n" * 2, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("verify A", 1), ("verify A --json", 1), ("diff A B", 1), ("stats A", 1), ("ls B/no", 2)],
)
def test_a_result_is_told_to_the_shell_whoever_reads(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int
) -> None:
    """`shardstore verify CKPT | head -1` in a script: damage is no success because of `head`."""
    for chunk in place.glob("*/c.*"):
        chunk.write_bytes(b"x" * chunk.stat().st_size)
    shardstore.save(shardstore.shard({"other": torch.ones(2)}), tmp_path / "B")
    names = {"A": str(place), "B": f"{tmp_path}/B"}
    given = re.sub("[AB]", lambda found: names[found[0]], arguments)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, redirect_stderr(pipe):
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, pipe)
        assert run(given.split()) == code
