"""`benchmark async`: what saving in the background costs, what sharing and a base save, and what
memory a load takes.

Clients take turns, each in a fresh process a round, so that slow minutes of the machine fall on all
of them alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import above_zero, chosen_of, count

from bench import load_memory, machine, report, sharing
from bench.async_clients import (
    BUDGET,
    BUDGET_BYTES,
    COPY,
    DCP,
    DCP_REUSED,
    OURS,
    OVERLAP,
    PLAIN,
)
from bench.results import Results, Sample, Verdict
from bench.subcommand import measuring
from bench.targets import at_least, at_most

STALL, FIRST, STAGED, DURABLE = "stall", "stall, first call", "until staged", "until durable"
LOST, PEAK, SECONDS = "training lost", "peak above the state", "seconds a save"
CASES = {
    "stall": (COPY, PLAIN, OURS, OVERLAP, DCP, DCP_REUSED),
    "train": (PLAIN, OURS, OVERLAP, DCP, DCP_REUSED),
    "memory": (OURS, BUDGET),
    "base": (),
    "replicas": (),
    "loads": (),
}
SAVES_A_PROCESS = 3
BUDGET_PEAK_BYTES = 300 * 2**20


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser = measuring(
        commands,
        "async",
        run,
        help="saves in the background, saves upon a base, shared loads",
        description="Stall, lost training and memory of saves in the background beside PyTorch DCP "
        "and a plain copy and write; saves upon a base; loads that replicas share; memory of "
        "loads.",
        repeats=None,
    )
    parser.add_argument("--rounds", type=count, default=3, help="rounds of processes (default 3)")
    parser.add_argument(
        "--scale", type=above_zero, default=1.0, help="of the 2 GiB state (default 1)"
    )
    parser.add_argument(
        "--only",
        type=chosen_of(tuple(CASES)),
        default=tuple(CASES),
        metavar="CASE,...",
        help=f"of {', '.join(CASES)}",
    )


def run(options: argparse.Namespace) -> int:
    """Run the cases; 0 if every target that was measured is met."""
    results = Results()
    cases = list(options.only)
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        results.notes.update(
            machine=machine.describe(root), cases=cases, rounds=options.rounds, scale=options.scale
        )
        for number in range(options.rounds):
            for case in cases:
                print(f"round {number}: {case}", file=sys.stderr, flush=True)
                if case == "base":
                    sharing.base(results, root, options.scale, number)
                elif case == "replicas":
                    sharing.replicas(results, root, options.scale, number)
                elif case == "loads":
                    load_memory.run(results, root, options.scale, number)
                else:
                    _clients(results, case, root, options.scale, number)
    judged = list(_verdicts(results, options.scale))
    return report.publish(results, judged, options)


def _clients(results: Results, case: str, root: Path, scale: float, number: int) -> None:
    for name in CASES[case]:
        place = root / "work"
        place.mkdir()
        command = [sys.executable, "-m", "bench.async_worker", case, name, str(place), str(scale)]
        ended = subprocess.run(
            [*command, str(SAVES_A_PROCESS)], capture_output=True, text=True, check=False
        )
        shutil.rmtree(place)
        if ended.returncode:
            results.fail(case, 1, name, ended.stderr.strip().splitlines()[-1])
            continue
        found = json.loads(ended.stdout.splitlines()[-1])

        def add(
            measure: str, value: float, unit: str = "s", case: str = case, name: str = name
        ) -> None:
            results.add(Sample(case, 1, name, measure, number, value, unit))

        if case == "stall":
            add(FIRST, found["first"][0])
            for row in found["rows"]:
                for measure, value in zip((STALL, STAGED, DURABLE), row, strict=True):
                    add(measure, value)
        elif case == "train":
            for lost, took in found["rows"]:
                add(LOST, lost)
                add(DURABLE, took)
        else:
            add(PEAK, found["peak_bytes"], "bytes")
            for value in found["seconds"]:
                add(SECONDS, value)


def _verdicts(results: Results, scale: float) -> Iterator[Verdict]:
    def ratio(case: str, one: str, other: str, measure: str) -> float | None:
        a = results.median(case, 1, one, measure)
        b = results.median(case, 1, other, measure)
        return None if a is None or b is None else a / b

    cases = results.notes["cases"]
    if "stall" in cases:
        text = "stall at most 1.3 of a memory copy into reused buffers"
        yield at_most("stall", text, ratio("stall", OURS, COPY, STALL), 1.3)
        text = "stall at most a third of DCP's thread form"
        yield at_most("stall", text, ratio("stall", OURS, DCP, STALL), 1 / 3)
        text = "stall no more than DCP's with a reused stager"
        yield at_most("stall", text, ratio("stall", OURS, DCP_REUSED, STALL), 1.0)
        text = "first call no slower than DCP's"
        yield at_most("stall", text, ratio("stall", OURS, DCP, FIRST), 1.0)
        text = "call with overlapped staging at most 30 ms"
        yield at_most("stall", text, results.median("stall", 1, OVERLAP, STALL), 0.03)
    if "train" in cases:
        text = "training lost no more than to a plain copy and write"
        yield at_most("train", text, ratio("train", OURS, PLAIN, LOST), 1.0)
        for peer in (DCP, DCP_REUSED):
            text = f"training lost less than to {peer}"
            yield at_most("train", text, ratio("train", OURS, peer, LOST), 1.0)
    if "memory" in cases:
        text = f"peak at most 300 MiB with a budget of {BUDGET_BYTES >> 20} MiB"
        peak = results.median("memory", 1, BUDGET, PEAK)
        yield at_most("memory", text, peak, BUDGET_PEAK_BYTES)
        text = "rate with the budget at least 0.8 of that without"
        yield at_least("memory", text, ratio("memory", OURS, BUDGET, SECONDS), 0.8)
    yield from sharing.verdicts(results, cases)
    yield from load_memory.verdicts(results, cases)
