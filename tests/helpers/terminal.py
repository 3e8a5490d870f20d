"""A real terminal of a given width, for commands to write to."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios

_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def written_to_terminal(*arguments: object, columns: int) -> tuple[int, str]:
    """Exit code, and what came to the terminal that standard output was."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardstore", *map(str, arguments)],
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={**variables, "TERM": "xterm"},
        )
    finally:
        os.close(theirs)
    drawn = read_all(ours)
    os.close(ours)
    return process.wait(timeout=60), drawn.decode().replace("\r\n", "\n")


def read_all(terminal: int) -> bytes:
    """What is written to a terminal until its other end is closed."""
    drawn = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # how Linux says that the other end is closed
            return drawn
        if not piece:
            return drawn
        drawn += piece


def plain(drawn: str) -> str:
    """Without colours."""
    return _SEQUENCES.sub("", drawn)
