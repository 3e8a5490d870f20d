"""Runs of torchtitan's components with this package's checkpoint manager, one after the other.

torchrun --nproc-per-node=N titan_manager.py RUN [RUN ...]

Each argument is a JSON object, see :class:`Asked`. Rank 0 prints a JSON object for each run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchtitan.components import checkpointer as torchtitan
from torchtitan.components.checkpointer.base import purge_thread
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import default_adamw
from torchtitan.config import Function

import shardstore.dcp
import shardstore.torchtitan


@dataclass
class Asked:
    """One run.

    Attributes:
        steps: the step to train to.
        layout: how the model is distributed: ``"fsdp"``, ``"tp"`` or ``"none"``; ``"stages"``: each
            rank has other layers, as in a pipeline.
        config: options of the manager.
        base: the manager's base folder.
        manager: ``"shardstore"``, or ``"torchtitan"`` for its own manager.
        installed: whether DCP uses this package, see ``shardstore.dcp.install``.
        seed: seed of the first weights.
        load_step: the step to load; -1: the newest.
        last: the step that is the last of the training.
        kill_at: step after whose save all ranks are killed.
        die_in_save: step in whose save rank 1 is killed, before the commit.
        loader: whether torchtitan's data loader gives the batches, others on each rank.
        adapter: whether the model has Hugging Face names.
        refuses: rank whose training state does not accept what is loaded.
        reloads: whether to load again at the end, without a wait for the last save.
        exempt: steps that ``keep_latest_k`` does not delete (main branch).
        seam: whether to use, at the end, what torchtitan's own base class does with the manager's
            storage: find the newest step, load it, delete old steps (main branch).
        expect: text of the error that every rank has to raise.
    """

    steps: int = 0
    layout: str = "fsdp"
    config: dict[str, Any] = field(default_factory=dict)
    base: str = ""
    manager: str = "shardstore"
    installed: bool = False
    seed: int = 0
    load_step: int = -1
    last: int = 0
    kill_at: int = 0
    die_in_save: int = 0
    loader: bool = False
    adapter: bool = False
    refuses: int = -1
    reloads: bool = False
    exempt: list[int] = field(default_factory=list)
    seam: bool = False
    expect: str = ""


class Progress(Stateful):
    """The trainer's own state."""

    def __init__(self, refuses: bool) -> None:
        self.step, self.refuses = 0, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("refused")
        self.step = state_dict["step"]


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """An endless data set of a rank, whose position is part of the state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            yield torch.full((6,), float(self.position + 100 * self.rank)) / 100

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Adapter:
    """Names of another layout, as a model's ``sd_adapter`` has them."""

    hf_assets_path = None
    fqn_to_index_mapping = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{key}": value for key, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {key.removeprefix("model."): value for key, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(path)


def build_model(layout: str) -> torch.nn.Module:
    """A model on a mesh of all ranks."""
    if layout == "stages":
        layers = range(dist.get_rank(), 2, dist.get_world_size())
        stage = {str(number): torch.nn.Linear(6, 6) for number in layers}
        return torch.nn.Sequential(OrderedDict(stage))
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "fsdp":
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        style = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, {"0": style, "1": style})
    return model


