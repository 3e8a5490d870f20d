"""A checkpoint of several ranks, and the command line that is run on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.cli_checkpoints import WORLD, Cli, save
from tests.helpers.ranks_helper import run_ranks


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cli") / "step-7"
    run_ranks(save, WORLD, str(place))
    return place


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "step-7"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
