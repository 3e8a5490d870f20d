"""What commands cost beside their work, by counting: modules imported, files opened, requests made.

Nothing here is timed: ``scripts/benchmark cli`` does that.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardstore
from shardstore.convert import convert
from shardstore.mapping import ShardedTensor
from testing.s3_proxy import FaultProxy
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import Cli
from tests.helpers.processes import run_to_end

HEAVY = {"torch", "tensorstore", "zarr", "xarray", "matplotlib", "pandas"}
SMALL_ARRAYS = 60


def modules_after(program: str, *arguments: str) -> set[str]:
    """Names of the packages that a new interpreter has imported when a program has run."""
    ending = (
        "\nimport json, sys\n"
        "names = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print(json.dumps(names), file=sys.stderr)\n"
    )
    done = run_to_end([sys.executable, "-c", program + ending, *arguments])
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def modules_of_command(*arguments: object) -> set[str]:
    program = "import sys\nfrom shardstore.cli.app import run\nassert run(sys.argv[1:]) == 0"
    return modules_after(program, *map(str, arguments))


def test_importing_shardstore_imports_nothing_of_others() -> None:
    before = modules_after("")
    after = modules_after("import shardstore")
    assert after - before <= {"shardstore"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("command", ["ls", "info", "verify", "diff", "rm"])
def test_commands_that_read_no_values_import_little(place: Path, command: str) -> None:
    others = {"diff": [place], "rm": ["--yes"]}.get(command, [])
    imported = modules_of_command(command, place, *others)
    # Removing may come to an object store, and what talks to one is imported with it.
    assert not imported & (HEAVY - {"tensorstore"} if command == "rm" else HEAVY)
    if command == "ls":
        assert not imported & {"numpy", "ml_dtypes", "fsspec", "rich", "asyncio"}
    if command in ("ls", "info", "verify"):
        assert not imported & {"fsspec", "s3fs"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "PLACE", "layers.0.weight[0]"],
        ["stats", "PLACE", "layers"],
        ["plot", "layout", "PLACE", "layers.0.weight", "-o", "OUT.svg"],
        ["plot", "histogram", "PLACE", "layers.0.weight", "-o", "OUT.svg"],
        ["report", "PLACE", "-o", "OUT.html"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_that_read_values_import_no_torch(
    place: Path, tmp_path: Path, arguments: list[str]
) -> None:
    names = {"PLACE": str(place), "OUT.svg": f"{tmp_path}/p.svg", "OUT.html": f"{tmp_path}/r.html"}
    imported = modules_of_command(*(names.get(word, word) for word in arguments))
    assert not imported & HEAVY


@pytest.mark.parametrize("names", [("a", "b.safetensors"), ("b.safetensors", "a")])
def test_conversions_of_what_is_not_torchs_import_no_torch(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    first, source, target = (tmp_path / name for name in ("first.safetensors", *names))
    save_file({"w": np.arange(6.0), "n": np.ones((2, 3), np.int8)}, first)
    convert(first, source)
    imported = modules_of_command("convert", source, target)
    assert not imported & {"torch", "matplotlib", "pandas", "xarray"}
    assert target.exists()


def test_help_imports_little() -> None:
    assert not modules_of_command("ls", "--help") & (HEAVY | {"numpy", "fsspec"})


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of small arrays, one chunk each."""
    place = tmp_path_factory.mktemp("many") / "step-1"
    shardstore.save(small_state(), place)
    return place


def small_state() -> dict[str, Any]:
    values = {f"layers.{i}.w": torch.full((3, i + 1), float(i)) for i in range(SMALL_ARRAYS)}
    return {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}


COUNTING = """
import collections, sys
opened = collections.Counter()
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        opened[event, "/layers." in str(arguments[0])] += 1
from shardstore.cli.app import run
import shardstore.inspection.verify
sys.addaudithook(hook)
code = run(sys.argv[1:])
files, lists = opened["open", True], opened["os.listdir", True] + opened["os.scandir", True]
print(code, files, lists, opened["open", False])
"""


def counted(*arguments: object) -> list[int]:
    done = run_to_end([sys.executable, "-c", COUNTING, *arguments], check=True)
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


def test_verifying_opens_each_file_once(many: Path) -> None:
    code, files, lists, _ = counted("verify", many)
    assert code == 0
    # A document and a chunk each, unless compiled code opens the chunks: the hook misses those.
    assert files in (SMALL_ARRAYS, 2 * SMALL_ARRAYS)
    assert lists == SMALL_ARRAYS


def test_listing_opens_no_file_of_an_array(many: Path) -> None:
    code, files, lists, _ = counted("ls", many)
    assert (code, files, lists) == (0, 0, 0)


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
    loop = f"for i in 1 2 3 4; do {sys.executable} -m shardstore ls {many} --json | head -1; done"
    done = run_to_end(["bash", "-e", "-o", "pipefail", "-c", loop])
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n" * 4, "")


@pytest.mark.parametrize(
    "arguments", ["verify A", "verify A --json", "diff A B", "stats A", "ls B/no"]
)
def test_a_result_is_told_to_the_shell_whoever_reads(
    many: Path, tmp_path: Path, arguments: str
) -> None:
    """`shardstore verify CKPT | head -1` in a script: damage is no success because of `head`."""
    shutil.copytree(many, tmp_path / "A")
    for chunk in tmp_path.glob("A/*/c*"):
        if chunk.is_file():
            chunk.write_bytes(b"x" * chunk.stat().st_size)
    shardstore.save(shardstore.shard({"other": torch.ones(2)}), tmp_path / "B")
    given = re.sub("[AB]", lambda found: str(tmp_path / found[0]), arguments)
    script = f"{sys.executable} -m shardstore {given} 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    alone = run_to_end([sys.executable, "-m", "shardstore", *given.split()])
    done = run_to_end(["bash", "-c", script])
    assert alone.returncode == (2 if "no" in arguments else 1)
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, "", "")