class Run:
    """The objects of torchtitan's trainer, and the manager over them."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        torch.manual_seed(asked.seed)
        self.model = build_model(asked.layout)
        optimizer = default_adamw(lr=0.05)
        optimizer.implementation = "for-loop"
        self.optimizers = OptimizersContainer(optimizer, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.progress = Progress(dist.get_rank() == asked.refuses)
        self.counts: dict[str, Any] = {"batches": 0, "seen": torch.zeros(2)}
        rank, size = dist.get_rank(), dist.get_world_size()
        numbers = Numbers(rank)
        self.loader = (
            ParallelAwareDataloader(numbers, rank, size, batch_size=2) if asked.loader else None
        )
        manager = shardstore.torchtitan.CheckpointManager
        kind: Any = manager if asked.manager == "shardstore" else torchtitan.CheckpointManager
        options = dict(asked.config)
        if "enable" in kind.Config.__dataclass_fields__:  # not on the main branch
            options["enable"] = True
        if asked.exempt:
            options["purge_exempt"] = Function.Config(fn=asked.exempt.__contains__)
        self.manager = kind.Config(**options).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress, "counts": self.counts},
            sd_adapter=Adapter() if asked.adapter else None,
            base_folder=asked.base,
        )

    def train(self) -> list[float]:
        """Train to the last step; return the losses, equal on all ranks."""
        losses = []
        batches = None if self.loader is None else iter(self.loader)
        while self.progress.step < self.asked.steps:
            self.progress.step += 1
            self.counts["batches"] += 1
            self.counts["seen"] += 4
            torch.manual_seed(self.progress.step)
            batch = torch.randn(4, 6) if batches is None else next(batches)
            self.optimizers.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
            if self.progress.step == self.asked.die_in_save and dist.get_rank() == 1:
                _die_in_the_next_write()
            self.manager.save(self.progress.step, last_step=self.progress.step == self.asked.last)
            if self.progress.step == self.asked.kill_at:
                self.manager.maybe_wait_for_saving()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
        return losses


def _die_in_the_next_write() -> None:
    """Kill this rank after it has written a part of the checkpoint, before the commit."""
    from shardstore.saving import session

    kind: Any = session.SaveSession

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    kind.finish = die


def one(asked: Asked) -> dict[str, Any]:
    """Do one run; return what rank 0 prints."""
    try:
        run = Run(asked)
        loaded = run.manager.load(asked.load_step)
        found = {"loaded": loaded, "from": run.progress.step, "weight": _whole(run.model)}
        found["counts"] = [run.counts["batches"], *run.counts["seen"].tolist()]
        found["losses"] = run.train()
        found["trained"] = _whole(run.model)
        if asked.reloads:
            run.progress.step = 0
            assert run.manager.load()
            assert run.progress.step == asked.steps
        if asked.seam:
            found["seam"] = _use_the_seam(run)
        if asked.manager == "torchtitan":
            run.manager.maybe_wait_for_saving()
        run.manager.close()
    except Exception as error:
        if not asked.expect or asked.expect not in str(error):
            raise
        return {"error": str(error)}
    assert not asked.expect, "no error"
    return found


def _use_the_seam(run: Run) -> dict[str, Any]:
    """Call torchtitan's own policies, which know the manager by its storage and its hooks alone."""
    manager, base = run.manager, torchtitan.BaseCheckpointManager
    manager.maybe_wait_for_saving()
    manager._steps.close()
    dist.barrier()
    assert isinstance(manager._storage, torchtitan.CheckpointStorage)
    run.progress.step = 0
    with torch.no_grad():
        next(run.model.parameters()).zero_()
    found = {"newest": manager._find_load_step(), "loaded": base.load(manager)}
    found |= {"step": run.progress.step, "weight": _whole(run.model)}
    dist.barrier()
    manager.purge_queue = queue.Queue()
    manager.purge_thread = threading.Thread(
        target=purge_thread, args=(manager.purge_queue, manager._storage.remove)
    )
    manager.purge_thread.start()
    manager._purge_stale_checkpoints(saving_step=1000)
    manager.purge_queue.put(None)
    manager.purge_thread.join()
    dist.barrier()
    return {**found, "names": sorted(manager._storage.listdir(manager.folder))}


def main() -> None:
    """All runs."""
    dist.init_process_group("gloo")
    for text in sys.argv[1:]:
        asked = Asked(**json.loads(text))
        with shardstore.dcp.install() if asked.installed else nullcontext():
            found = one(asked)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def _whole(model: torch.nn.Module) -> list[float]:
    """Return the values of the first parameter, of all ranks."""
    weight: Any = next(model.parameters())
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return weight.detach().flatten().tolist()


if __name__ == "__main__":
    main()
