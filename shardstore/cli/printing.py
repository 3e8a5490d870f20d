"""How commands print: nothing that a terminal obeys, and lines within its width.

Keys, paths and names come from files of others: :func:`clean` shows their unprintable characters as
Python's ``repr`` does. Results go to standard output, everything else to standard error. Lines are
folded where standard output is a terminal, and stay whole for programs that read them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Sequence

from shardstore.inspection.opened import clean

GAP = "  "
LEAST_FIRST = 20
"""Columns of a folded first cell; where a table leaves it less, the others go below it."""
INDENT = 4
_OBEYED = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def say(*lines: str) -> None:
    """Print lines to standard output, cleaned."""
    if lines:
        print("\n".join(map(clean, lines)))


def complain(message: object) -> None:
    """Print one line to standard error."""
    line = re.sub(r"\s*[\n\t]\s*", " ", str(message).strip())
    print(clean(f"shardstore: {line}"), file=sys.stderr)


class Warnings(logging.Handler):
    """Prints the library's warnings as lines of the command."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        complain(record.getMessage())


def emit(value: object) -> None:
    """Print a JSON document. NaN and the infinities are the strings that Zarr has for them."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    strict = json.loads(json.dumps(value), parse_constant=str)
    text = json.dumps(strict, indent=2, ensure_ascii=not encoding.startswith("utf"))
    print(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def open_streams() -> None:
    """Replace closed standard streams by the null device; escape what an encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def columns(wide: bool = False) -> int | None:
    """Columns of the terminal; ``None`` if lines stay whole: ``wide``, or no terminal."""
    if wide or not sys.stdout.isatty():
        return None
    return max(1, shutil.get_terminal_size().columns)


def cells(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fold(text: str, width: int | None, indent: int = INDENT) -> list[str]:
    """A text in lines of at most ``width`` columns, all but the first indented by ``indent``."""
    if width is None or cells(text) <= width:
        return [text]
    from rich.console import Console
    from rich.text import Text

    rest = text.lstrip(" ")
    lead = " " * min(len(text) - len(rest), width // 2)
    below = " " * min(len(lead) + indent, width // 2)
    first, *more = Text(rest).wrap(Console(), width - len(below), overflow="fold")
    return [lead + first.plain.rstrip(), *(below + line.plain.rstrip() for line in more)]


def print_table(
    rows: Sequence[Sequence[str]], align: str, width: int | None, names: Sequence[str] = ()
) -> None:
    """Print rows in columns, the first of them folded where the terminal is narrow; where that is
    not enough, the other cells of each row go below its first.

    Args:
        rows: all rows, of as many cells.
        align: ``<`` or ``>`` for each column.
        width: columns of the terminal; ``None``: any number.
        names: of the columns.
    """
    rows = [list(map(clean, row)) for row in (*([names] if names else ()), *rows)]
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    left = (width or 1 << 30) - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
    if left < min(LEAST_FIRST, widths[0]):
        for first, *others in rows[bool(names) :]:
            if names:
                others = [f"{name} {cell}" for name, cell in zip(names[1:], others, strict=True)]
            below = " " * (len(first) - len(first.lstrip(" ")) + INDENT) + GAP.join(others).strip()
            print("\n".join([*fold(first, width, 2), *fold(below.rstrip(), width, 0)]).rstrip())
        return
    widths[0] = min(widths[0], left)
    for row in rows:
        first, *more = fold(row[0], None if width is None else widths[0], 2)
        parts = []
        for text, side, n in zip((first, *row[1:]), align, widths, strict=True):
            room = n - cells(text) + len(text)
            parts.append(text.rjust(room) if side == ">" else text.ljust(room))
        print("\n".join([GAP.join(parts).rstrip(), *more]))
