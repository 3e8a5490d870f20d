"""Modules of scenarios: ``WORLD`` ranks run all ``SCENARIOS`` of a module in one spawn."""

from __future__ import annotations

import pytest

from tests.helpers.ranks_helper import run_ranks
from tests.helpers.scenarios import run_scenarios


@pytest.fixture(scope="module")
def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[list[str]]:
    """Names of the module's scenarios that held, by rank."""
    module = request.module
    folder = tmp_path_factory.mktemp("scenarios")
    found: list[list[str]] = run_ranks(run_scenarios, module.WORLD, str(folder), module.SCENARIOS)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a ``scenario`` is run for each of its module's."""
    if "scenario" in metafunc.fixturenames:
        metafunc.parametrize("scenario", [s.__name__ for s in metafunc.module.SCENARIOS])
