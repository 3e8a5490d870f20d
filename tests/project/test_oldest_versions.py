"""The package works with the oldest versions that pyproject.toml allows, but for torch's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".envs" / "oldest"
TESTS = (
    "properties/test_constants.py",
    "unit/cli/test_printing.py",
    "unit/inspection",
    "unit/storage",
    "unit/strategies/test_zarr.py",
    "unit/values",
)
"""Those of the modules that call the other packages."""


@pytest.fixture(scope="module")
def python() -> Path:
    if not (ENVIRONMENT / ".complete").exists():
        pytest.skip("no environment with the oldest versions: scripts/oldest_env makes it")
    return ENVIRONMENT / "bin" / "python"


def test_the_environment_has_the_oldest_versions(python: Path) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = dict(re.split(">=|,", one)[:2] for one in wanted)
    del oldest["torch"]
    program = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    there = run_to_end([python, "-c", program, *oldest]).stdout.split()
    for (name, version), found in zip(oldest.items(), there, strict=True):
        assert found.startswith(version), name


def test_saves_loads_and_stores_pass_their_tests_with_them(python: Path) -> None:
    tests = [ROOT / "tests" / name for name in TESTS]
    ran = run_to_end([python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests])
    assert ran.returncode == 0, ran.stdout[-5000:]
