"""How commands print: nothing that a terminal would obey, and lines within its width.

Keys, paths and names come from files of others: whatever in them is not printable is shown as
Python's ``repr`` shows it, everywhere by :func:`clean`. Lines are folded where standard output is a
terminal, and stay whole for programs that read them. It knows texts, and nothing of checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Table", "cells", "clean", "columns", "emit", "fold", "open_streams", "pack", "say"]

GAP = "  "
LEAST_KEY = 20
"""Columns that a folded key gets; where a table leaves it less, its other cells go below it."""
INDENT = 4
_BREAKS = " ./,_-:"
_OBEYED = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def clean(text: str) -> str:
    """The text with all that is not printable escaped: ESC is ``\\x1b``, a newline ``\\n``."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(shown)


def say(*lines: str) -> None:
    """Print lines to standard output, cleaned."""
    if lines:
        print("\n".join(map(clean, lines)))


def emit(value: object) -> None:
    """Print a JSON document. Numbers that JSON lacks are the strings that Zarr has for them."""
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    ascii_only = not encoding.startswith("utf")
    text = json.dumps(_plain(value), indent=2, ensure_ascii=ascii_only)
    print(_OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def open_streams() -> None:
    """Have standard streams that take everything: those that were closed lead nowhere, and what an
    encoding lacks is escaped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def columns(wide: bool = False) -> int | None:
    """Columns of the terminal that standard output is; ``None``: lines stay whole, as it is none,
    or as asked."""
    if wide or not sys.stdout.isatty():
        return None
    return max(1, shutil.get_terminal_size().columns)


def cells(text: str) -> int:
    """Columns that a text takes (Unicode Standard Annex 11: some letters take two)."""
    return len(text) if text.isascii() else sum(map(_cell, text))


def _cell(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def fold(text: str, width: int | None, indent: int = INDENT) -> list[str]:
    """A text in lines of so many columns at most, the further ones indented by so much more.

    It is broken behind blanks, else behind dots, slashes and the like, else anywhere.
    """
    if width is None or cells(text) <= width:
        return [text]
    rest = text.lstrip(" ")
    lead = text[: min(len(text) - len(rest), width // 2)]
    below = " " * min(len(lead) + indent, width // 2)
    lines = []
    while cells(rest) > width - len(lead):
        end = _break(rest, width - len(lead))
        lines.append(lead + rest[:end].rstrip(" "))
        rest, lead = rest[end:].lstrip(" "), below
    return [*lines, lead + rest] if rest or not lines else lines


def _break(text: str, width: int) -> int:
    """How many letters of a text make a line."""
    end = taken = 0
    while end < len(text) and taken + _cell(text[end]) <= width:
        taken += _cell(text[end])
        end += 1
    if text[end : end + 1] == " ":
        return max(end, 1)
    blank = text.rfind(" ", 1, end) + 1
    if blank > 1:
        return blank
    last = max(text.rfind(sign, end // 2, end) for sign in _BREAKS)
    return max(last + 1 if last >= 0 else end, 1)


def pack(parts: Sequence[str], width: int, indent: int) -> list[str]:
    """Parts in as few indented lines as hold them, none of them cut."""
    lead = " " * min(indent, width // 2)
    lines: list[str] = []
    for part in filter(None, parts):
        longer = f"{lines[-1]}{GAP}{part}" if lines else ""
        if lines and cells(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(lead + part)
    return lines


class Table:
    """Rows of texts in columns, the first of which is a key or a name.

    Where the terminal is too narrow the keys are folded; where that is not enough, the other cells
    of each row go below its key.

    Args:
        rows: all rows, cleaned.
        align: ``<`` or ``>`` for each column.
        width: columns of the terminal; ``None``: any number.
        names: of columns, shown with their cells where these are below the key.
        most_key: a longer key does not make the column wider for the others.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        align: str,
        width: int | None,
        *,
        names: Sequence[str] = (),
        most_key: int | None = None,
    ) -> None:
        self._align, self._width, self._names = align, width, names
        self._widths = [max(map(cells, column), default=0) for column in zip(*rows, strict=True)]
        self._widths = self._widths or [0] * len(align)
        if most_key is not None:
            self._widths[0] = min(self._widths[0], most_key)
        rest = sum(self._widths[1:]) + len(GAP) * (len(self._widths) - 1)
        self.is_stacked = False
        if width is not None and self._widths[0] + rest > width:
            left = width - rest
            self.is_stacked = left < min(LEAST_KEY, self._widths[0])
            self._widths[0] = width if self.is_stacked else left
        pairs = zip(align, self._widths, strict=True)
        self._format = GAP.join(f"{{:{side}{n}}}" for side, n in pairs).format

    def lines(self, row: Sequence[str]) -> Iterator[str]:
        """A row, in one line or several."""
        if self._width is None and all(map(str.isascii, row)):
            yield self._format(*row).rstrip()
            return
        key, *others = row
        first, *more = [key] if self._width is None else fold(key, self._widths[0], 2)
        if self.is_stacked and self._width is not None:
            yield from (first, *more)
            if self._names:
                pairs = zip(self._names[1:], others, strict=True)
                others = [f"{name} {cell}" for name, cell in pairs]
            indent = len(key) - len(key.lstrip(" ")) + INDENT
            yield from pack(others, self._width, indent)
            return
        padded = map(_pad, (first, *others), self._align, self._widths)
        yield GAP.join(padded).rstrip()
        yield from more


def _pad(text: str, align: str, width: int) -> str:
    room = " " * (width - cells(text))
    return room + text if align == ">" else text + room
