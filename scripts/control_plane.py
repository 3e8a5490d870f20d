"""What ranks tell each other before a commit, in worlds of up to 100,000 ranks: a simulation.

`measure N` starts N real ranks and prints what a meeting costs the coordinator. `draw FILE`
simulates one save, with costs that were fitted to such runs, and draws it beside what PyTorch DCP
and Megatron-Core gather. The tree is the package's own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

WORLDS = (8, 64, 256, 1024, 4096, 16_384, 100_000)
LATENCY_S, NETWORK_BYTES_PER_S = 50e-6, 1.25e9
"""Of the network; assumed."""
MESSAGE_S, BYTE_S = 1.0e-4, 1.5e-9
"""Processor time of who receives a message and answers it: fitted to `measure` (see scale.md)."""
OPENING_BYTES = 300
MANIFEST_BYTES, JOINED_BYTES, JOIN_S, MERGE_S = 3260, 2370, 1.25e-4, 0.38e-4
"""Of 100 tensors a rank: a report, its part of a joined one, and a rank's share of both merges."""
PLAN_BYTES, PLAN_S, RESULT_BYTES, RESULT_S = 16_400, 1.95e-3, 9_900, 1.9e-4
"""Of 100 tensors a rank: what DCP gathers, and what rank 0 spends on it for each rank."""
SHARDS_BYTES, SHARDS_S = 9_400, 1.76e-4
"""Of 100 tensors a rank: what Megatron-Core gathers on every rank, and what unpacking it costs."""


def received(arrivals: Sequence[float], size: int) -> float:
    """When a rank has taken messages of one size, which come at these times."""
    done = 0.0
    for arrival in sorted(arrivals):
        done = max(done, arrival + size / NETWORK_BYTES_PER_S) + MESSAGE_S + size * BYTE_S
    return done


def meeting(world: int, size: int, joined: int, join_s: float, merge_s: float) -> float:
    """Seconds from the reports of all ranks to the answer on the last one.

    Args:
        world: number of ranks.
        size: of a rank's report, in bytes.
        joined: of its part in a report that a leader has joined.
        join_s: what a leader spends on it.
        merge_s: what the coordinator spends on it.
    """
    from shardstore.distributed.coordinator import neighbours

    _, below = neighbours(0, world)
    own = [rank for rank in below if not neighbours(rank, world)[1]]
    leaders = [rank for rank in below if neighbours(rank, world)[1]]
    done = received([LATENCY_S] * len(own), size)
    down = 2 * LATENCY_S + len(below) * MESSAGE_S / 2
    if leaders:
        each = len(neighbours(leaders[0], world)[1])
        ready = received([LATENCY_S] * each, size) + (each + 1) * join_s
        done = max(done, received([ready + LATENCY_S] * len(leaders), joined * (each + 1)))
        down += each * MESSAGE_S / 2
    return done + world * merge_s + down


def shardstore(world: int) -> float:
    """Agree to begin, and commit."""
    opening = meeting(world, OPENING_BYTES, OPENING_BYTES, 0, 1e-5)
    return opening + meeting(world, MANIFEST_BYTES, JOINED_BYTES, JOIN_S, MERGE_S)


def star(world: int) -> float:
    """The same with every rank reporting to rank 0, as before 0.2."""
    sizes = (OPENING_BYTES, MANIFEST_BYTES)
    told = sum(received([LATENCY_S] * (world - 1), size) for size in sizes)
    return told + world * (1e-5 + 0.95e-4 + MESSAGE_S)


def dcp(world: int) -> float:
    """Plans gathered on rank 0, the global plan scattered, and what was written gathered."""
    plans = received([LATENCY_S] * (world - 1), PLAN_BYTES) + world * PLAN_S
    scattered = world * (MESSAGE_S / 2 + PLAN_BYTES * (1 / NETWORK_BYTES_PER_S + BYTE_S))
    return plans + scattered + received([LATENCY_S] * (world - 1), RESULT_BYTES) + world * RESULT_S


def megatron(world: int) -> float:
    """Descriptions of all shards gathered on every rank, in a ring."""
    step = LATENCY_S + SHARDS_BYTES * (1 / NETWORK_BYTES_PER_S + BYTE_S)
    return (world - 1) * step + world * SHARDS_S


LINES = {
    "shardstore": (shardstore, "#0f766e"),
    "before 0.2: all ranks to rank 0": (star, "#5eb5aa"),
    "DCP: plans and results through rank 0": (dcp, "#94a3b8"),
    "Megatron-Core: all shards to all ranks": (megatron, "#b45309"),
}


def draw(output: Path) -> None:
    """Print the simulated seconds, and draw them."""
    from bench.page import LIMIT, pyplot, save_picture

    fig, axes = pyplot().subplots(figsize=(8.0, 3.8), layout="constrained")
    for name, (model, colour) in LINES.items():
        times = [(world, model(world)) for world in WORLDS]
        print(name, *(f"{world:,}: {seconds:.3g} s" for world, seconds in times), sep="\n  ")
        axes.loglog(*zip(*times, strict=True), color=colour, label=name)
    axes.set_xticks(WORLDS, [f"{world:,}" for world in WORLDS])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g} s")
    axes.set_xlabel("ranks")
    axes.grid(axis="y", color=LIMIT)
    axes.legend(frameon=False)
    save_picture(fig, output)


def run_rank(rank: int, world: int, store: str) -> None:
    """Be one of the real ranks."""
    torch.set_num_threads(1)
    wait = timedelta(minutes=10)
    dist.init_process_group("gloo", store, rank=rank, world_size=world, timeout=wait)
    measure(rank, world)
    dist.barrier()
    os._exit(0)


def measure(rank: int, world: int) -> None:
    """Meet again and again; rank 0 prints a line for each size of reports."""
    from shardstore.distributed.coordinator import Ranks

    ranks = Ranks.current()
    for size in (100, 20_000, 400_000):
        report, spent, took = os.urandom(size), [], []
        for _ in range(13):
            dist.barrier()
            processor, clock = time.process_time(), time.perf_counter()
            ranks.together(report, what="measuring", decide=lambda reports: b"")
            spent.append(time.process_time() - processor)
            took.append(time.perf_counter() - clock)
        if rank == 0:
            of_0 = {"processor_s": sorted(spent)[3], "clock_s": sorted(took)[3]}
            print(json.dumps({"ranks": world, "report_bytes": size} | of_0), flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("measure").add_argument("ranks", type=int)
    commands.add_parser("draw").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.ranks, f"file://{folder}/meet")
            start_processes(run_rank, arguments, options.ranks, start_method="fork")
    else:
        draw(options.file)


if __name__ == "__main__":
    main()
