"""The main job: train and save on 4 ranks, resume on 4, 2 and 1, read with plain zarr.

Starts the ranks (torchrun on this machine's loopback; a world of one runs without a process group),
compares the losses of the resumed runs with the unbroken one and says PASS or FAIL. It imports
neither torch nor shardstore itself. Run it through ``scripts/quickstart``, which installs first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRAINING = (2, 2)
RESUMED = [(2, 2), (1, 2), (1, 1)]
# Under another layout sums run in another order. The first resumed step starts from the very same
# bits, so only its own rounding shows; after that Adam and the bf16 weights carry it on.
FIRST_TOLERANCE = 1e-5
TOLERANCE = 1e-3
PHASE_LIMIT_S = 600
# Sizes for a run of seconds: enough to cut every tensor and range, too small to time anything.
SMALL = {"width": 64, "layers": 2, "heads": 4, "context": 32, "batch": 4, "learning_rate": 3e-3}


class FailedError(Exception):
    """A phase of the job went wrong; the text is for the reader."""


def run(command: list[str], what: str) -> None:
    """Run a phase to its end, its output going straight through; nothing it started outlives it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONUNBUFFERED": "1",
    }
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            code: int | str = process.wait(PHASE_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = f"no end after {PHASE_LIMIT_S} s"
        finally:
            # Asked to end, torchrun ends its ranks, which are in sessions of their own.
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    if code != 0:
        raise FailedError(f"{what} failed ({code})")


def ranks(
    job: str, tp: int, dp: int, folder: Path, checkpoint: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One run of the training program on ``tp * dp`` ranks; returns what it found."""
    world = tp * dp
    result = "train.json" if job == "train" else f"resume-tp{tp}-dp{dp}.json"
    command = [sys.executable]
    if world > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(world)]
    described = {"job": job, "tp": tp, "dp": dp, "folder": str(folder), "checkpoint": checkpoint}
    described |= {"steps": options.steps, "config": SMALL if options.small else {}}
    described["result"] = result
    command += [str(HERE / "quickstart_train.py"), json.dumps(described)]
    run(command, f"{job} on {world} rank{'s' * (world > 1)}")
    found: dict[str, Any] = json.loads((folder / result).read_text())
    return found


def compare(unbroken: dict[str, Any], resumed: dict[str, Any], same_layout: bool) -> str:
    """How the resumed run stands to the unbroken one, in words; raises if it should not."""
    wanted, got = unbroken["losses"], resumed["losses"]
    middle = len(wanted) // 2
    if len(got) != len(wanted) or got[:middle] != wanted[:middle]:
        raise FailedError("the losses up to the save were not restored")
    apart = [abs(a - b) for a, b in zip(wanted[middle:], got[middle:], strict=True)]
    if same_layout:
        if any(apart):
            raise FailedError(f"same layout, but losses are up to {max(apart):.3g} apart")
        if resumed["final"] != unbroken["final"]:
            raise FailedError("same layout and losses, but another end state")
        return f"{len(apart)} losses and every bit of the end state equal the unbroken run's"
    # Said the positive way, so that a NaN fails.
    if not (apart[0] <= FIRST_TOLERANCE and all(a <= TOLERANCE for a in apart)):
        raise FailedError(
            f"losses are {apart[0]:.3g} apart at the first step (at most {FIRST_TOLERANCE}), "
            f"then up to {max(apart):.3g} (at most {TOLERANCE})"
        )
    return (
        f"loss apart by {apart[0]:.1e} at the first step (at most {FIRST_TOLERANCE:.0e}), "
        f"by {max(apart):.1e} later (at most {TOLERANCE:.0e})"
    )


@contextmanager
def store(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Where the checkpoint goes: the folder, the URL given, or a bucket of a server of ours."""
    if options.checkpoint:
        yield f"{options.checkpoint.rstrip('/')}/quickstart-{uuid.uuid4().hex[:8]}"
    elif options.s3:
        sys.path.append(str(HERE.parent))
        from testing.s3_servers import ServerFailed, embedded_server

        try:
            with embedded_server(folder / "s3-server") as embedded:
                os.environ.update(embedded.server.environment)
                print(f"\nan S3 server of our own answers on {embedded.server.endpoint_url}")
                yield f"s3://{embedded.server.new_bucket()}/run/step"
        except ServerFailed as error:
            raise FailedError(str(error)) from error
    else:
        yield str(folder / "checkpoint")


def row(what: str, moved: dict[str, float] | None, verdict: str) -> str:
    rate = f"{moved['mib'] / moved['seconds']:,.0f} MiB/s" if moved else ""
    return f"{what:<60}{rate:>12}  {verdict}"


def layout_name(tp: int, dp: int) -> str:
    return f"{tp * dp} rank{'s' * (tp * dp > 1)}, tensor-parallel {tp} x data-parallel {dp}"


def job(folder: Path, checkpoint: str, options: argparse.Namespace) -> list[str]:
    """All phases; returns the lines of the closing table."""
    lines = []
    print(f"\n[1] train {options.steps} steps, save mid-way: {layout_name(*TRAINING)}")
    unbroken = ranks("train", *TRAINING, folder, checkpoint, options)
    losses = unbroken["losses"]
    print(f"  {checkpoint}")
    fallen = f"loss fell from {losses[0]:.3f} to {losses[-1]:.3f}"
    if not losses[-1] < losses[0] - min(0.5, 0.01 * len(losses)):
        raise FailedError(f"the model does not learn: {fallen}")
    save = unbroken["save"]
    lines.append(row(f"train and save: {layout_name(*TRAINING)}", save, fallen))
    for number, (tp, dp) in enumerate(RESUMED, 2):
        print(f"\n[{number}] resume: {layout_name(tp, dp)}")
        resumed = ranks("resume", tp, dp, folder, checkpoint, options)
        verdict = compare(unbroken, resumed, (tp, dp) == TRAINING)
        print(f"  {verdict}")
        lines.append(row(f"resume: {layout_name(tp, dp)}", resumed["load"], verdict))
    print(f"\n[{len(RESUMED) + 2}] plain zarr, in a process of its own")
    viewer = [sys.executable, str(HERE / "quickstart_view.py")]
    run([*viewer, checkpoint, str(folder / "train.json")], "reading with plain zarr")
    lines.append(row("plain zarr", None, "every array has the hash recorded at the save"))
    return lines


def main() -> int:
    from arguments import OneLineParser, count, writable_folder

    parser = OneLineParser(prog="scripts/quickstart", description=__doc__)
    add, on = parser.add_argument, "store_true"
    add("--dir", type=writable_folder, help="new or empty folder to work in (temporary)")
    add("--steps", type=count, default=40, help="training steps, saved at half (40)")
    add("--keep", action=on, help="leave checkpoint and records behind")
    add("--small", action=on, help="a tiny model, for a run of seconds")
    add("--only-check", action=on, help=argparse.SUPPRESS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--s3", action=on, help="save to an S3 server that is started here")
    url = "save below this URL, with the environment's credentials"
    where.add_argument("--checkpoint", metavar="URL", help=url)
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps has to be at least 4")
    if options.checkpoint is not None and not re.fullmatch("[a-z0-9+.-]+://.+", options.checkpoint):
        words = "is no URL such as s3://bucket/run; a folder is given by --dir"
        parser.error(f"--checkpoint {options.checkpoint!r} {words}")
    try:
        if options.dir is not None and any(options.dir.iterdir()):
            parser.error(f"--dir {options.dir} is not empty; give a new or empty folder")
        if options.only_check:
            return 0
        made = options.dir or tempfile.mkdtemp(prefix="shardstore-quickstart-")
        folder = Path(made).resolve()
    except OSError as error:
        parser.error(f"cannot work in {options.dir or 'a temporary folder'}: {error.strerror}")

    # In a pipe too, what this process says has to stay in order with what the ranks say.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A terminal's or supervisor's TERM has to end the ranks as an interrupt does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.perf_counter()
    try:
        with store(options, folder) as checkpoint:
            lines = job(folder, checkpoint, options)
    except (FailedError, OSError, KeyboardInterrupt) as error:
        is_stopped = isinstance(error, KeyboardInterrupt)
        print(f"\nFAIL: {'interrupted' if is_stopped else error}\nleft for a look: {folder}")
        return 130 if is_stopped else 1
    print("\n" + "\n".join(lines))
    if options.keep:
        print(f"\nkept: {folder}")
    else:
        shutil.rmtree(folder)
        if options.dir is not None:
            folder.mkdir()
    print(f"\nPASS in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
