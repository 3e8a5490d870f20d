"""Command line of `scripts/benchmark`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from arguments import OneLineParser, above_zero, chosen_of, counts

from bench import asynchronous, clients, command_line, gpu, machine, page, plot, report, scale
from bench.cases import DISK, S3
from bench.context import Context
from bench.disk_state import spread_folders
from bench.results import Results
from bench.subcommand import measuring
from bench.targets import verdicts

REPOSITORY = Path(__file__).resolve().parents[2]
MEGATRON_PYTHON = REPOSITORY / ".envs" / "megatron" / "bin" / "python"
ORBAX_PYTHON = REPOSITORY / ".envs" / "orbax" / "bin" / "python"
NEEDED_BYTES = 8 * 2**30


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; 0 if every target that was measured is met, else 1."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="scripts/benchmark", description="Measure shardstore beside raw I/O and its peers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    disk = measuring(
        commands,
        "disk",
        _disk,
        help="saves and loads on a local disk",
        description="All clients in turn in one run: same state, same disk, same durability.",
    )
    disk.add_argument(
        "--ranks", type=counts, default=(1, 4), help="worlds for save-load and memory (1,4)"
    )
    disk.add_argument(
        "--only",
        type=chosen_of(tuple(DISK)),
        default=tuple(DISK),
        metavar="CASE,...",
        help=f"cases to run: {', '.join(DISK)}",
    )
    disk.add_argument(
        "--clients",
        type=chosen_of(clients.NAMES),
        default=clients.NAMES,
        metavar="NAME,...",
        help=f"clients to run: {', '.join(clients.NAMES)}",
    )
    disk.add_argument(
        "--scale", type=above_zero, default=1.0, help="factor on the sizes (default 1)"
    )
    disk.add_argument(
        "--megatron-python",
        metavar="PYTHON",
        default=str(MEGATRON_PYTHON) if MEGATRON_PYTHON.exists() else None,
        help="interpreter with megatron-core 0.15.3 (default: that of scripts/megatron_env)",
    )
    disk.add_argument(
        "--orbax-python",
        metavar="PYTHON",
        default=str(ORBAX_PYTHON) if ORBAX_PYTHON.exists() else None,
        help="interpreter with orbax-checkpoint (default: that of scripts/orbax_env)",
    )
    s3 = measuring(
        commands,
        "s3",
        _s3,
        help="saves and loads on an S3 server",
        description="All clients in turn in one run, on Ceph's gateway (scripts/s3_server start) "
        "or on the server that AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY name. Works in a bucket of its own, which takes 10 GiB a round.",
        folder=None,
    )
    s3.add_argument("--scale", type=above_zero, default=1.0, help="factor on the sizes (default 1)")
    s3.add_argument(
        "--only",
        type=chosen_of(tuple(S3)),
        default=tuple(S3),
        metavar="CASE,...",
        help=f"cases to run: {', '.join(S3)}",
    )
    s3.add_argument(
        "--clients",
        type=chosen_of(clients.S3_NAMES),
        default=clients.S3_NAMES,
        metavar="NAME,...",
        help=f"clients to run: {', '.join(clients.S3_NAMES)}",
    )
    asynchronous.add_parser(commands)
    scale.add_parser(commands)
    gpu.add_parser(commands)
    plot.add_parser(commands)
    page.add_parser(commands)
    command_line.add_parser(commands)
    return parser


def _disk(options: argparse.Namespace) -> int:
    results = Results()
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        spread_folders(root)
        free = shutil.disk_usage(root).free
        if free < NEEDED_BYTES * options.scale:
            print(f"too little space: {free / 2**30:.1f} GiB free", file=sys.stderr)
            return 2
        results.notes.update(
            machine=machine.describe(root),
            cases=list(options.only),
            ranks=list(options.ranks),
            repeats=options.repeats,
            scale=options.scale,
        )
        context = Context(
            root=root,
            repeats=options.repeats,
            scale=options.scale,
            ranks=options.ranks,
            megatron_python=options.megatron_python,
            orbax_python=options.orbax_python,
            clients=options.clients,
            results=results,
        )
        for name in options.only:
            context.say(f"{name}:")
            DISK[name](context)
    return _report(results, options)


def _s3(options: argparse.Namespace) -> int:
    import s3_servers

    if "AWS_ENDPOINT_URL" not in os.environ:
        server = s3_servers.radosgw()
        if server is None:
            print("no S3 server: scripts/s3_server start, or set AWS_ENDPOINT_URL", file=sys.stderr)
            return 2
        os.environ.update(server.environment)
    given = s3_servers.S3Server(
        name=os.environ.get("BENCH_SERVER", "radosgw"),
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        key=os.environ["AWS_ACCESS_KEY_ID"],
        secret=os.environ["AWS_SECRET_ACCESS_KEY"],
        region=os.environ.get("AWS_REGION", "us-east-1"),
    )
    os.environ["AWS_REGION"] = given.region
    os.environ["BENCH_BUCKET"] = bucket = given.new_bucket()
    results = Results()
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-") as folder:
        results.notes.update(
            machine=machine.describe(Path(folder)),
            server=given.name,
            cases=list(options.only),
            ranks=[1],
            repeats=options.repeats,
            scale=options.scale,
        )
        context = Context(
            root=Path(folder),
            repeats=options.repeats,
            scale=options.scale,
            ranks=(1,),
            megatron_python=None,
            clients=options.clients,
            results=results,
        )
        for name in options.only:
            context.say(f"{name}:")
            S3[name](context)
    client = given.client()
    for key in given.keys(bucket):
        client.delete_object(Bucket=bucket, Key=key)
    client.delete_bucket(Bucket=bucket)
    return _report(results, options)


def _report(results: Results, options: argparse.Namespace) -> int:
    judged = verdicts(results)
    return report.publish(results, judged, options)


if __name__ == "__main__":
    sys.exit(main())
