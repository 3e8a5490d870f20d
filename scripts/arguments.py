"""What the command lines of these scripts have in common: one line for whatever is wrong, exit
code 2, and values that are checked before anything long begins. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "OneLineParser",
    "above_zero",
    "chosen_of",
    "count",
    "counts",
    "new_file",
    "run_of_benchmark",
    "writable_folder",
]


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of below the whole usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line} ({self.prog} --help tells what there is)\n")


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def counts(text: str) -> tuple[int, ...]:
    """Several, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def chosen_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Some of the names that there are, with commas between them; in the order of ``known``."""

    def parse(text: str) -> tuple[str, ...]:
        asked = tuple(text.split(","))
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
            )
        return tuple(name for name in known if name in asked)

    return parse


def writable_folder(text: str) -> Path:
    """A folder that can be written to, made where there is none."""
    path = Path(text)
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise argparse.ArgumentTypeError(f"{text} is a file, not a folder") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can not be made: {error.strerror}") from None
    _try_to_write(path, text)
    return path


def new_file(text: str) -> Path:
    """A file that can be written: better known now than when there is something to write."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    _try_to_write(path.parent, text)
    return path


def _try_to_write(folder: Path, text: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"nothing can be written to {folder if text else '.'}: {error.strerror}"
        ) from None


def run_of_benchmark(text: str) -> Path:
    """A file that ``scripts/benchmark COMMAND --json`` wrote."""
    path = Path(text)
    try:
        data: Any = json.loads(path.read_text())
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} can not be read: {error.strerror}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or not {"samples", "notes"} <= set(data):
        raise argparse.ArgumentTypeError(f"{text} is not what `benchmark COMMAND --json` writes")
    return path
