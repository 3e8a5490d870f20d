"""verl's checkpoint manager of FSDP over this package, by verl's own seam: trains a tiny model with
FSDP2, saves each step, keeps two, and goes on from the place that it is given.

VERL_USE_EXTERNAL_MODULES=shardstore.verl torchrun verl_fsdp2.py ROOT STEPS OUTPUT [PLACE]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

BATCH = 8


def main() -> None:
    """Train and save; write the losses by step, and what the random states give after it."""
    root, steps, output, *place = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3 + len(place))  # a resumed run begins with other weights
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.untrained = torch.nn.Linear(3, 2)  # without gradients, it has no state in the optimizer
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
    manager = FSDPCheckpointManager(model, optimizer, schedule)
    assert type(manager).__mro__[1].__module__ == "shardstore.verl"
    torch.manual_seed(50 + rank)
    np.random.seed(60 + rank)
    start = 0
    if place:
        manager.load_checkpoint(place[0])
        start = int(place[0].rpartition("_")[2])
    losses = {}
    for step in range(start + 1, int(steps) + 1):
        ids = torch.randint(0, 32, (BATCH, 6), generator=torch.Generator().manual_seed(step))
        ids = ids.chunk(world)[rank]
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        dist.all_reduce(whole := loss.detach().clone())
        losses[step] = whole.item() / world
        torch.rand(1)
        manager.save_checkpoint(f"{root}/global_step_{step}", global_step=step, max_ckpt_to_keep=2)
    drawn = [torch.rand(1).item(), float(np.random.rand())]
    found: list[list[float]] = [[]] * world
    dist.all_gather_object(found, drawn)
    if rank == 0:
        Path(output).write_text(json.dumps({"losses": losses, "drawn": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
