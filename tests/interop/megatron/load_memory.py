"""Peak memory of a fully parallel load, on two gloo ranks that hold the same tensors::

    python load_memory.py megatron.core.dist_checkpointing FOLDER [install]

Writes ``FOLDER/peak``: for each algorithm, the most bytes that a rank had beyond those before the
load. The first run saves; later ones load the same checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import file_answers
import gpt
import torch
import torch.distributed as dist

COUNT, SIZE = 16, 1 << 20  # 64 MiB


def resident(name: str) -> int:
    """A figure of this process in bytes: ``VmRSS`` now, ``VmHWM`` at most."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def peak(ask: file_answers.Package, place: Path, algorithm: str) -> int:
    """What one load takes."""
    make = ask("mapping").ShardedTensor.from_rank_offsets
    tensors = {str(n): torch.full((SIZE,), -1.0) for n in range(COUNT)}
    state = {key: make(key, data, replica_id=ask.rank) for key, data in tensors.items()}
    strategy = ask("strategies.torch").TorchDistLoadShardedStrategy()
    wrapper = ask("strategies.fully_parallel").FullyParallelLoadStrategyWrapper(
        strategy, None, False, algorithm
    )
    Path("/proc/self/clear_refs").write_text("5")  # begins VmHWM anew
    before = resident("VmRSS")
    with gpt.OnCpu():
        loaded = ask.load(place, state, wrapper)
    found = resident("VmHWM") - before
    assert all((loaded[str(n)] == n).all() for n in range(COUNT))
    return found


def one_rank(rank: int, world: int, package: str, folder: str) -> None:
    """Save if nothing is there; load twice by each algorithm, and keep the second peak."""
    file_answers.begin(rank, world, folder)
    ask, place = file_answers.Package(package), Path(folder, "saved")
    if not place.exists():
        dist.barrier()
        make = ask("mapping").ShardedTensor.from_rank_offsets
        tensors = {str(n): torch.full((SIZE,), float(n)) for n in range(COUNT)}
        ask.save(place, {key: make(key, data, replica_id=rank) for key, data in tensors.items()})
    found = {}
    for algorithm in ("broadcast", "gather_rounds", "gather_object"):
        for _ in range(2):
            mine = torch.tensor(peak(ask, place, algorithm))
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            found[algorithm] = int(mine)
    if rank == 0:
        Path(folder, "peak").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    file_answers.start(one_rank, 2, sys.argv[2])
