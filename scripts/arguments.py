"""Arguments of these scripts' command lines: checked before anything long begins, and one line with
exit code 2 for whatever is wrong. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of below the whole usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line} ({self.prog} --help tells what there is)\n")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


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
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def chosen_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Some of the names that there are, with commas between them; in the order of ``known``."""

    def parse(text: str) -> tuple[str, ...]:
        asked = tuple(text.split(","))
        unknown = [repr(name) for name in asked if name not in known]
        if unknown:
            raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return tuple(name for name in known if name in asked)

    return parse


def writable_folder(text: str) -> Path:
    """A folder that can be written to, made where there is none."""
    path = Path(text)
    if not text:
        raise ArgumentTypeError("an empty text names no folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ArgumentTypeError(f"{text} is a file, not a folder") from None
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be made: {error.strerror}") from None
    return _written_to(path)


def new_file(text: str) -> Path:
    """A file that can be written."""
    path = Path(text)
    if not text or path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a folder: name a file")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    _written_to(path.parent)
    return path


def _written_to(folder: Path) -> Path:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ArgumentTypeError(f"nothing can be written to {folder}: {error.strerror}") from None


def run_of_benchmark(text: str) -> Path:
    """A file that ``scripts/benchmark COMMAND --json`` wrote."""
    path = Path(text)
    try:
        data: Any = json.loads(path.read_text())
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be read: {error.strerror}") from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or not {"samples", "notes"} <= set(data):
        raise ArgumentTypeError(f"{text} is not what `benchmark COMMAND --json` writes")
    return path
