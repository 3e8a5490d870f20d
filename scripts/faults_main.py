"""Lets saves and deletions fail again and again, on disk and on S3, and says what was lost.

`testing.strikes` describes the faults.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from testing.s3_proxy import FaultProxy
from testing.s3_servers import radosgw
from testing.strikes import DISK, S3, Place, strike_disk, strike_s3

OPERATIONS = ["first", "overwrite", "later", "base", "delete", "retain"]
POINTS = [
    "mkdir", "rename", "unlink", "rmdir", "openat", "fallocate", "pwrite64", "syncfs",
    "fsync", "getdents64",
]  # fmt: skip


def strike_all(count: int, seed: int, only: str | None) -> int:
    """Strike so often, print a table and one line; 1 if anything was lost."""
    server = None if only == "disk" else radosgw()
    chance = random.Random(seed)
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    problems, began = [], time.monotonic()
    proxy = None if server is None else FaultProxy(server.endpoint_url)
    bucket = "" if server is None else server.new_bucket()
    if proxy is not None:
        proxy.start()
    for number in range(count):
        operation = OPERATIONS[number % len(OPERATIONS)]
        on_s3 = proxy is not None and (only == "s3" or number % 4 == 3)
        kinds = list(S3) if on_s3 else list(DISK)
        # A silent server costs 15 s each time.
        weights = [1 if kind == "silent" else 4 for kind in kinds]
        kind, at = chance.choices(kinds, weights)[0], chance.randrange(40)
        if on_s3:
            assert server is not None
            assert proxy is not None
            fault = chance.choice(S3[kind]) if S3[kind] else None
            point = fault.name if fault else "request"
            options = server.at(proxy.endpoint_url).storage_options
            place = Place(f"s3://{bucket}/{number}", options, proxy)
            outcome, wrong = strike_s3(operation, fault, at, place)
        else:
            point, at = chance.choice(POINTS), 1 + at % 8
            folder = Path(tempfile.mkdtemp(prefix="faults-"))
            outcome, wrong = strike_disk(kind, operation, point, at, folder)
            shutil.rmtree(folder)
        table["S3" if on_s3 else "disk", kind][outcome] += 1
        if wrong:
            problems.append(wrong)
            where = "S3" if on_s3 else "disk"
            print(
                f"fault {number} ({where}, {kind}, {operation}, {point} {at}): {wrong}", flush=True
            )
    if proxy is not None:
        proxy.stop()
    outcomes = ("died", "refused", "done", "failed", "hung")
    print(f"{'place':6}{'fault':12}" + "".join(f"{name:>9}" for name in outcomes))
    for (where, kind), counts in sorted(table.items()):
        print(f"{where:6}{kind:12}" + "".join(f"{counts[name]:9}" for name in outcomes))
    seconds = time.monotonic() - began
    said = f"{len(problems)} with a loss" if problems else "nothing lost"
    print(f"{count} faults, seed {seed}, {seconds:.0f} s: {said}")
    return bool(problems)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="faults (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="repeats the faults of a run")
    parser.add_argument("--only", choices=("disk", "s3"), help="default: every fourth on S3")
    arguments = parser.parse_args()
    return strike_all(arguments.count, arguments.seed, arguments.only)


if __name__ == "__main__":
    sys.exit(main())
