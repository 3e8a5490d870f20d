"""Runs programs that know nothing of this package, each in a fork of an isolated interpreter."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.processes import run_to_end

INTERPRETERS = ("here", "newest")

_PROGRAM = """
import json, os, sys, traceback
imports, programs = json.loads(sys.argv[1])
exec(imports)

def ended(program):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            exec(program, {})
            text = "finished"
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.wait()
    return text

print(json.dumps({name: ended(program) for name, program in programs.items()}))
"""


def interpreter(which: str) -> str:
    """The Python of these tests, or that with the newest zarr; skip the test without one."""
    if which == "here":
        return sys.executable
    folder = Path(__file__).resolve().parents[2] / ".envs" / "newest-zarr"
    if not (folder / ".complete").exists():
        pytest.skip("no environment with the newest zarr: scripts/newest_zarr_env makes it")
    return str(folder / "bin" / "python")


def failures(which: str, imports: str, programs: Mapping[str, str]) -> dict[str, str]:
    """Run each program in a fork of an isolated process, which sees only what is installed.

    Args:
        which: see :func:`interpreter`.
        imports: what the process imports before it forks, for all programs.
        programs: texts of programs by name.

    Returns:
        By name: the traceback of each program that failed.
    """
    command = [interpreter(which), "-I", "-W", "error::UserWarning", "-c", _PROGRAM]
    done = run_to_end([*command, json.dumps([imports, programs])])
    assert done.returncode == 0, done.stderr
    ended: dict[str, str] = json.loads(done.stdout)
    return {name: text for name, text in ended.items() if text != "finished"}
