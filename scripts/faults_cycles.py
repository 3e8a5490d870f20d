"""Many cycles of a manager on 4 ranks, with faults: memory, threads and files stay flat.

In each cycle the ranks save a step, at once or in the background, and restore; in two of three a
rank, or all of them, meet a fault. Between parts of the run a rank is killed in a save.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardstore import (
    CheckpointingException,
    CheckpointManager,
    ShardedTensor,
    delete_checkpoint,
)
from testing.ranks import RankFailed, run_ranks

WORLD = 4
WARM = 20
"""Cycles after which nothing may grow any more."""
FAULTS = ["none", "full", "value", "abort", "rot", "base"]


def state(rank: int, value: float) -> dict[str, Any]:
    found: dict[str, Any] = {"value": value}
    for i in range(4):
        data = torch.full((64, 256), value)
        found[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", data, (0, rank, WORLD))
    return found


def one_cycle(manager: CheckpointManager, rank: int, step: int, fault: str, victim: int) -> bool:
    """Save with a fault; whether it was committed."""
    content, options = state(rank, float(step)), {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fault == "full" and rank == victim:  # every write beyond is refused by the system
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    if fault == "value" and rank == 0:
        content["refused"] = print
    if fault == "base":
        options["base"] = f"{manager.root.url}/nothing-here"
    try:
        if step % 2 or fault == "abort":
            handle = manager.async_save(step, content, overwrite=True, **options)
            if fault == "abort" and rank == victim:
                handle.abort()
            handle.result()
        else:
            manager.save(step, content, overwrite=True, **options)
    except CheckpointingException:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        manager.wait()
    return True


def rot(manager: CheckpointManager, step: int) -> None:
    chunk = next(Path(manager.url(step)).glob("w1/c*"))
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.unlink()
    chunk.write_bytes(data)


def usage(root: str) -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = [path.lstat().st_size for path in Path(root).rglob("*") if path.is_file()]
    return {
        "memory (KiB)": pages * resource.getpagesize() // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "files": len(sizes),
        "disk (KiB)": sum(sizes) // 1024,
    }


def cycles(rank: int, world_size: int, root: str, count: int, seed: int) -> list[dict[str, int]]:
    chance, seen = random.Random(seed), []
    manager = CheckpointManager(root, keep_last=2)
    rotten: set[int] = set()
    for step in range(1, count + 1):
        fault, victim = chance.choice(FAULTS), chance.randrange(world_size)
        before = manager.steps()
        committed = one_cycle(manager, rank, step, fault, victim)
        dist.barrier()
        assert committed == (step in manager.steps()), (step, fault)
        assert committed or manager.steps() == before, (step, fault)
        assert committed or fault in ("full", "value", "abort", "base"), (step, fault)
        if fault == "rot" and set(manager.steps()) - {*rotten, step}:  # one stays that is whole
            rotten = {step}
            dist.barrier()
            if rank == 0:
                rot(manager, step)
        dist.barrier()
        restored = manager.restore(state(rank, -1.0))
        expected = max(set(manager.steps()) - rotten, default=None)
        assert (restored and restored.step) == expected, (step, fault, restored)
        if restored is not None:
            assert bool((restored.state["w1"] == float(restored.step)).all())
        if rotten and rank == 0:  # damaged steps stay until somebody deletes them
            delete_checkpoint(manager.url(step))
        rotten = set()
        dist.barrier()
        seen.append(usage(root))
        dist.barrier()
    manager.close()
    return seen


def killed(rank: int, world_size: int, root: str, victim: int) -> None:
    """A save in which a rank is killed once it has written something."""

    def stop(event: Any) -> None:
        if rank == victim and event.bytes_done:
            os.kill(os.getpid(), signal.SIGKILL)

    os.environ["SHARDSTORE_DEADLINE_S"] = "20"
    CheckpointManager(root, keep_last=2).save(10**6, state(rank, 0.0), progress=stop)


def run_cycles(count: int, seed: int) -> int:
    """Run, and print what was used at the beginning and at the end; 1 if it grew."""
    root = tempfile.mkdtemp(prefix="cycles-")
    for victim in range(3):
        try:
            run_ranks(killed, WORLD, root, victim)
        except (RankFailed, CheckpointingException):
            pass
        else:
            raise AssertionError("a killed rank was not noticed")
    seen = run_ranks(cycles, WORLD, root, count, seed, timeout_s=60 + 20 * count)
    shutil.rmtree(root)
    grew = []
    warm = min(WARM, count // 2)
    print(f"{'rank':6}{'what':16}{'first':>10}{'warm':>10}{'at most':>10}{'last':>10}")
    for rank, usages in enumerate(seen):
        for what in usages[0]:
            early = max(one[what] for one in usages[:warm])
            late = max(one[what] for one in usages[warm:])
            values = f"{usages[0][what]:10}{early:10}{late:10}{usages[-1][what]:10}"
            print(f"{rank:<6}{what:16}{values}")
            if late > early * 1.05 + 2:
                grew.append(f"{what} of rank {rank}")
    print(f"{count} cycles on {WORLD} ranks: {'grew: ' + ', '.join(grew) if grew else 'all flat'}")
    return bool(grew)
