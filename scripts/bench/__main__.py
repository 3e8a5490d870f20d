"""Command line of `scripts/benchmark`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from arguments import OneLineParser, above_zero, chosen_of, count, counts, new_file, writable_folder

from bench import page
from bench.background import ASYNC
from bench.bucket import Bucket
from bench.cases import DISK, S3
from bench.cli import CLI
from bench.results import command_and_date
from bench.runs import Case, Run
from bench.scale import RANKS, SCALE
from bench.targets import TARGETS
from testing import machine
from testing.machine import Disk

NEEDED_BYTES = 8 * 2**30
"""Of free space on the disk, at scale 1."""
COMMANDS: dict[str, tuple[Sequence[Case], tuple[int, ...], int, str]] = {
    "disk": (DISK, (1, 4), 5, "saves and loads on a local disk"),
    "s3": (S3, (1,), 5, "saves and loads in a bucket of the server that AWS_ENDPOINT_URL, "
           "AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY name, or of "
           "scripts/s3_server; a round takes 10 GiB"),
    "async": (ASYNC, (1,), 3, "saves in the background, upon a base; shared loads"),
    "scale": (SCALE, RANKS, 1, "planning and committing in large worlds"),
    "cli": (CLI, (1,), 5, "the command line's start, and verification"),
}  # fmt: skip
"""Name -> cases, and the defaults of --ranks and --repeats; what is measured."""


def main() -> int:
    """Run a subcommand; 0 if no target that was measured is missed, else 1."""
    parser = OneLineParser(
        prog="scripts/benchmark", description="Measure shardstore beside raw I/O and its peers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (cases, ranks, repeats, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(run=_measure, command=name)
        names = tuple(dict.fromkeys(case.name for case in cases))
        clients = tuple(dict.fromkeys(client for case in cases for client in case.clients))
        worlds = ",".join(map(str, ranks))
        for option, kind, default, meaning in (
            ("--only", chosen_of(names), names, f"cases: {', '.join(names)}"),
            ("--clients", chosen_of(clients), clients, f"of {'; '.join(clients)}"),
            ("--ranks", counts, ranks, f"worlds of the cases that have no own ({worlds})"),
            ("--repeats", count, repeats, f"rounds that count ({repeats})"),
            ("--scale", above_zero, 1.0, "factor on the sizes (1)"),
            ("--json", new_file, None, "file for every sample; `benchmark page` reads it"),
            ("--dir", writable_folder, None, "folder on the disk to measure (a temporary one)"),
            ("--device", str, "cpu", "where tensors are: cuda or cpu (cpu)"),
        ):
            metavar = option.strip("-").upper()
            command.add_argument(option, type=kind, default=default, metavar=metavar, help=meaning)
    page.add_parser(commands)
    options = parser.parse_args()
    status: int = options.run(options)
    return status


def _measure(options: argparse.Namespace) -> int:
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("--device cuda: there is no CUDA device here", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        if shutil.disk_usage(root).free < NEEDED_BYTES * options.scale:
            print(f"too little space in {root.parent}", file=sys.stderr)
            return 2
        bucket = Bucket() if options.command == "s3" else None
        run = Run(root, bucket or Disk(root), options)
        notes = run.results.notes
        notes |= command_and_date() | {"repeats": options.repeats, "scale": options.scale}
        notes["machine"] = machine.describe(root)
        if bucket:
            notes["server"] = bucket.server.name
        if options.device == "cuda":
            notes["device"] = torch.cuda.get_device_name()
        for case in COMMANDS[options.command][0]:
            if case.name in options.only:
                run.case(case)
        if bucket:
            bucket.remove()
    run.results.judge(TARGETS)
    print(page.text(run.results))
    if options.json:
        options.json.write_text(json.dumps(run.results.as_dict(), indent=1) + "\n")
    return 1 if any(verdict.ok is False for verdict in run.results.targets) else 0


if __name__ == "__main__":
    sys.exit(main())
