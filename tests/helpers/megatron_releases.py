"""Runs programs with releases of Megatron-Core, from the environment of scripts/megatron_env."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end
from tests.helpers.programs import run_text

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".envs" / "megatron"
PROGRAMS = ROOT / "tests" / "interop" / "megatron"


_PROGRAM = """
import os, runpy, sys
sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(
    version: str | None,
    *arguments: object,
    beside: str = "triton",
    alone: bool = False,
    **settings: str,
) -> str:
    """Run Python with a release of Megatron-Core, or without any, and return what it prints.

    Args:
        version: the release; the test is skipped where it is not at hand.
        arguments: of Python. A program that is given by its path, and is not ``alone``, runs in a
            process that need not import torch again.
        beside: folders of the environment that are importable too, as one text.
        alone: in Megatron-Core's environment, which lacks what this package needs.
        settings: further environment variables; ``PWD`` is the current folder, too.
    """
    folders = [ENVIRONMENT / name for name in (version, *beside.split())] if version else []
    if not all(folder.is_dir() for folder in folders):
        pytest.skip("no environment with releases of megatron-core: scripts/megatron_env makes it")
    paths = os.pathsep.join(map(str, (ROOT, *folders)))
    if isinstance(arguments[0], Path) and not alone:
        paths = f"{arguments[0].parent}{os.pathsep}{paths}"
        done = run_text(_PROGRAM, paths, *arguments, **settings)
    else:
        python = ENVIRONMENT / "bin" / "python" if alone else sys.executable
        environment = {**os.environ, "PYTHONPATH": paths, **settings}
        done = run_to_end((python, *arguments), env=environment, cwd=settings.get("PWD"))
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
