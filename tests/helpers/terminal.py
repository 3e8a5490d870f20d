"""A real terminal of a given width, for commands to write to."""

from __future__ import annotations

import os
import pty
import re
import sys
import termios
import threading

import pytest

from shardstore.cli.app import run

_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(stream: str, *arguments: object, columns: int = 120) -> tuple[int, str]:
    """Exit code of a command in this process, and what came to the terminal that its ``stdout`` or
    ``stderr`` was."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    drawn: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, drawn))
    reader.start()
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w", encoding="utf-8") as terminal:
        patch.delenv("COLUMNS", raising=False)
        patch.setenv("TERM", "xterm")
        for name in (stream, f"__{stream}__"):
            patch.setattr(sys, name, terminal)
        code = run([*map(str, arguments)])
    reader.join(60)
    os.close(ours)
    return code, b"".join(drawn).decode().replace("\r\n", "\n")


def _read_all(terminal: int, drawn: list[bytes]) -> None:
    """Read what is written to a terminal until its other end is closed."""
    try:
        while piece := os.read(terminal, 65536):
            drawn.append(piece)
    except OSError:  # how Linux says that the other end is closed
        pass


def plain(drawn: str) -> str:
    """Without colours."""
    return _SEQUENCES.sub("", drawn)
