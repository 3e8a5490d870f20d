"""Command line of `scripts/benchmark`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arguments import (
    OneLineParser,
    above_zero,
    chosen_of,
    count,
    counts,
    new_file,
    writable_folder,
)

from bench import page
from bench.background import ASYNC, GPU
from bench.bucket import Bucket
from bench.cases import DISK, S3
from bench.cli import CLI
from bench.clients import MEGATRON
from bench.results import command_and_date
from bench.runs import Case, Run
from bench.scale import RANKS, SCALE
from testing import machine
from testing.machine import Disk

NEEDED_BYTES = 8 * 2**30
"""Of free space on the disk, at scale 1."""


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; 0 if no target that was measured is missed, else 1."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="scripts/benchmark", description="Measure shardstore beside raw I/O and its peers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    disk = _add(commands, "disk", "saves and loads on a local disk", DISK, ranks=(1, 4))
    help = f"interpreter with what {MEGATRON} needs (default: made by scripts/megatron_env)"
    disk.add_argument("--megatron-python", metavar="PYTHON", help=help)
    server = (
        "saves and loads on an S3 server: Ceph's gateway (scripts/s3_server start), or the one "
        "that AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY name; in "
        "a bucket of its own, which takes 10 GiB a round"
    )
    _add(commands, "s3", server, S3)
    _add(commands, "async", "saves in the background, upon a base; shared loads", ASYNC, repeats=3)
    _add(commands, "scale", "planning and committing in large worlds", SCALE, RANKS, repeats=1)
    gpu = _add(commands, "gpu", "saves off a CUDA device, and loads to it", GPU, repeats=1, scale=4)
    gpu.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without one"
    )
    _add(commands, "cli", "the command line's start, and verification", CLI)
    page.add_parser(commands)
    return parser


def _add(
    commands: Any,
    name: str,
    help: str,
    cases: Sequence[Case],
    ranks: tuple[int, ...] = (1,),
    repeats: int = 5,
    scale: float = 1.0,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=_measure, command=name, cases=cases, device="cpu")
    names = tuple(dict.fromkeys(case.name for case in cases))
    clients = tuple(dict.fromkeys(client for case in cases for client in case.clients))
    worlds = ",".join(map(str, ranks))
    for option, kind, default, meaning in (
        ("--only", chosen_of(names), names, f"cases: {', '.join(names)}"),
        ("--clients", chosen_of(clients), clients, f"of {'; '.join(clients)}"),
        ("--ranks", counts, ranks, f"worlds of the cases that have no own ({worlds})"),
        ("--repeats", count, repeats, f"rounds that count ({repeats})"),
        ("--scale", above_zero, scale, f"factor on the sizes ({scale:g})"),
        ("--json", new_file, None, "file for every sample; `benchmark page` reads it"),
        ("--dir", writable_folder, None, "folder on the disk to measure (a temporary one)"),
    ):
        metavar = option.strip("-").upper()
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=meaning)
    return parser


def _measure(options: argparse.Namespace) -> int:
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("benchmark gpu needs a CUDA device; there is none here", file=sys.stderr)
            return 2
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        if shutil.disk_usage(root).free < NEEDED_BYTES * options.scale:
            print(f"too little space in {root.parent}", file=sys.stderr)
            return 2
        bucket = Bucket() if options.command == "s3" else None
        megatron = getattr(options, "megatron_python", None)
        run = Run(
            root=root,
            store=bucket or Disk(root),
            repeats=options.repeats,
            scale=options.scale,
            ranks=options.ranks,
            clients=options.clients,
            pythons={MEGATRON: megatron} if megatron else {},
            device=options.device,
        )
        notes = run.results.notes
        notes |= command_and_date() | {"repeats": options.repeats, "scale": options.scale}
        notes["machine"] = machine.describe(root)
        if bucket:
            notes["server"] = bucket.server.name
        if options.device == "cuda":
            notes["device"] = torch.cuda.get_device_name()
        for case in options.cases:
            if case.name in options.only:
                run.case(case)
        if bucket:
            bucket.remove()
    print(page.text(run.results))
    if options.json:
        options.json.write_text(json.dumps(run.results.as_dict(), indent=1) + "\n")
    return 1 if any(verdict.ok is False for verdict in run.results.targets) else 0


if __name__ == "__main__":
    sys.exit(main())
