"""How a command ends whose reader went away, or that was used wrongly. It knows no command."""

from __future__ import annotations

import os
import sys

__all__ = ["seen_enough", "usage"]


def seen_enough() -> int:
    """The reader (head, less) has seen enough, and all is well; Python would complain again at its
    end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 0


def usage(error: Exception) -> str:
    """A line about wrong arguments; typer has moved its errors from one module to another."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return f"unexpected {type(error).__name__}: {error}; please report this"
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "shardstore")
    text = str(format_message()).strip().rstrip(".")
    return f"{text}; see `{path} --help`"
