"""Runs a program to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any


def run_to_end(command: Iterable[object], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, within four minutes; its output is text.

    Args:
        command: its words, each made a string.
        **how: other arguments of ``subprocess.run``.
    """
    asked = {"capture_output": True, "text": True, "timeout": 240, "check": False, **how}
    return subprocess.run(list(map(str, command)), **asked)
