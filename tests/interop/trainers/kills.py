"""Kills a program at a chosen moment, see :func:`die_at_moment_of_environment`."""

from __future__ import annotations

import os
import signal
import sys
from functools import wraps
from typing import Any

import torch


def die_at_moment_of_environment() -> None:
    """Kill rank 0 at the moment DIES_AT="EVENT TEXT": its first audit event of this name that has
    the text in one of its first two arguments.

    The events are those of Python (``os.rename``, ``shutil.rmtree``, ``open``), those that the
    program raises, and ``torch.save``, which comes when half of the file is written.
    """
    if "DIES_AT" not in os.environ or os.environ["RANK"] != "0":
        return
    event, text = os.environ["DIES_AT"].split(" ", 1)

    def look(name: str, args: tuple[Any, ...]) -> None:
        if name == event and any(text in str(arg) for arg in args[:2]):
            os.kill(os.getpid(), signal.SIGKILL)

    real = torch.save

    @wraps(real)
    def save(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        real(value, file, *args, **kwargs)
        if event == "torch.save" and text in str(file):
            os.truncate(file, os.path.getsize(file) // 2)
            sys.audit("torch.save", file)

    vars(torch)["save"] = save
    sys.addaudithook(look)
