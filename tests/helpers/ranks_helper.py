"""Runs a function on N gloo ranks of their own and brings back what each returned or raised.

Knows nothing of shardstore. Ranks are forked from :mod:`tests.helpers.rank_server`, which never saw
TensorStore, and not from the process of the tests: TensorStore does not survive a fork.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.rank_server import Started, start


class RankFailed(RuntimeError):  # noqa: N818 (reads as what it says in a test report)
    """A rank died, did not end in time, or raised what cannot be pickled."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a fresh gloo process group.

    Args:
        fn: a top-level function of an importable module.
        world_size: number of ranks, each a process of its own with one thread for torch.
        *args: passed on; must pickle.
        timeout_s: limit for all ranks together, in seconds.

    Returns:
        What each rank returned (must pickle), in the order of the ranks.

    Raises:
        Exception: what the first rank to fail raised, with the tracebacks of all as notes.
        RankFailed: a rank died or did not end in time, or its exception does not pickle.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = start(
            (_main, (rank, world_size, folder, timeout_s, fn, args)) for rank in range(world_size)
        )
        try:
            late = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
        return _collect(Path(folder), [process.exitcode for process in ranks], late)


def join(
    rendezvous: str, rank: int, world_size: int, timeout_s: float = 60, backend: str = "gloo"
) -> None:
    """Make the default process group; the ranks meet in a file that does not exist yet."""
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, f"file://{rendezvous}", limit, world_size, rank)


def _wait(ranks: list[Started], deadline: float) -> list[int]:
    """Wait for the ranks to end; kill those that do not, and return their numbers."""
    running = dict(enumerate(ranks))
    while running and (left := deadline - time.monotonic()) > 0:
        wait_for_any([process.sentinel for process in running.values()], timeout=left)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode:
                    # The others may be waiting for this one: give them a moment, no more.
                    deadline = min(deadline, time.monotonic() + 10)
    for process in running.values():
        process.kill()
        process.join()
    return list(running)


def _main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    # As torchrun sets it; all ranks are of one machine.
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ours.items()})
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(world_size))
    try:
        join(f"{folder}/rendezvous", rank, world_size, timeout_s)
        # A rank that is done at once would close its connections while others still connect.
        dist.barrier()
        outcome = ("returned", fn(rank, world_size, *args), "", 0.0)
        payload = pickle.dumps(outcome)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(("raised", error, text, time.monotonic()))
            pickle.loads(payload)
        except Exception:
            payload = pickle.dumps(("raised", None, text, time.monotonic()))
    temporary = Path(folder, f"{rank}.tmp")
    temporary.write_bytes(payload)
    temporary.rename(Path(folder, f"{rank}.outcome"))
    failed = pickle.loads(payload)[0] == "raised"
    if not failed:
        if dist.is_initialized():
            dist.destroy_process_group()
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the interpreter apart would be three quarters of what a rank costs. After a failure the
    # group may be beyond an orderly end; hanging here would hide the traceback.
    os._exit(failed)


def _collect(folder: Path, exit_codes: list[int | None], late: list[int]) -> list[Any]:
    results: list[Any] = []
    reports: list[str] = []
    raised: list[tuple[float, BaseException | None]] = []
    for rank, exit_code in enumerate(exit_codes):
        path = folder / f"{rank}.outcome"
        if not path.exists():
            why = "did not end in time" if rank in late else f"died with exit code {exit_code}"
            reports.append(f"rank {rank} {why}")
            continue
        kind, value, text, when = pickle.loads(path.read_bytes())
        if kind == "returned":
            results.append(value)
        else:
            reports.append(f"rank {rank} raised:\n{text}")
            raised.append((when, value))
    if not reports:
        return results
    first = min(raised, key=lambda one: one[0])[1] if raised else None
    if first is None:
        raise RankFailed("\n".join(reports))
    for report in reports:
        first.add_note(report)
    raise first
