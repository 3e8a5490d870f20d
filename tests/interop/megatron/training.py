"""Trains a small GPT with Megatron-Core's distributed optimizer, loaded and saved by its own calls.

Each rank of ``torchrun`` runs it, with this package installed in Megatron-Core's place::

    torchrun --nproc-per-node 2 training.py '{"tp": 1, "pp": 1, "steps": 3, "save": DIR}'

With ``load`` it begins from a checkpoint. Rank 0 prints, as JSON, the loss before the first step
and after the last one. With less than no steps, the only way without CUDA, it loads and saves.
"""

from __future__ import annotations

import json
import os
import sys
import typing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpt
import torch
import torch.distributed as dist
import typing_extensions

typing.override = typing_extensions.override  # wheels for Python 3.12 import it

from shardstore.megatron import install  # noqa: E402

install()
from megatron.core import dist_checkpointing, tensor_parallel  # noqa: E402

PLAIN: Any = {  # neither random numbers nor kernels of other packages
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("masked_softmax_fusion", "bias_activation_fusion"), False),
}


def loss_of(model: Any) -> torch.Tensor:
    """The loss for one batch, which is the same on every rank and in every run."""
    tokens = (torch.arange(4 * 17, device="cuda").reshape(4, 17) * 7) % 96
    positions = torch.arange(16, device="cuda").expand(4, 16)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool, device="cuda").triu(1)
    losses: torch.Tensor = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return losses.float().mean()


def train(optimizer: Any, steps: int) -> list[float]:
    """Make steps; return the loss before the first one and after the last one."""
    (model,) = optimizer.model_chunks
    first = loss_of(model).item()
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss_of(model).backward()
        model.finish_grad_sync()
        assert optimizer.step()[0]
    return [first, loss_of(model).item()]


def one_rank(task: dict[str, Any]) -> list[float]:
    """Build, load, train, save."""
    model = gpt.build(task["tp"], task["pp"], **PLAIN)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        model = model.cuda()
    optimizer = gpt.with_optimizer(model)
    sharding = "fully_reshardable"
    if task.get("load"):
        state = gpt.state_of(model, optimizer, sharding, loading=True)
        loaded = dist_checkpointing.load(state, task["load"])
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
    losses = train(optimizer, task["steps"]) if task["pp"] == 1 and task["steps"] >= 0 else []
    if task.get("save"):
        state = gpt.state_of(model, optimizer, sharding, loading=False)
        content = {"distrib_optim_sharding_type": sharding}
        dist_checkpointing.save(state, task["save"], content_metadata=content)
    return losses


def main() -> None:
    """Command line: the task as JSON."""
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda device=None: None
        dist.init_process_group("gloo")
    if task.get("save"):
        Path(task["save"]).mkdir(exist_ok=True)
    with nullcontext() if torch.cuda.is_available() else gpt.OnCpu():
        losses = one_rank(task)
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
