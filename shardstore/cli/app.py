"""The command ``shardstore``: its subcommands, and its exit codes.

Every error is one line on standard error and an exit code, never a traceback. The modules of the
commands import NumPy and other slow modules inside of functions, because a listing needs none.
"""

from __future__ import annotations

import gc as gc_module
import logging
import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from shardstore.cli import changing, looking, pictures
from shardstore.cli.options import WRONG_USE, flag
from shardstore.cli.printing import Warnings, complain, open_streams
from shardstore.errors import CheckpointingException, DamagedCheckpointError

INTERRUPTED = 130
"""Exit code that shells use for a process ended by SIGINT."""

app = typer.Typer(
    name="shardstore",
    help="Inspect, verify, compare, convert and remove checkpoints, local or in object stores.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
OPTION_OF = {"overwrite=True": "--overwrite", "target_format": "--to", "source_format": "--from"}
"""Argument of a function, as error texts have it -> option of the commands."""
for command in (*looking.COMMANDS, *pictures.COMMANDS, *changing.COMMANDS):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, flag("--version", "Print the version.")] = False,
) -> None:
    if version:
        print(metadata.version("shardstore"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    try:
        code = app(arguments, prog_name="shardstore", standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # typer exits by itself if the pipe breaks while it prints.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(cause, BrokenPipeError):
            raise
        # The reader of the output (head, less) has closed the pipe: end quietly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        return 0
    except Exception as error:
        complain(_described(error))
        return 1 if isinstance(error, DamagedCheckpointError) else WRONG_USE
    if code == INTERRUPTED:  # typer catches some interrupts itself, and prints nothing
        complain("interrupted")
    return code if isinstance(code, int) else 0


def _described(error: Exception) -> str:
    if isinstance(error, CheckpointingException):
        text = str(error)
        for argument, option in OPTION_OF.items():
            text = text.replace(argument, option)
        return text
    if hasattr(error, "format_message"):  # typer's error, whose module depends on typer's version
        path = getattr(getattr(error, "ctx", None), "command_path", "shardstore")
        return f"{error.format_message().strip().rstrip('.')}; see `{path} --help`"
    if isinstance(error, OSError | ValueError | MemoryError | ImportError):
        return f"{type(error).__name__}: {error}"
    return f"unexpected {type(error).__name__}: {error}; please report this"


def main() -> None:
    """Entry point of the console script."""
    # A command runs only briefly, so garbage collection would only cost time.
    gc_module.set_threshold(1_000_000)
    open_streams()
    logging.getLogger("shardstore").addHandler(Warnings(logging.WARNING))
    code = run()
    gc_module.freeze()
    sys.exit(code)
