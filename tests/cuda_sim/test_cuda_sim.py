"""Runs the cases of this folder, and the tests marked ``gpu``, on PyTorch's CUDA build under the
simulated runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_sim.simulation import IS_MADE, MISSING, ROOT, run

GPU_TESTS = [
    "tests/unit/saving/test_staging.py",
    "tests/unit/storage/movers/test_device.py",
    "tests/unit/test_serialization_partial_loads.py",
]
CASES = sorted(path.relative_to(ROOT) for path in Path(__file__).parent.glob("cases/*.py"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not IS_MADE, reason=MISSING)
@pytest.mark.parametrize(
    "arguments",
    [*[[str(path)] for path in CASES if path.stem != "conftest"], [*GPU_TESTS, "-m", "gpu"]],
    ids=lambda arguments: Path(arguments[0]).stem,
)
def test_the_cases_pass_under_the_simulation(arguments: list[str]) -> None:
    done = run("-m", "pytest", "-q", *arguments, timeout=1800, CUDA_SIM_DEVICES=2)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
