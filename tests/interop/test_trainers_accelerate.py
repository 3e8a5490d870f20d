"""accelerate and transformers over shardstore, by `install(named_writers=True)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location
from tests.helpers.trainers import run, run_torchrun, whole

PROGRAM = "transformers_fsdp2.py"
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def losses(folder: Path) -> dict[int, float]:
    found = json.loads(Path(f"{folder}.json").read_text())
    return {int(step): loss for step, loss in found.items()}


def loadable(folder: Path) -> list[Path]:
    """The checkpoints of which both parts are committed."""
    return [
        place
        for place in folder.glob("checkpoint-*")
        if all(is_checkpoint(Location.of(place / part)) for part in PARTS)
    ]


@pytest.fixture(scope="module")
def unbroken(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run of six steps on two ranks."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(python, PROGRAM, folder, 6, "sync")
    (last,) = loadable(folder)
    assert last.name == "checkpoint-6"
    assert all(whole(last / part) for part in PARTS)
    assert not list(last.rglob("*.distcp"))
    return losses(folder)


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks(
    python: Path, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    folder = tmp_path / "run"
    run(python, PROGRAM, folder, 4, "async")
    (last,) = loadable(folder)
    assert (last.name, whole(last / PARTS[0])) == ("checkpoint-4", True)
    run(python, PROGRAM, folder, 6, "async", last, ranks=1)
    resumed = losses(folder)
    assert set(resumed) == set(unbroken) == set(range(1, 7))
    assert resumed == pytest.approx(unbroken, rel=1e-3)
    assert resumed[6] != resumed[4]
    assert [place.name for place in loadable(folder)] == ["checkpoint-6"]


DEATHS = {
    "before the model": f"os.mkdir checkpoint-4/{PARTS[0]}",
    "while the model is committed": f"os.rename checkpoint-4/{PARTS[0]}",
    "while the optimizer is committed": f"os.rename checkpoint-4/{PARTS[1]}",
    "while the old one is deleted": "os.rmdir checkpoint-2",
}


@pytest.mark.long
@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_run_leaves_a_checkpoint_that_can_be_loaded(
    python: Path, tmp_path: Path, unbroken: dict[int, float], death: str
) -> None:
    folder = tmp_path / "run"
    died = run_torchrun(python, PROGRAM, folder, 6, "async", DIES_AT=DEATHS[death])
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr, died.stderr
    assert loadable(folder), sorted(folder.glob("*/*"))
    place = max(loadable(folder), key=lambda place: place.name)
    assert place.name == ("checkpoint-4" if "deleted" in death else "checkpoint-2")
    run(python, PROGRAM, folder, 6, "async", place)
    assert losses(folder) == pytest.approx(unbroken, rel=1e-3)
