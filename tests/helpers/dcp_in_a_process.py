"""A trainer of two ranks that saves through DCP's background process, see test_torch_state.py.
DCP's process is spawned, so this has to be a program of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardstore.dcp import StorageReader, StorageWriter, install


def main() -> None:
    """Save two steps in the background process, the second by its place alone; load them."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def made(value: float) -> DTensor:
        return DTensor.from_local(torch.full((4, 3), value + dist.get_rank()), mesh, [Shard(0)])

    for step in range(2):
        state = {"w": made(10.0 * step), "step": step}
        place = folder / f"{step}"
        given = {"checkpoint_id": place} if step else {"storage_writer": StorageWriter(place)}
        with install():
            dcp.async_save(
                state, **given, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            ).result()
    for step in range(2):
        wanted = {"w": made(-1.0), "step": -1}
        dcp.load(wanted, storage_reader=StorageReader(folder / f"{step}"))
        assert torch.equal(wanted["w"].to_local(), made(10.0 * step).to_local())
        assert wanted["step"] == step
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
