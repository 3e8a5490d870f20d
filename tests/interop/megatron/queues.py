"""Requests of this package in the queues of Megatron-Core and nvidia-resiliency-ext, as programs
use them that take a queue from there and ``save`` from here::

    python queues.py MODULE FOLDER [--persistent]

The queue of MODULE forks a process for each request, or sends it to a worker process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shardstore
from shardstore import ShardedTensor


def main() -> None:
    """One rank saves twice, and changes its state after each save."""
    module, folder, *options = sys.argv[1:]
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    queue = importlib.import_module(module).AsyncCallsQueue(persistent=bool(options))
    for number, backend in enumerate(("zarr", "torch_dist")):
        data = torch.arange(1 << 20, dtype=torch.float32)
        place = Path(folder, backend)
        state = {"w": ShardedTensor.from_rank_offsets("w", data), "number": number}
        strategy = shardstore.serialization.get_default_save_sharded_strategy(backend)
        request = shardstore.save(state, place, strategy, async_sharded_save=True)
        assert queue.schedule_async_request(request) == number
        data.zero_()
        assert not (place / "metadata.json").exists()
        while queue.get_num_unfinalized_calls():
            queue.maybe_finalize_async_calls(blocking=number == 1)
        loaded = shardstore.load_plain_tensors(place)
        assert torch.equal(loaded["w"], torch.arange(1 << 20, dtype=torch.float32))
        assert loaded["number"] == number
    queue.close()
    assert not multiprocessing.active_children()
    print("done")


if __name__ == "__main__":
    main()
