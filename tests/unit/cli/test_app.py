"""What commands cost beside their work, by counting modules, files and requests; over S3; Ctrl-C.

Nothing here is timed: ``scripts/benchmark cli`` does that.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardstore
from shardstore.cli import app, options
from shardstore.cli.app import run
from shardstore.convert import convert
from shardstore.inspection import values as array_values
from shardstore.inspection.opened import OpenCheckpoint, StoredArray
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Box, Grid
from shardstore.storage.stores.location import Location
from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import Cli, values
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


def test_all_commands_over_s3(
    s3_server: S3Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = s3_server.new_bucket()
    url = f"s3://{bucket}/run/step-1"
    state = shardstore.shard({**values(), "step": 1})
    shardstore.save(state, url, storage_options=s3_server.storage_options)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)

    assert len(cli("ls", "--json", url).json["arrays"]) == 7
    outcome = cli("verify", url)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert outcome.out.startswith("OK: 7 arrays")
    assert cli("stats", "--json", url, "layers.10.odd").json["arrays"][0]["nan"] == 1
    assert cli("show", "--json", url, "counts[1]").json["values"] == -4 * 2**40
    assert cli("diff", url, url).code == 0

    client = s3_server.client()
    client.delete_object(Bucket=bucket, Key="run/step-1/counts/c.0")
    (found,) = cli("verify", "--json", url).json["findings"]
    assert (found["kind"], found["key"], found["rank"]) == ("chunk-missing", "counts", 0)
    assert cli("show", url, "counts").code == 1
    assert cli("rm", "--yes", url).code == 0
    assert "objects" not in cli.refused("ls", url)
    assert client.list_objects_v2(Bucket=bucket).get("KeyCount") == 0


def test_options_on_the_command_line(s3_server: S3Server, cli: Cli) -> None:
    bucket = s3_server.new_bucket()
    url = f"s3://{bucket}/c"
    state = shardstore.shard({"w": values()["counts"]})
    shardstore.save(state, url, storage_options=s3_server.storage_options)
    words = ["--storage-option", f"key={s3_server.key}"]
    words += ["--storage-option", f"secret={s3_server.secret}"]
    words += ["--storage-option", f"client_kwargs.endpoint_url={s3_server.endpoint_url}"]
    words += ["--storage-option", f"client_kwargs.region_name={s3_server.region}"]
    assert cli("verify", url, *words).code == 0
    wrong = ["key=nobody" if word.startswith("key=") else word for word in words]
    line = cli.refused("ls", url, *wrong)
    assert s3_server.secret not in line


def test_an_interrupt_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "locate", interrupted)
    assert app.run(["rm", "-y", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_what_is_read_in_threads_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece may be a request to a slow store."""
    monkeypatch.setattr(array_values, "default_threads", lambda: 2)
    begun = threading.Event()
    pieces = 0

    def work(array: StoredArray, box: Box) -> None:
        nonlocal pieces
        pieces += 1
        if threading.current_thread() is threading.main_thread():
            begun.set()
            raise KeyboardInterrupt
        assert begun.wait(60)

    stored = StoredCheckpoint(Location.of("/no/such/place"))
    meta = ArrayMeta("w", "w", Grid((4000,), (4,)), "float32")
    stored.arrays = {"w": meta}
    with pytest.raises(KeyboardInterrupt):
        array_values.stream(list(OpenCheckpoint(stored).values()), work)
    assert pieces <= 3
