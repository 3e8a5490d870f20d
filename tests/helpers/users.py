"""The rights of another user, for tests that run as root."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Another user's rights, where we are root."""
    if os.geteuid() != 0:
        yield
        return
    group = os.getegid()
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def folder_for_all(parent: Path, mode: int) -> Path:
    """A new folder that other users reach."""
    parent.mkdir()
    parent.chmod(mode)
    for folder in parent.parents:
        if not os.stat(folder).st_mode & 0o001 and os.access(folder, os.W_OK):
            os.chmod(folder, os.stat(folder).st_mode | 0o011)
    return parent
