"""Modules of scenarios: ``WORLD`` ranks run all that a module has in one spawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import run_scenarios, scenarios_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's scenarios have a folder each."""
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest, folder: Path) -> list[list[str]]:
    """Names of the module's scenarios that held, by rank; ``TIMEOUT_S`` is for all together."""
    module, scenarios = request.module, scenarios_of(vars(request.module))
    limit = getattr(module, "TIMEOUT_S", 120)
    return run_ranks(run_scenarios, module.WORLD, str(folder), scenarios, timeout_s=limit)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a ``scenario`` is run for each of its module's."""
    if "scenario" in metafunc.fixturenames:
        metafunc.parametrize("scenario", [s.__name__ for s in scenarios_of(vars(metafunc.module))])
