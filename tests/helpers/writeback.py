"""Which pages of a file wait in memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

CACHESTAT = 451
"""Its number on every architecture (Linux 6.5 and later)."""


def dirty_pages(path: Path) -> int:
    """Pages of a file that nobody has begun to send to the disk."""
    span = (ctypes.c_uint64 * 2)(0, 0)
    found = (ctypes.c_uint64 * 5)()
    fd = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(CACHESTAT, fd, ctypes.byref(span), ctypes.byref(found), 0) != 0:
            pytest.skip(f"no cachestat here: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
    return int(found[1])
