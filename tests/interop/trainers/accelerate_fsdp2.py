"""accelerate with FSDP2 and its own limit of one checkpoint: trains a tiny model, saves after every
second step, and goes on from the checkpoint that it is given.

torchrun accelerate_fsdp2.py FOLDER STEPS [CHECKPOINT]; see kills.py for DIES_AT. The program raises
the audit events "step NUMBER" before each step and "end of program".
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration
from kills import die_at_moment_of_environment

import shardstore.dcp

EVERY = 2


def number_of(checkpoint: str | Path) -> int:
    """Return the number in the name of a checkpoint of accelerate."""
    return int(str(checkpoint).rpartition("_")[2])


def main() -> None:
    """Train, and write the losses by step beside the checkpoints."""
    folder, steps, *checkpoint = sys.argv[1:]
    shardstore.dcp.install(named_writers=True, asynchronous=True, durable=False)
    die_at_moment_of_environment()
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="NO_WRAP",
        cpu_ram_efficient_loading=False,
    )
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp, project_config=project)
    state = accelerator.state  # on a CPU, accelerate does not choose FSDP by itself
    PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = fsdp
    torch.manual_seed(accelerator.process_index)  # of the dropout
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    first = 0
    if checkpoint:
        accelerator.load_state(checkpoint[0])
        project.iteration = number_of(checkpoint[0]) + 1
        if accelerator.is_main_process:
            # A killed save left it. Other ranks of accelerate do not wait until rank 0 deletes it.
            for other in Path(checkpoint[0]).parent.iterdir():
                if number_of(other) >= project.iteration:
                    shutil.rmtree(other)
        accelerator.wait_for_everyone()
        first = project.iteration * EVERY
    losses = {}
    for step in range(first, int(steps)):
        sys.audit("step", step)
        loss = model(torch.ones(8, 6)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = float(accelerator.reduce(loss.detach(), "mean"))
        if (step + 1) % EVERY == 0:
            accelerator.save_state()
    sys.audit("end", "of program")
    if dist.get_rank() == 0:
        Path(f"{folder}.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
