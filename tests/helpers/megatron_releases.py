"""Runs programs with releases of Megatron-Core, from the environment of scripts/megatron_env."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".envs" / "megatron"
PROGRAMS = ROOT / "tests" / "interop" / "megatron"


def run(version: str | None, *arguments: object, alone: bool = False, **settings: str) -> str:
    """Run Python with a release of Megatron-Core, or without any, and return what it prints.

    Args:
        version: the release; the test is skipped where it is not at hand.
        arguments: of Python.
        alone: in Megatron-Core's environment, which lacks what this package needs.
        settings: further environment variables; ``PWD`` is the current folder, too.
    """
    if version is not None and not (ENVIRONMENT / version).is_dir():
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    paths = [ROOT, *((ENVIRONMENT / version, ENVIRONMENT / "triton") if version else ())]
    python = ENVIRONMENT / "bin" / "python" if alone else sys.executable
    done = run_to_end(
        (python, *arguments),
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths)), **settings},
        cwd=settings.get("PWD"),
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
