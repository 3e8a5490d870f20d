"""Megatron-Bridge's own saves and loads through this package's manager, on real ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardstore.bridge import NEWEST
from shardstore.storage.stores.location import Location
from testing.s3_servers import S3Server
from tests.helpers.trainers import for_bridge, run_torchrun, whole

PROGRAM = "bridge_manager.py"
pytestmark = pytest.mark.megatron


def started(
    python: Path, *asked: dict[str, Any], ranks: int = 2, **settings: str
) -> subprocess.CompletedProcess[str]:
    settings = {**for_bridge(), **settings}
    return run_torchrun(python, PROGRAM, *map(json.dumps, asked), ranks=ranks, **settings)


def runs(
    python: Path, *asked: dict[str, Any], ranks: int = 2, **settings: str
) -> list[dict[str, Any]]:
    """What each of several runs found, all in the same processes."""
    ended = started(python, *asked, ranks=ranks, **settings)
    assert ended.returncode == 0, ended.stderr[-20000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"async_save": True}, id="background"),
        pytest.param({"async_save": True, "use_persistent_ckpt_worker": False}, id="no worker"),
        pytest.param(
            {"ckpt_assume_constant_structure": True, "fully_parallel_load": True}, id="foreground"
        ),
    ],
)
def test_a_killed_run_resumes_on_another_layout(
    python: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Killed before the save of step 6 is finalized; every tensor of model and optimizer is
    compared bit for bit."""
    place = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "options": options}
    killed = started(python, {**place, "tp": 2, "steps": [2, 4, 6], "die_at": 6})
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr, killed.stderr[-20000:]
    resumed = 4 if options.get("async_save") else 6
    (found,) = runs(python, {**place, "pp": 2, "steps": [8]})
    assert found == {"from": resumed, "operations": 1000 * resumed, "step": resumed}
    (found,) = runs(python, place, ranks=1)
    assert found == {"from": 8, "operations": 8000, "step": 8}
    for step in (2, 4, 8):
        assert whole(tmp_path / "run" / f"iter_{step:07}")
    assert (tmp_path / "run" / "iter_0000008" / "zarr.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("background", [True, False])
def test_a_run_resumes_from_a_store_on_other_machines(
    python: Path, tmp_path: Path, s3_server: S3Server, background: bool
) -> None:
    """Each rank has an empty disk of its own, so all that a resume needs is in the store."""
    url = f"s3://{(bucket := s3_server.new_bucket())}/run"
    store = s3_server.environment
    place = {"save": url, "load": url, "options": {"async_save": background}}
    killed = started(
        python,
        {**place, "here": str(tmp_path / "a"), "steps": [2, 4, 6], "die_at": 6},
        **store,
    )
    assert "SIGKILL" in killed.stderr, killed.stderr[-20000:]
    if not background:  # as if the run had ended before the file was there
        Location.of(url, s3_server.storage_options).replace(NEWEST, b"4")
    (found,) = runs(python, {**place, "here": str(tmp_path / "b"), "tp": 2, "steps": [8]}, **store)
    assert found == {"from": 4, "operations": 4000, "step": 4}
    asked = {**place, "here": str(tmp_path / "c")}
    (found,) = runs(python, asked, ranks=1, **store)
    assert found == {"from": 8, "operations": 8000, "step": 8}
    earlier = {**asked, "here": str(tmp_path / "d"), "options": {"ckpt_step": 2}}
    lacking = {**asked, "here": str(tmp_path / "e"), "options": {"ckpt_step": 3}}
    found, error = runs(
        python, earlier, {**lacking, "expect": "iter_0000003/train_state.pt is missing"}, **store
    )
    assert found["from"] == 2
    assert url in error["error"]
    assert whole(f"{url}/iter_0000008", **s3_server.storage_options)
    assert "run/latest_train_state.pt" in s3_server.keys(bucket)


@pytest.mark.long
def test_wrong_options_and_an_abandoned_save(python: Path, tmp_path: Path) -> None:
    """Errors on every rank. A save that a failed run left behind does not count, and does not
    disturb the saves of the next run in the same process."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    background = {"async_save": True}
    abandoned, after, *errors = runs(
        python,
        {"save": a, "steps": [2], "abandon": True, "options": background},
        {"save": b, "load": a, "steps": [4, 6], "options": background},
        {"options": {"ckpt_format": "fsdp_dtensor"}, "expect": "must be 'torch_dist'"},
        {"options": {"custom_manager_class": "a.B"}, "expect": "custom_manager_class='a.B'"},
    )
    assert abandoned["from"] == after["from"] == 0
    (found,) = runs(python, {"load": b, "tp": 2})
    assert found["from"] == 6
    assert all(found["error"].startswith("ArgumentError") for found in errors)
