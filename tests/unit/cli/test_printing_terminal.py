"""The bars that commands draw where standard error is a terminal, and that they draw none else."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cli_checkpoints import flip
from tests.helpers.terminal import read_all


def in_a_terminal(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, and what came to the terminal that standard error was."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardstore", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            text=True,
        )
    finally:
        os.close(theirs)
    drawn = read_all(ours)
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out, drawn.decode()


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("verify", "verify step-7 done"),
        ("stats", "read step-7 done"),
        ("diff", "compare step-7 done"),
        ("convert", "verify"),
    ],
)
def test_a_bar_is_drawn(pristine: Path, tmp_path: Path, command: str, word: str) -> None:
    more = {"diff": [pristine], "convert": [tmp_path / "copy"]}.get(command, [])
    code, _, drawn = in_a_terminal(command, pristine, *more)
    assert code == 0, drawn
    assert word in drawn
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", drawn)
    assert not re.search(r"(^|\r|\n) *\u2501", plain)  # the first frame has a name too
    if command != "convert":  # for which the target is taken by now
        assert in_a_terminal(command, pristine, *more, "--json")[::2] == (0, "")


def test_findings_go_to_standard_output(place: Path) -> None:
    """The bar is on standard error: a pipe gets what is found."""
    flip(place / "counts" / "c.0")
    code, out, drawn = in_a_terminal("verify", place)
    assert (code, out.count("chunk-crc")) == (1, 1)
    assert "verify step-7 failed" in drawn
    assert "chunk-crc" not in drawn
