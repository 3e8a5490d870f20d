"""The options that subcommands of `benchmark` which measure have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from arguments import count, new_file, writable_folder

ON_DISK = "folder on the disk to measure (default: the temporary folder)"


def measuring(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str | None,
    repeats: int | None = 5,
    folder: str | None = ON_DISK,
) -> argparse.ArgumentParser:
    """Add a subcommand that measures, and give its parser for options of its own.

    Args:
        commands: the subcommands of the command line.
        name: its name.
        run: carries it out; its result is the exit code.
        help: a line about it.
        description: what its own help says.
        repeats: default of `--repeats`; None: it has no such option.
        folder: what `--dir` is for; None: it works on no disk.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(run=run)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="every sample, as JSON")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="the tables, as Markdown")
    if repeats is not None:
        parser.add_argument(
            "--repeats",
            type=count,
            default=repeats,
            help=f"rounds that count (default {repeats})",
        )
    if folder is not None:
        parser.add_argument("--dir", type=writable_folder, default=None, metavar="DIR", help=folder)
    return parser
