"""A GPT of Megatron-Core's own classes, saved and loaded by its own calls, with it and with this
package in its place, under several layouts of tensor and pipeline parallel ranks: bit for bit.

Each test is one start of ``gpt.py``; later ones read what earlier ones wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardstore
from shardstore.convert import convert
from tests.helpers import megatron_releases
from tests.helpers.megatron_releases import ENVIRONMENT, PROGRAMS

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ENVIRONMENT / "0.19.2").is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    return tmp_path_factory.mktemp("gpt")


def run(version: str, layout: tuple[int, int], actions: list[list[Any]], **task: Any) -> None:
    """Run ``gpt.py`` with a release of Megatron-Core, in its environment or here to install."""
    task |= {"tp": layout[0], "pp": layout[1], "actions": [[*one, {}][:3] for one in actions]}
    program = PROGRAMS / "gpt.py", json.dumps(task, default=str)
    megatron_releases.run(version, *program, alone=not task.get("install"))


def loads(folder: Path, *names: str) -> list[list[Any]]:
    """Loads of those that were written: some are only in a long run."""
    return [["load", folder / name] for name in names if (folder / name).exists()]


@pytest.mark.long
def test_installed_in_0_15_it_writes_torch_dist(folder: Path) -> None:
    run("0.15.3", (1, 2), [["save_async", folder / "d15"]], install="torch_dist")
    assert (folder / "d15" / "common.pt").exists()


def test_installed_in_0_19_it_writes_the_common_part_as_an_object(folder: Path) -> None:
    options = {"verify_integrity": True, "async_strategy": "mcore"}
    actions = [*loads(folder, "d15"), ["save", folder / "d19", options]]
    actions += [["load", folder / "d19", {"verify_integrity": True}]]
    run("0.19.2", (2, 1), actions, install="torch_dist")
    assert not (folder / "d19" / "common.pt").exists()


@pytest.mark.long
def test_0_15_reads_that_and_writes(folder: Path) -> None:
    run("0.15.3", (2, 2), [["load", folder / "d15"], ["save", folder / "own15"]])


def test_0_19_reads_that_and_writes(folder: Path) -> None:
    actions = loads(folder, "d15", "own15")
    actions += [["load", folder / "d19", {"verify_integrity": True}]]
    actions += [["save", folder / "own19", {"verify_integrity": True}]]
    run("0.19.2", (2, 1), actions)


def test_installed_in_0_19_it_reads_all_and_writes_zarr(folder: Path) -> None:
    actions = loads(folder, "own15", "d19")
    actions += [["load", folder / "own19", {"verify_integrity": True}]]
    actions += [["save_async", folder / "z", {"verify_integrity": True}]]
    actions += [["save", folder / "z"], ["load", folder / "z"]]
    run("0.19.2", (1, 2), actions, install="zarr")
    assert json.loads((folder / "z" / "zarr.json").read_text())["node_type"] == "group"


@pytest.mark.long
def test_installed_after_megatron_was_imported(folder: Path) -> None:
    actions = [["load", folder / "own19"], ["load", folder / "z"], ["save", folder / "z15"]]
    run("0.15.3", (1, 1), [*actions, ["load", folder / "z15"]], install="zarr", late=True)
    assert (folder / "z15" / "zarr.json").exists()


OLD = {"sharding": "fully_sharded_model_space"}


@pytest.mark.long
def test_0_14_writes_optimizer_states_as_flattened_ranges(folder: Path) -> None:
    actions = [
        ["save", folder / "old-dist", OLD],
        # As before 0.13: without content metadata, in the format of that time.
        ["save", folder / "old-zarr", {**OLD, "old": True, "sharded_strategy": ["zarr", 1]}],
    ]
    run("0.14.0", (1, 2), actions, dp=2, optimizer=True)


@pytest.mark.long
def test_installed_in_0_19_it_loads_those_states_under_another_layout(folder: Path) -> None:
    new = {"sharding": "fully_reshardable"}
    actions = [["load", folder / "old-dist"], ["load", folder / "old-zarr"]]
    actions += [["save", folder / "new", new], ["load", folder / "new"]]
    run("0.19.2", (2, 1), actions, dp=2, optimizer=True, install="zarr")


@pytest.mark.long
def test_0_19_loads_those_states_by_itself_once_they_are_converted(folder: Path) -> None:
    for name in ("old-dist", "old-zarr"):
        done = convert(folder / name, folder / f"{name}-converted", target_format="megatron")
        assert done.verified
    actions = [["load", folder / f"{name}-converted"] for name in ("old-dist", "old-zarr")]
    run("0.19.2", (2, 1), actions, dp=2, optimizer=True)


def test_a_checkpoint_of_0_19_is_converted_with_its_common_part(folder: Path) -> None:
    convert(folder / "own19", folder / "own19-zarr")
    assert shardstore.load_common_state_dict(folder / "own19-zarr")["iteration"] == 7
    assert "common_state" not in shardstore.open(folder / "own19-zarr").objects
