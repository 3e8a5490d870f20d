"""`benchmark cli`: how soon the command line answers, and verification beside plain reading.

A listing and an import are measured from the start of a process to its end. A verification runs in
this process, beside a reader that lists the same folders and reads the same files to their ends and
does nothing else, with one thread and with two, whichever is faster.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero

import shardstore
from bench import machine, report
from bench.disk_state import drop_from_cache
from bench.results import Results, Sample, Verdict
from bench.subcommand import measuring
from bench.targets import at_least, at_most
from shardstore.inspection.verify import Finding, verify
from shardstore.mapping import ShardedTensor
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.stores.location import Location

CASE = "cli"
START = "process, start to end"
RATE = "rate to plain reading"
BARE, IMPORT, LS = "python alone", "import shardstore", "shardstore ls"
READ_BYTES = 2**20
STATES = {
    "10,000 arrays of 1 KiB": (10_000, 256),
    "10,000 arrays of 4 KiB": (10_000, 1024),
    "2,000 arrays of 64 KiB": (2_000, 16 * 1024),
    "1 GiB in 32 MiB chunks": (32, 8 * 2**20),
}
"""Name -> arrays, float32 elements of each."""
LISTED = next(iter(STATES))


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser = measuring(
        commands,
        "cli",
        run,
        help="the command line's start, listing and verification",
        description=__doc__,
    )
    parser.add_argument(
        "--scale", type=above_zero, default=1.0, help="factor on the number of arrays"
    )


def run(options: argparse.Namespace) -> int:
    """Run all; 0 if every target is met."""
    results = Results()
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        results.notes.update(
            machine=machine.describe(root),
            cases=[CASE],
            ranks=[1],
            repeats=options.repeats,
            scale=options.scale,
        )
        for name, (arrays, elements) in STATES.items():
            print(f"{name}:", file=sys.stderr, flush=True)
            place = root / name.replace(",", "").replace(" ", "-")
            _save(place, max(1, round(arrays * options.scale)), elements)
            if name == LISTED:
                _starts(results, place, options.repeats)
            for cold in (False, True):
                _verification(results, name, place, options.repeats, cold)
    judged = list(_verdicts(results))
    return report.publish(results, judged, options)


def _save(place: Path, arrays: int, elements: int) -> None:
    values = torch.randn(elements)
    keys = [f"decoder.layers.{i // 10}.part{i % 10}.weight" for i in range(arrays)]
    state = {key: ShardedTensor.from_rank_offsets(key, values) for key in keys}
    shardstore.save(state, place)


def _starts(results: Results, place: Path, repeats: int) -> None:
    commands = {
        BARE: ["-c", "pass"],
        IMPORT: ["-c", "import shardstore"],
        LS: ["-m", "shardstore", "ls", str(place)],
    }
    for number in range(-1, repeats):
        for name, command in commands.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            seconds = time.perf_counter() - begin
            if number >= 0:
                results.add(Sample(CASE, 1, name, START, number, seconds))


def _verification(results: Results, name: str, place: Path, repeats: int, cold: bool) -> None:
    cache = "cold" if cold else "warm"
    readers: dict[str, Callable[[], None]] = {
        "list and read, 1 thread": lambda: _read_all(place, 1),
        "list and read, 2 threads": lambda: _read_all(place, 2),
        "shardstore verify": lambda: _verify(place),
    }
    for number in range(-1, repeats):
        took = {}
        for reader, work in readers.items():
            if cold:
                drop_from_cache(place)
            begin = time.perf_counter()
            work()
            took[reader] = time.perf_counter() - begin
        if number < 0:
            continue
        ours = took["shardstore verify"]
        plain = min(seconds for reader, seconds in took.items() if reader != "shardstore verify")
        for reader, seconds in took.items():
            results.add(Sample(CASE, 1, f"{reader}, {cache}", name, number, seconds))
        sample = Sample(CASE, 1, f"verify, {cache}", f"{RATE}: {name}", number, plain / ours)
        results.add(Sample(**{**vars(sample), "unit": "ratio"}))


def _verify(place: Path) -> None:
    found: list[Finding] = []
    verify(StoredCheckpoint(Location.of(place)), found.append)
    if found:
        raise RuntimeError(found[0].message)


def _read_all(place: Path, threads: int) -> None:
    files = [os.path.join(top, name) for top, _, names in os.walk(place) for name in names]

    def read(part: list[str]) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        for path in part:
            handle = os.open(path, os.O_RDONLY)
            while os.readv(handle, (buffer,)):
                pass
            os.close(handle)

    others = [threading.Thread(target=read, args=(files[i::threads],)) for i in range(1, threads)]
    for other in others:
        other.start()
    read(files[::threads])
    for other in others:
        other.join()


def _verdicts(results: Results) -> Iterator[Verdict]:
    bare = results.median(CASE, 1, BARE, START)
    imported = results.median(CASE, 1, IMPORT, START)
    added = None if bare is None or imported is None else imported - bare
    yield at_most(CASE, "import shardstore adds at most 0.1 s", added, 0.1)
    listed = results.median(CASE, 1, LS, START)
    yield at_most(CASE, f"shardstore ls of {LISTED} within 1 s", listed, 1.0)
    for name in STATES:
        for cache in ("warm", "cold"):
            found = results.median(CASE, 1, f"verify, {cache}", f"{RATE}: {name}")
            yield at_least(CASE, f"verify at 0.8 of plain reading, {cache}: {name}", found, 0.8)
