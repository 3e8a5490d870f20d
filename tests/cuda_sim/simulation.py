"""Runs programs under the simulated CUDA runtime, and steers it from inside of them.

Settings are environment variables: ``CUDA_SIM_DEVICES``, ``CUDA_SIM_MEMORY_MB`` of each device,
``CUDA_SIM_DELAY_US``, the longest random delay before the work of a stream, ``CUDA_SIM_SEED``, and
``CUDA_SIM_REPORT=1``, which prints the log at exit.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".envs" / "cuda_sim"
PYTHON = ENVIRONMENT / "bin" / "python"
MISSING = "no simulated CUDA runtime: scripts/cuda_sim_env makes its environment (about 6 GB)"

_library = ctypes.CDLL(None)
"""The runtime, which was loaded before Python."""
IS_LOADED = hasattr(_library, "cuda_sim_fail")


@cache
def _preloaded() -> str:
    """Compile the runtime if its sources have changed, and return what ``LD_PRELOAD`` names."""
    (headers,) = ENVIRONMENT.glob("lib/python*/site-packages/nvidia/cu13/include")
    built = ENVIRONMENT / "simulator"
    command = [ROOT / "tests/cuda_sim/simulator/build", built]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_INCLUDE": str(headers)})
    return f"{built}/libcudart.so.13:{built}/libcuda.so.1"


def run(
    *arguments: str | Path, cwd: Path = ROOT, timeout: float = 600, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run Python under the simulation.

    Args:
        arguments: arguments of Python.
        cwd: folder whose ``shardstore`` is imported.
        timeout: seconds.
        settings: environment variables.
    """
    given = {name: str(value) for name, value in settings.items()}
    preload = os.environ["LD_PRELOAD"] if IS_LOADED else _preloaded()
    env = {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": str(cwd), **given}
    return subprocess.run(
        [PYTHON, *arguments], cwd=cwd, env=env, timeout=timeout, text=True, capture_output=True
    )


def fail(function: str, code: int, skip: int = 0, count: int = 1) -> None:
    """Let calls of a function of the runtime fail with an error code, in any thread.

    Args:
        function: name of the function.
        code: CUDA error code.
        skip: number of calls that succeed before.
        count: number of calls that fail.
    """
    _library.cuda_sim_fail(function.encode(), code, ctypes.c_long(skip), ctypes.c_long(count))


@contextmanager
def failing(function: str, code: int, skip: int = 0, count: int = 1) -> Iterator[None]:
    """:func:`fail` for the block."""
    fail(function, code, skip, count)
    try:
        yield
    finally:
        fail(function, 0, 0, 0)


def delay(us: int) -> None:
    """Set the longest random delay before the work of a stream."""
    _library.cuda_sim_delay(ctypes.c_long(us))


def _count(function: str) -> int:
    called = getattr(_library, function)
    called.restype = ctypes.c_long
    return int(called())


def faults() -> int:
    """Return the number of wrong calls of this process, such as a free of foreign memory."""
    return _count("cuda_sim_faults")


def registered() -> int:
    """Return the number of page-locked ranges that cudaHostRegister made."""
    return _count("cuda_sim_registered_ranges")


def queued_copies() -> int:
    """Return the number of copies between devices and page-locked memory that are not complete."""
    return _count("cuda_sim_queued_copies")


def has_context(device: int) -> bool:
    """Return whether a device was used by this process."""
    return bool(_library.cuda_sim_has_context(device))
