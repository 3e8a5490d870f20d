"""Runs the cases of this folder, and the tests marked ``gpu``, on PyTorch's CUDA build under the
simulated runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cuda_sim import mutations
from tests.cuda_sim.simulation import MISSING, PYTHON, ROOT, run

CASES = sorted(path.relative_to(ROOT) for path in Path(__file__).parent.glob("cases/*.py"))
needs_simulation = pytest.mark.skipif(
    not PYTHON.exists() or sys.platform != "linux", reason=MISSING
)


@pytest.mark.long
@pytest.mark.timeout(1200)
@needs_simulation
@pytest.mark.parametrize(
    "arguments",
    [*[[str(path)] for path in CASES if path.stem != "conftest"], ["tests/unit", "-m", "gpu"]],
    ids=lambda arguments: Path(arguments[0]).stem,
)
def test_the_cases_pass_under_the_simulation(arguments: list[str]) -> None:
    done = run("-m", "pytest", "-q", *arguments, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_every_mutation_changes_the_package() -> None:
    """Else ``python -m tests.cuda_sim.mutations`` would run the cases on an unchanged package."""
    for mutation in mutations.MUTATIONS:
        assert mutation.applied(ROOT) != (ROOT / mutation.file).read_text(), mutation.name


def test_every_synchronisation_has_a_mutation() -> None:
    left = mutations.without_mutation(ROOT)
    assert not left, f"add a mutation to tests/cuda_sim/mutations.py for {left}"
