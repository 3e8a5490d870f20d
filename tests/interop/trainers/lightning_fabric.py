"""Lightning's Fabric with FSDP2: saves and loads a model, an optimizer and a step.

torchrun --nproc-per-node=2 lightning_fabric.py PLACE [resume]

With the variable STORE_OPTIONS, which may be empty, by a strategy of ``shardstore.lightning``, and
else by Lightning's own over ``install``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

import shardstore.dcp
import shardstore.lightning


def parallelize(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """FSDP2 over all ranks."""
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def made(fabric: Fabric, seed: int) -> tuple[Any, Any]:
    """A model and its optimizer, set up by Fabric."""
    torch.manual_seed(seed)
    model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))


def step(fabric: Fabric, model: Any, optimizer: Any, number: int) -> None:
    """One step of training on data of its number."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    fabric.backward(model(torch.randn(4, 6)).square().mean())
    optimizer.step()


def parts(model: Any) -> list[torch.Tensor]:
    """This rank's part of the parameters."""
    return [p.to_local().detach().clone() for p in model.parameters()]


def averaged(model: Any, factor: float) -> dict[str, Any]:
    """Weights beside those of the model, as of an average, with other values."""
    return {"decay": factor, "weights": {k: v * factor for k, v in model.state_dict().items()}}


def main() -> None:
    """Save twice to one place, resume from it, and go on as the unbroken run does."""
    place = f"{sys.argv[1]}/last.ckpt"
    how: dict[str, Any] = {"asynchronous": "ASYNCHRONOUS" in os.environ}
    kind: Any = ModelParallelStrategy
    if "STORE_OPTIONS" in os.environ:
        kind = shardstore.lightning.with_storage(kind)
        how["storage_options"] = json.loads(os.environ["STORE_OPTIONS"] or "{}")
    else:
        shardstore.dcp.install(**how)
        how = {}
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = kind(parallelize, data_parallel_size=ranks, tensor_parallel_size=1, **how)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model, optimizer = made(fabric, 0)
    if sys.argv[2:] == ["resume"]:
        state = {"model": model, "optimizer": optimizer, "step": -1, "mean": averaged(model, 0)}
        assert fabric.load(place, state) == {}
        mean = state["mean"]
        assert state["step"] == mean["decay"] == 2
        stored = shardstore.open(place, storage_options=how["storage_options"])
        for name, one in model.state_dict().items():
            assert torch.equal(one.full_tensor(), torch.from_numpy(stored[f"model.{name}"][...]))
            assert torch.equal(mean["weights"][name].full_tensor(), 2 * one.full_tensor())
        return
    for number in (1, 2):
        step(fabric, model, optimizer, number)
        state = {"model": model, "optimizer": optimizer, "step": number}
        # Lightning's own strategy keeps the part of rank 0 alone.
        mean = averaged(model, 2) if "STORE_OPTIONS" in os.environ else {}
        fabric.save(place, {**state, "mean": mean})
    again, its_optimizer = made(fabric, 1)
    step(fabric, again, its_optimizer, 7)
    state = {"model": again, "optimizer": its_optimizer, "step": -1}
    if "STORE_OPTIONS" in os.environ:
        state["mean"] = averaged(again, 0)
    fabric.load(place, state)
    assert state["step"] == 2
    for name, one in state.get("mean", {}).get("weights", {}).items():
        assert torch.equal(one.to_local(), 2 * model.state_dict()[name].to_local())
    for _ in range(2):
        for a, b in zip(parts(model), parts(again), strict=True):
            assert torch.equal(a, b), (a, b)
        step(fabric, model, optimizer, 3)
        step(fabric, again, its_optimizer, 3)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # waits for a save in the background
    # All is shown. Of processes that go on to the interpreter's end some are aborted there, after
    # all of Python is gone, by a thread of PyTorch's that nobody ended.
    os._exit(0)
