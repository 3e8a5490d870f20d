"""torchtitan's checkpoint manager: trains, saves, purges; a second run finds the latest step.

torchrun --nproc-per-node=2 titan.py FOLDER MODE [FOLDER MODE ...]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import default_adamw

import shardstore.dcp

STEPS = 8


class Progress(Stateful):
    """What torchtitan's trainer keeps of itself: a step and how many tokens were seen."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens = torch.tensor(0)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["tokens"]


class Run:
    """A model under FSDP2, its optimizer and schedule, and torchtitan's manager over them."""

    def __init__(self, folder: str, mode: str, seed: int) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
        fully_shard(self.model, mesh=mesh)
        config = default_adamw(lr=0.05)
        config.implementation = "for-loop"
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.progress = Progress()
        self.manager = CheckpointManager(
            CheckpointManager.Config(enable=True, interval=2, keep_latest_k=2, async_mode=mode),
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self, steps: int) -> None:
        """So many steps, each with its call of the manager."""
        for _ in range(steps):
            self.progress.step += 1
            self.progress.tokens += 12
            torch.manual_seed(self.progress.step)
            self.optimizers.zero_grad()
            self.model(torch.randn(4, 6)).square().mean().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.manager.save(self.progress.step)

    def state(self) -> list[torch.Tensor]:
        """Everything that a resumed run has to have again, this rank's part."""
        found = [p.to_local().detach().clone() for p in self.model.parameters()]
        for optimizer in self.optimizers:
            for of_parameter in optimizer.state.values():
                for value in of_parameter.values():
                    local = value.to_local() if hasattr(value, "to_local") else value
                    found.append(local.detach().clone())
        rates = [rate for scheduler in self.schedulers for rate in scheduler.get_last_lr()]
        return [*found, torch.tensor(rates), torch.tensor(self.progress.step), self.progress.tokens]


def train_and_resume(folder: str, mode: str) -> None:
    """Train, and resume as torchtitan does after a failure: by its folder alone."""
    first = Run(folder, mode, seed=0)
    first.train(STEPS)
    first.manager.maybe_wait_for_saving()
    first.manager.close()
    dist.barrier()
    second = Run(folder, mode, seed=1)
    assert second.manager.load()
    for a, b in zip(first.state(), second.state(), strict=True):
        assert torch.equal(a, b), (a, b)
    first.train(1)
    second.train(1)
    for a, b in zip(first.state(), second.state(), strict=True):
        assert torch.equal(a, b), (a, b)
    second.manager.close()
    assert second.progress.step == STEPS + 1
    dist.barrier()


def main() -> None:
    """One run after the other."""
    shardstore.dcp.install()
    dist.init_process_group("gloo")
    for folder, mode in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        train_and_resume(folder, mode)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
