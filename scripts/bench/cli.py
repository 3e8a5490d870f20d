"""The cases of `benchmark cli`: how soon the command line answers, and verification.

A listing and an import are measured from the start of a process to its end. A verification runs in
this process, beside a reader that lists the same folders and reads the same files to their ends and
does nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import shardstore
from bench.runs import Case, Figures, Run, Turn
from testing.machine import drop_from_cache, files_under

BARE, IMPORT, LS = "python alone", "import shardstore", "shardstore ls"
PLAIN = ("list and read, 1 thread", "list and read, 2 threads")
VERIFY = "shardstore verify"
START, WARM, COLD = "process, start to end", "warm cache", "cold cache"
READ_BYTES = 2**20
STATES = {
    "10,000 arrays of 1 KiB": (10_000, 256),
    "10,000 arrays of 4 KiB": (10_000, 1024),
    "2,000 arrays of 64 KiB": (2_000, 16 * 1024),
    "1 GiB in 32 MiB chunks": (32, 8 * 2**20),
}
"""Name -> arrays, float32 elements of each."""


def _checkpoint(run: Run, state: str) -> Path:
    place, (arrays, elements) = Path(run.store.new(state)), STATES[state]
    if not place.exists():
        keys = [f"layers.{i // 10}.part{i % 10}.weight" for i in range(round(arrays * run.scale))]
        values = torch.randn(elements)
        kind = shardstore.ShardedTensor
        shardstore.save({key: kind.from_rank_offsets(key, values) for key in keys}, place)
    return place


def start(run: Run, turn: Turn) -> Figures:
    """A process from its start to its end."""
    place = _checkpoint(run, next(iter(STATES)))
    commands = {
        BARE: ["-c", "pass"],
        IMPORT: ["-c", "import shardstore"],
        LS: ["-m", "shardstore", "ls", str(place)],
    }
    begin = time.perf_counter()
    command = [sys.executable, *commands[turn.client]]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return {START: time.perf_counter() - begin}


def read(state: str, run: Run, turn: Turn) -> Figures:
    """Every byte of a checkpoint, read or verified, from a cold cache and from a warm one."""
    place = _checkpoint(run, state)
    readers: dict[str, Callable[[], None]] = {
        PLAIN[0]: lambda: _read_all(place, 1),
        PLAIN[1]: lambda: _read_all(place, 2),
        VERIFY: lambda: _verify(place),
    }
    drop_from_cache(place)
    found: Figures = {}
    for cache in (COLD, WARM):
        begin = time.perf_counter()
        readers[turn.client]()
        found[f"{state}, {cache}"] = time.perf_counter() - begin
    return found


def _verify(place: Path) -> None:
    from shardstore.inspection.verify import Finding, verify
    from shardstore.storage.checkpoint import StoredCheckpoint
    from shardstore.storage.stores.location import Location

    found: list[Finding] = []
    verify(StoredCheckpoint(Location.of(place)), found.append)
    if found:
        raise RuntimeError(found[0].message)


def _read_all(place: Path, threads: int) -> None:
    files = list(files_under(place))

    def read(part: list[Path]) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        for path in part:
            handle = os.open(path, os.O_RDONLY)
            while os.readv(handle, (buffer,)):
                pass
            os.close(handle)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [files[i::threads] for i in range(threads)]))


CLI = (
    Case("start", start, (BARE, IMPORT, LS), None, worlds=(1,)),
    *(Case("verify", partial(read, s), (*PLAIN, VERIFY), None, worlds=(1,)) for s in STATES),
)
