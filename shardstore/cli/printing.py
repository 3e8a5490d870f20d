"""Printing of results and messages.

Keys, paths and names come from files of other programs, so :func:`clean` escapes their unprintable
characters as Python's ``repr`` does. Results go to standard output, everything else to standard
error. Tables are folded to the width of a terminal; for other outputs lines stay whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from shardstore.inspection.opened import aligned, cells, clean


def say(*lines: str) -> bool:
    """Print lines to standard output, cleaned. Return whether somebody reads it."""
    return not lines or _put("\n".join(map(clean, lines)), sys.stdout)


def complain(message: object) -> None:
    """Print one line to standard error."""
    line = re.sub(r"\s*[\n\t]\s*", " ", str(message).strip())
    _put(clean(f"shardstore: {line}"), sys.stderr)


def _put(text: str, stream: TextIO) -> bool:
    """Print a text, and return whether somebody reads it. If the reader (head, less) has gone, or
    standard error takes no text (a full disk), all later output goes nowhere, so that the exit code
    is still that of the result."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


class Warnings(logging.Handler):
    """Prints the library's log records as lines of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        complain(record.getMessage())


def emit(value: object) -> None:
    """Print a JSON document, in ASCII. NaN and the infinities become strings, as in Zarr."""
    _put(json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=2), sys.stdout)


def answer(as_json: bool, value: object, *lines: str) -> None:
    """Print the result of a command as a JSON document, or as lines."""
    if as_json:
        emit(value)
    else:
        say(*lines)


def open_streams() -> None:
    """Replace closed standard streams by the null device. Make the output streams escape characters
    that their encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def columns(wide: bool = False) -> int | None:
    """Return the columns of the terminal; ``None`` without a terminal or with ``wide``."""
    if wide or not sys.stdout.isatty():
        return None
    return max(1, shutil.get_terminal_size().columns)


def print_table(rows: Sequence[Sequence[str]], align: str, width: int | None) -> None:
    """Print rows in columns. Fold cells if the rows are wider than the terminal.

    Args:
        rows: rows with the same number of cells.
        align: ``<`` or ``>`` for each column.
        width: columns of the terminal; ``None``: no limit.
    """
    rows = [list(map(clean, row)) for row in rows]
    lines = aligned(rows, align)
    if width is None or max(map(cells, lines), default=0) <= width:
        say(*lines)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for side in align:
        table.add_column(justify="right" if side == ">" else "left", overflow="fold", min_width=1)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=width, color_system=None).print(table)
