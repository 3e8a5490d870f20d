"""Lightning's Trainer with FSDP1 or FSDP2: a run that is resumed from a checkpoint ends as the
unbroken one does.

torchrun --nproc-per-node=2 lightning_trainer.py FSDP1|FSDP2 FOLDER

With the variable STORE_OPTIONS, which may be empty, by a strategy of ``shardstore.lightning``, and
else by Lightning's own over ``install``. On the CPU, with what lightning_fsdp1.py says of FSDP1: a
subclass of the strategy, and layers that the module wraps itself.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

import shardstore.dcp
import shardstore.lightning

STEPS = 4
KIND, FOLDER = sys.argv[1:]


class OnCpu(FSDPStrategy):
    """The strategy, under a class that the Trainer lets run on the CPU."""


class Module(LightningModule):
    """Two layers, trained with momentum and a learning rate that falls."""

    def configure_model(self) -> None:
        """The layers, wrapped for the CPU."""
        if hasattr(self, "layers"):
            return
        layers = [torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)]
        if KIND == "FSDP2":
            self.layers = torch.nn.Sequential(*layers)
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
            return
        cpu = torch.device("cpu")
        wrapped = (
            FullyShardedDataParallel(layer, use_orig_params=True, device_id=cpu) for layer in layers
        )
        self.layers = torch.nn.Sequential(*wrapped)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        """SGD with momentum."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                "interval": "step",
            },
        }


def made() -> Any:
    """A strategy."""
    kind, options = {
        "FSDP1": (OnCpu, {"state_dict_type": "sharded"}),
        "FSDP2": (ModelParallelStrategy, {"data_parallel_size": 2, "tensor_parallel_size": 1}),
    }[KIND]
    if "STORE_OPTIONS" in os.environ:
        kind = shardstore.lightning.with_storage(kind)
        options["storage_options"] = json.loads(os.environ["STORE_OPTIONS"] or "{}")
        options["asynchronous"] = "ASYNCHRONOUS" in os.environ
    return kind(**options)


def fitted(seed: int, folder: str, stop: int, resume: str | None) -> tuple[Trainer, Module]:
    """A module after so many steps of training, one an epoch; the last of them stays saved."""
    callback = ModelCheckpoint(folder, "{step}", save_top_k=1, every_n_epochs=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=made(),
        max_epochs=stop,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(seed)
    module = Module()
    data = torch.linspace(-1.0, 1.0, 8 * 6).sin().reshape(8, 6)
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=resume)
    assert trainer.global_step == stop
    return trainer, module


def parts(trainer: Trainer, module: Module) -> list[torch.Tensor]:
    """This rank's part of the parameters, and of the optimizer's state."""
    (optimizer,) = trainer.optimizers
    found = []
    for parameter in module.parameters():
        own = optimizer.state[parameter]
        found += [parameter.detach(), *(own[name] for name in sorted(own))]
    return found


def main() -> None:
    """Train without a break, and again from the second step."""
    if "STORE_OPTIONS" not in os.environ:
        shardstore.dcp.install(asynchronous="ASYNCHRONOUS" in os.environ)
    unbroken = parts(*fitted(0, f"{FOLDER}/unbroken", STEPS, None))
    fitted(0, f"{FOLDER}/broken", 2, None)
    resumed = parts(*fitted(1, f"{FOLDER}/resumed", STEPS, f"{FOLDER}/broken/step=2.ckpt"))
    for a, b in zip(unbroken, resumed, strict=True):
        assert torch.equal(a, b), (a, b)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # waits for a save in the background
    # All is shown. Of processes that go on to the interpreter's end some are aborted there, after
    # all of Python is gone, by a thread of PyTorch's that nobody ended.
    os._exit(0)
