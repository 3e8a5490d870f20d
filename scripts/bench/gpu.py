"""`benchmark gpu`: staging off a CUDA device, the stall, and what a training loop loses meanwhile.

Needs one CUDA device; says so where there is none.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero

from bench import machine, report
from bench.async_clients import Shardstore
from bench.async_worker import state_of
from bench.results import Results, Sample, Verdict
from bench.subcommand import measuring
from bench.targets import at_least, at_most

CASE = "gpu"
PINNED, STAGED = "pinned copy_", "shardstore staging"
BANDWIDTH, STALL, SLOWDOWN = "bandwidth", "stall", "training slowed to"
TRAIN_SIDE = 8192
RATE_S = 3.0
SETTLE_S = 0.5


def add_parser(commands: Any) -> None:
    """Add the subcommand to the command line."""
    parser = measuring(commands, "gpu", run, help="saves off a CUDA device", description=__doc__)
    parser.add_argument(
        "--scale", type=above_zero, default=4.0, help="of a 2 GiB state (default 4)"
    )


def run(options: argparse.Namespace) -> int:
    """Run all; 0 if every target is met, 2 without a device."""
    if not torch.cuda.is_available():
        print("benchmark gpu needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    results = Results()
    state = state_of(options.scale, "cuda")
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="shardstore-bench-", dir=options.dir) as folder:
        root = Path(folder)
        results.notes.update(
            machine=machine.describe(root),
            device=torch.cuda.get_device_name(),
            cases=[CASE],
            scale=options.scale,
        )
        _bandwidth(results, state, options.repeats)
        for overlap in (False, True):
            _training(results, state, root, options.repeats, overlap)
    judged = list(_verdicts(results))
    return report.publish(results, judged, options)


def _bandwidth(results: Results, state: dict[str, torch.Tensor], repeats: int) -> None:
    """Bytes a second of our staging and of `copy_` into one pinned tensor after the other."""
    from shardstore.mapping import ShardedTensor
    from shardstore.saving.plan import Layouts, plan_writes
    from shardstore.saving.staging import HostPool, Staging

    size = sum(tensor.nbytes for tensor in state.values())
    pinned = {k: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for k, t in state.items()}

    def plain() -> None:
        for key, tensor in state.items():
            pinned[key].copy_(tensor, non_blocking=True)

    pool = HostPool()

    def staged() -> None:
        tensors = [ShardedTensor.from_rank_offsets(k, t) for k, t in state.items()]
        plan = plan_writes(
            tensors, 0, zarr_format=3, target_chunk_bytes=32 * 2**20, layouts=Layouts()
        )
        staging = Staging(plan.writes, pool=pool)
        staging.run()
        staging.wait(host=True)
        staging.close()

    for number in range(-1, repeats):
        for name, work in ((PINNED, plain), (STAGED, staged)):
            seconds = _timed(work)
            if number >= 0:
                found = size / seconds / 2**30
                results.add(Sample(CASE, 1, name, BANDWIDTH, number, found, "ratio"))


def _timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _training(
    results: Results, state: dict[str, torch.Tensor], root: Path, repeats: int, overlap: bool
) -> None:
    """Steps a second of a loop of matrix products while a save runs, beside those without one."""
    name = "shardstore, overlapped" if overlap else "shardstore"
    client = Shardstore(overlap=overlap)
    a = torch.randn(TRAIN_SIDE, TRAIN_SIDE, device="cuda", dtype=torch.bfloat16)

    def steps_until(over: Callable[[], bool]) -> float:
        """Steps a second; each waits for the one before, as a trainer that reads its loss does."""
        torch.cuda.synchronize()
        begin, steps = time.perf_counter(), 0
        while not over():
            torch.matmul(a, a)
            torch.cuda.current_stream().synchronize()
            steps += 1
        return steps / (time.perf_counter() - begin)

    def rate() -> float:
        end = time.perf_counter() + RATE_S
        return steps_until(lambda: time.perf_counter() > end)

    for number in range(-1, repeats):
        before = rate()
        begin = time.perf_counter()
        save = client.start(state, root / f"{number}")
        stall = time.perf_counter() - begin
        during = steps_until(save.done)
        save.wait()
        after = rate()
        shutil.rmtree(root / f"{number}")
        time.sleep(SETTLE_S)
        if number >= 0:
            slowed = during / ((before + after) / 2)
            results.add(Sample(CASE, 1, name, STALL, number, stall))
            results.add(Sample(CASE, 1, name, SLOWDOWN, number, slowed, "ratio"))


def _verdicts(results: Results) -> Iterator[Verdict]:
    plain = results.median(CASE, 1, PINNED, BANDWIDTH)
    ours = results.median(CASE, 1, STAGED, BANDWIDTH)
    found = None if plain is None or ours is None else ours / plain
    yield at_least(CASE, "staging at 0.9 of a plain pinned copy", found, 0.9)
    for name in ("shardstore", "shardstore, overlapped"):
        slowed = results.median(CASE, 1, name, SLOWDOWN)
        yield at_least(CASE, f"training at 0.97 while a save runs ({name})", slowed, 0.97)
    stall = results.median(CASE, 1, "shardstore, overlapped", STALL)
    yield at_most(CASE, "call with overlapped staging at most 30 ms", stall, 0.03)
