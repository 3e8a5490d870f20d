"""Several commands, one after the other, in one new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.processes import run_to_end

_PROGRAM = """
import sys
told, commands = sys.argv[1:]
modules = [sorted(sys.modules)]
import shardstore, shardstore.hf
modules.append(sorted(sys.modules))
import json
from shardstore.cli.app import main

codes = []
for words in json.loads(commands):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code)
    modules.append(sorted(sys.modules))
with open(told, "w") as file:
    json.dump([codes, modules], file)
"""


@dataclass
class Ran:
    """What commands did."""

    codes: list[int]
    """The exit code of each."""
    modules: list[set[str]]
    """What was imported before the package, with it, and after each command."""
    out: str
    err: str


def run_commands(commands: Iterable[Sequence[object]], redirect: str = "", **variables: str) -> Ran:
    """Run the commands.

    Args:
        commands: the words of each.
        redirect: what a shell does with the streams of the process, as ``>&-``.
        **variables: of its environment.
    """
    words = json.dumps([list(map(str, command)) for command in commands])
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder, "told")
        program = [sys.executable, "-c", _PROGRAM, told, words]
        done = run_to_end(
            ["sh", "-c", f'exec "$@" {redirect}', "sh", *program],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        assert done.returncode == 0, done.stderr
        codes, modules = json.loads(told.read_text())
    return Ran(codes, [set(names) for names in modules], done.stdout, done.stderr)
