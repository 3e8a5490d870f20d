"""This checkout beside another one on an S3 server, in turns, each save and load in a process of
its own:

    PYTHONPATH=scripts python -m bench.versions OTHER_CHECKOUT [--rounds 5]

The other checkout has its compiled part beside its sources, and what it imports is installed here.
Prints medians, minima, processor time of the client and peaks of memory, with the ratios of this
checkout to the other one. On one machine the server takes processor time from the client. To keep
them apart, start both on some processors (taskset), and give the client others: --client-cpu 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

MIB = 2**20
CASES = {
    "large": (16, 16 * MIB, 0),
    "larger": (8, 32 * MIB, 0),
    "1 GiB": (32, 32 * MIB, 0),
    "small": (2000, 16 * 1024, 0),
    "large, 50 ms": (16, 16 * MIB, 50),
    "small, 50 ms": (2000, 16 * 1024, 50),
}
"""Number of tensors, bytes of each, and latency in milliseconds."""
ROOT = Path(__file__).resolve().parents[2]


def work(verb: str, count: int, size: int, url: str) -> dict[str, float]:
    """Save or load once, after a save that imports what a first one imports."""
    import torch

    import shardstore
    from shardstore import ShardedTensor

    data = torch.randint(0, 255, (size,), dtype=torch.uint8).view(torch.bfloat16)
    names = [f"w{number:05d}" for number in range(count)]
    state = {name: ShardedTensor.from_rank_offsets(name, data.clone()) for name in names}
    small = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}
    shardstore.save(small, f"{url}-first-{verb}")
    before, began = getrusage(RUSAGE_SELF), time.perf_counter()
    if verb == "save":
        shardstore.save(state, url)
    else:
        shardstore.load(state, url)
    seconds, after = time.perf_counter() - began, getrusage(RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"s": seconds, "cpu s": cpu, "peak MiB": after.ru_maxrss / 1024}


def main() -> None:
    """Measure all cases, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--client-cpu", type=int, action="append", help="may be repeated")
    options = parser.parse_args()
    from bench.bucket import DELAY, Bucket, proxy

    checkouts = {"this": ROOT, "other": options.other.resolve()}
    print("case | verb | of | median s | min s | cpu s | peak MiB")
    for name, (count, size, latency) in CASES.items():
        if options.only not in (None, name):
            continue
        bucket = Bucket()
        found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
        with proxy(latency, DELAY) if latency else nullcontext():
            for number in range(options.rounds + 1):
                # The other order each time; the first round does not count.
                for who in sorted(checkouts, reverse=bool(number % 2)):
                    url = bucket.new(who)
                    for verb in ("save", "load"):
                        sample = _sample(checkouts[who], options.client_cpu, verb, count, size, url)
                        if number:
                            found[verb, who].append(sample)
        bucket.remove()
        for verb in ("save", "load"):
            rows = {who: _row(found[verb, who]) for who in checkouts}
            rows["ratio"] = [a / b for a, b in zip(rows["this"], rows["other"], strict=True)]
            for who, row in rows.items():
                print(f"{name} | {verb} | {who} |", " | ".join(f"{x:.2f}" for x in row), flush=True)


def _row(samples: list[dict[str, float]]) -> list[float]:
    medians = [median(sample[what] for sample in samples) for what in samples[0]]
    return [medians[0], min(sample["s"] for sample in samples), *medians[1:]]


def _sample(
    checkout: Path, cpus: list[int] | None, verb: str, count: int, size: int, url: str
) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, verb, str(count), str(size), url]
    if cpus:
        command = ["taskset", "-c", ",".join(map(str, cpus)), *command]
    ended = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    sample: dict[str, Any] = json.loads(ended.stdout)
    return sample


if __name__ == "__main__":
    if sys.argv[1:2] in (["save"], ["load"]):
        verb, count, size, url = sys.argv[1:]
        sys.path.pop(0)  # the folder of this file
        print(json.dumps(work(verb, int(count), int(size), url)))
    else:
        main()
