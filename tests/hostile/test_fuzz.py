"""Inputs of the fuzzer: few in every run, 100,000 with the long searches."""

from __future__ import annotations

import subprocess
import sys

import pytest

LONG, PARTS = 100_000, 4


def start(seed: int, count: int) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.hostile.fuzzing", str(seed), "0", str(count)]
    return subprocess.Popen(program, text=True, stdout=-1, stderr=-1)


def require_none(job: subprocess.Popen[str]) -> None:
    failures, log = job.communicate()
    assert job.returncode == 0, failures or log[-3000:]


def test_hundreds_of_changed_inputs_do_no_harm() -> None:
    require_none(start(7, 300))


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_many_changed_inputs_do_no_harm() -> None:
    jobs = [start(seed, LONG // PARTS) for seed in range(100, 100 + PARTS)]
    for job in jobs:
        require_none(job)
