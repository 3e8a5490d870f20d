"""Lightning's Fabric with its older strategy, FSDP1: saves and loads a model, an optimizer and a
step, and makes one file of them by Lightning's own program.

torchrun --nproc-per-node=2 lightning_fsdp1.py FOLDER

Lightning and FSDP1 want an accelerator. Two things are stepped around on the CPU: Fabric refuses
the class of the strategy there, but not a subclass; and the model is wrapped here, which Lightning
leaves as it is, because the strategy would not give FSDP1 the CPU as its device. What saves and
loads is Lightning's and PyTorch's as it is.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardstore.dcp


class OnCpu(FSDPStrategy):
    """The strategy, under a class that Fabric lets run on the CPU."""


def made(fabric: Fabric, seed: int) -> dict[str, Any]:
    """A model, its optimizer and a step, as Fabric is given them."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    wrapped = FullyShardedDataParallel(
        layers,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model = fabric.setup(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return {"model": model, "optimizer": fabric.setup_optimizers(optimizer), "step": 0}


def train(fabric: Fabric, state: dict[str, Any], *numbers: int) -> None:
    """Steps of training, each on data of its number."""
    for number in numbers:
        torch.manual_seed(2 * number + fabric.global_rank)
        state["optimizer"].zero_grad()
        fabric.backward(state["model"](torch.randn(4, 6)).square().mean())
        state["optimizer"].step()
        state["step"] = number


def parts(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """This rank's part of the parameters, and of the optimizer's state."""
    for parameter in state["model"].parameters():
        yield parameter.detach()
        own = state["optimizer"].state[parameter]
        yield from (own[name] for name in sorted(own))


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one["step"] == other["step"]
    for a, b in zip(parts(one), parts(other), strict=True):
        assert torch.equal(a, b), (a, b)


def main() -> None:
    """Save to a place that DCP saved to, resume from either, and go on as the unbroken run does."""
    place = Path(sys.argv[1]) / "last.ckpt"
    fabric = Fabric(accelerator="cpu", devices=2, strategy=OnCpu())
    fabric.launch()
    unbroken = made(fabric, 0)
    train(fabric, unbroken, 1)
    fabric.save(place, unbroken)  # by DCP's own storage
    shardstore.dcp.install(asynchronous="ASYNCHRONOUS" in os.environ)
    resumed = made(fabric, 1)
    train(fabric, resumed, 7)
    fabric.load(place, resumed)
    require_same(resumed, unbroken)
    for number in (2, 3):
        train(fabric, resumed, number)
        fabric.save(place, resumed)
    again = made(fabric, 2)
    train(fabric, again, 8)
    fabric.load(place, again)
    train(fabric, unbroken, 2, 3)
    require_same(again, unbroken)

    one_file = place.with_name("one_file.pt")
    if fabric.is_global_zero:
        sys.argv[1:] = [str(place), "--output_file", str(one_file)]
        runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    fabric.barrier()
    last = made(fabric, 3)
    fabric.load(one_file, last)
    for state in (unbroken, again, last):
        train(fabric, state, 4)
        require_same(state, unbroken)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # waits for a save in the background
    # All is shown. Of processes that go on to the interpreter's end some are aborted there, after
    # all of Python is gone, by a thread of PyTorch's that nobody ended.
    os._exit(0)
