"""Many cycles of a manager on 4 ranks, with faults: memory, threads and files stay flat.

In each cycle the ranks save a step, at once or in the background, and restore; in most cycles a
rank, or all of them, meet a fault. ``scripts/faults --cycles 100`` runs it.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardstore import CheckpointingException, CheckpointManager, ShardedTensor, delete_checkpoint
from tests.helpers.ranks_helper import run_ranks

WORLD = 4
CYCLES = int(os.environ.get("SHARDSTORE_CYCLES", "100"))
WARM = min(20, CYCLES // 2)
"""All cycles, and those after which nothing may grow any more."""
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


@pytest.mark.long
@pytest.mark.timeout(60 + 20 * CYCLES)
def test_nothing_grows_over_many_cycles(tmp_path: Path) -> None:
    for usages in run_ranks(cycles, WORLD, str(tmp_path), CYCLES, 0, timeout_s=20 * CYCLES):
        for what in usages[0]:
            early = max(one[what] for one in usages[:WARM])
            late = max(one[what] for one in usages[WARM:])
            assert late <= early * 1.05 + 2, (what, early, late)
