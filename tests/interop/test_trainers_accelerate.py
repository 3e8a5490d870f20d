"""accelerate and transformers over shardstore, by `install(named_writers=True)`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardstore.storage.commit.identity import is_checkpoint
from shardstore.storage.stores.location import Location
from tests.helpers.trainers import run, run_torchrun, whole

PROGRAM, OWN_LOOP = "transformers_fsdp2.py", "accelerate_fsdp2.py"
PARTS = ("pytorch_model_fsdp_0", "optimizer_0")


def losses(folder: Path) -> dict[int, float]:
    found = json.loads(Path(f"{folder}.json").read_text())
    return {int(step): loss for step, loss in found.items()}


def loadable(folder: Path) -> list[Path]:
    """The checkpoints of which both parts are committed, the newest last."""
    return [
        place
        for place in sorted(folder.glob("checkpoint[-_]*"))
        if all(is_checkpoint(Location.of(place / part)) for part in PARTS)
    ]


def killed(python: Path, program: str, *arguments: object, death: str) -> None:
    died = run_torchrun(python, program, *arguments, DIES_AT=death)
    assert died.returncode != 0
    assert "SIGKILL" in died.stderr, died.stderr


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


OLD, NEW = "checkpoint-2", "checkpoint-4"
DEATHS = {
    "before the model": (f"os.mkdir {NEW}/{PARTS[0]}", OLD),
    "while the model is committed": (f"os.rename {NEW}/{PARTS[0]}", OLD),
    "while the optimizer is committed": (f"os.rename {NEW}/{PARTS[1]}", OLD),
    "while the schedule is saved": (f"torch.save {NEW}/scheduler", OLD),
    "while random states are saved": (f"torch.save {NEW}/rng_state", OLD),
    "before the trainer's state is saved": (f"open {NEW}/trainer_state.json", OLD),
    "before the old one is deleted": (f"shutil.rmtree {OLD}", NEW),
    "while the old one is deleted": (f"os.rmdir {OLD}", NEW),
    "at the end": ("end of program", "checkpoint-6"),
}


@pytest.mark.long
@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_run_leaves_a_checkpoint_that_can_be_loaded(
    python: Path, tmp_path: Path, unbroken: dict[int, float], death: str
) -> None:
    folder, (moment, wanted) = tmp_path / "run", DEATHS[death]
    killed(python, PROGRAM, folder, 6, "async", death=moment)
    places = {place.name: place for place in loadable(folder)}
    assert wanted in places, sorted(folder.glob("*/*"))
    run(python, PROGRAM, folder, 6, "async", places[wanted])
    # A Trainer that resumes from its last step makes one more.
    resumed = {step: loss for step, loss in losses(folder).items() if step in unbroken}
    assert resumed == pytest.approx(unbroken, rel=1e-3)


@pytest.fixture(scope="module")
def unbroken_loop(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of eight steps with accelerate's own limit of one checkpoint."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(python, OWN_LOOP, folder, 8)
    left = loadable(folder / "checkpoints")
    assert [place.name for place in left] == ["checkpoint_2", "checkpoint_3"]
    assert all(whole(place / part) for place in left for part in PARTS)
    return losses(folder)


FILES = {"scheduler.bin", "random_states_0.pkl", "random_states_1.pkl"}
FIRST, SECOND, THIRD = "checkpoint_0", "checkpoint_1", "checkpoint_2"
DEATHS_OF_THE_LOOP = {
    "before the folder is made": (f"os.mkdir {SECOND}", FIRST),
    "while the model is committed": (f"os.rename {SECOND}/{PARTS[0]}", FIRST),
    "while the optimizer is committed": (f"os.rename {SECOND}/{PARTS[1]}", FIRST),
    "while the schedule is saved": (f"torch.save {SECOND}/scheduler", FIRST),
    "while random states are saved": (f"torch.save {SECOND}/random_states", FIRST),
    "while the optimizer is saved in the background": ("step 4", FIRST),
    "before the old one is deleted": (f"shutil.rmtree {FIRST}", SECOND),
    "while the old one is deleted": ("os.remove scheduler.bin", SECOND),
    "before the next folder is made": (f"os.mkdir {THIRD}", SECOND),
    "while the next model is committed": (f"os.rename {THIRD}/{PARTS[0]}", SECOND),
    "at the end": ("end of program", THIRD),
}


@pytest.mark.long
@pytest.mark.parametrize("death", DEATHS_OF_THE_LOOP)
def test_a_kill_with_a_limit_of_one_in_accelerate_leaves_a_checkpoint_that_can_be_loaded(
    python: Path, tmp_path: Path, unbroken_loop: dict[int, float], death: str
) -> None:
    folder, (moment, wanted) = tmp_path / "run", DEATHS_OF_THE_LOOP[death]
    killed(python, OWN_LOOP, folder, 8, death=moment)
    resumes(python, folder, wanted, unbroken_loop)


@pytest.mark.long
def test_a_run_killed_again_before_its_first_save_leaves_the_checkpoint_it_resumed_from(
    python: Path, tmp_path: Path, unbroken_loop: dict[int, float]
) -> None:
    folder = tmp_path / "run"
    first = folder / "checkpoints" / FIRST
    killed(python, OWN_LOOP, folder, 8, death=f"os.rename {SECOND}/{PARTS[1]}")
    killed(python, OWN_LOOP, folder, 8, first, death=f"os.rename {SECOND}/{PARTS[0]}")
    resumes(python, folder, FIRST, unbroken_loop)


def resumes(python: Path, folder: Path, name: str, unbroken: dict[int, float]) -> None:
    """A checkpoint has all of its files, and a run from it has the losses of the unbroken run."""
    place = folder / "checkpoints" / name
    assert place in loadable(folder / "checkpoints"), sorted(folder.glob("*/*/*"))
    assert {file.name for file in place.iterdir()} == {*PARTS, *FILES}
    run(python, OWN_LOOP, folder, 8, place)
    resumed = losses(folder)
    first = 2 * (int(name.rpartition("_")[2]) + 1)
    assert resumed == {step: unbroken[step] for step in range(first, 8)}
