"""Inputs of the fuzzer: few in every run, 100,000 with the long searches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.rank_server import start
from tests.hostile.fuzzing import fuzz

LONG, PARTS = 100_000, 4


def reported(seed: int, count: int, report: Path) -> None:
    report.write_text("\n".join(fuzz(seed, 0, count)) or "none")


def require_no_failure(folder: Path, seeds: range, count: int) -> None:
    """Carry out so many inputs of each seed; each seed has a process of its own."""
    reports = {seed: folder / str(seed) for seed in seeds}
    jobs = start((reported, (seed, count, report)) for seed, report in reports.items())
    for job, report in zip(jobs, reports.values(), strict=True):
        job.join()
        assert job.exitcode == 0, report
        assert report.read_text() == "none"


def test_hundreds_of_changed_inputs_do_no_harm(tmp_path: Path) -> None:
    require_no_failure(tmp_path, range(7, 8), 300)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_many_changed_inputs_do_no_harm(tmp_path: Path) -> None:
    require_no_failure(tmp_path, range(100, 100 + PARTS), LONG // PARTS)
