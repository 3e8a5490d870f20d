"""Megatron-Bridge's own saves and loads of a small GPT, through this package's manager.

``without_cuda`` on PYTHONPATH lets Bridge 0.3.1 run on the CPU. What 0.3.1 lacks stands here as
later releases have it: the option ``custom_manager_class``, the contexts, and the call that makes
the manager. The program uses Bridge's own where it has them. Each argument is a run, as JSON::

    torchrun --nproc-per-node 2 bridge_manager.py '{"save": DIR, "load": DIR, "step": 2}' ...

Rank 0 prints what each run found.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt
import megatron.core.distributed
import megatron.core.optimizer
import torch
import torch.distributed as dist
import yaml
from megatron.bridge.training import checkpointing, config, state
from megatron.bridge.utils import instantiate_utils
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

import shardstore.bridge

ALLOWED: list[str] = []
FACTORY = getattr(checkpointing, "create_checkpoint_manager", None)
if FACTORY is None:
    instantiate_utils.register_allowed_target_prefix = ALLOWED.append


@dataclass
class CheckpointConfig(config.CheckpointConfig):
    """Bridge's options, with the one that 0.3.1 does not have."""

    custom_manager_class: str | None = None


@dataclass
class LoadContext:
    """The fields of ``CheckpointLoadContext``."""

    state: Any
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any = None
    strict: bool = True
    skip_load_to_model_and_opt: bool = False
    pg_collection: Any = None
    module_name: str | None = None


@dataclass
class SaveContext:
    """The fields of ``CheckpointSaveContext``."""

    state: Any
    model: list[Any]
    optimizer: Any
    opt_param_scheduler: Any = None
    num_floating_point_operations_so_far: int = 0
    train_data_iterator: Any = None
    non_persistent_ckpt: bool = False
    pg_collection: Any = None
    module_name: str | None = None


def created(chosen: Any) -> Any:
    """The manager that the configuration names, made as ``create_checkpoint_manager`` makes it."""
    if FACTORY is not None:
        return FACTORY(chosen)
    module, _, name = chosen.custom_manager_class.rpartition(".")
    assert any(f"{module}.".startswith(prefix) for prefix in ALLOWED)
    manager = getattr(importlib.import_module(module), name)(chosen)
    for method in ("save", "load", "finalize_async_saves"):
        assert callable(getattr(manager, method))
    return manager


def training(chosen: Any, asked: dict[str, Any]) -> Any:
    """What Bridge keeps of a training."""
    layout = {
        "tensor_model_parallel_size": asked.get("tp", 1),
        "pipeline_model_parallel_size": asked.get("pp", 1),
    }
    options = {
        name: getattr(chosen, name) for name in ("save_optim", "save_rng", "fully_parallel_save")
    }

    def to_yaml(path: str) -> None:
        Path(path).write_text(yaml.safe_dump({"model": layout, "checkpoint": options}))

    cfg = SimpleNamespace(
        checkpoint=chosen,
        rng=SimpleNamespace(data_parallel_random_init=False),
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        model=SimpleNamespace(**layout),
        logger=SimpleNamespace(log_progress=False),
        dataset=None,
        dist=None,
        peft=None,
        to_yaml=to_yaml,
    )
    queue = None
    if chosen.async_save:
        queue = state.AsyncCallsQueue(persistent=chosen.use_persistent_ckpt_worker)
    return SimpleNamespace(
        cfg=cfg,
        train_state=state.TrainState(),
        async_calls_queue=queue,
        rank_monitor_client=None,
        fault_tolerance_state=state.FaultToleranceState(),
        wandb_logger=None,
        mlflow_logger=None,
    )


def data_of(value: Any) -> Any:
    """A sharded tensor's data, and everything else as it is."""
    return value.data if hasattr(value, "replica_id") and hasattr(value, "data") else value


def one_run(asked: dict[str, Any]) -> dict[str, Any]:
    """Load, compare, change everything and save."""
    if "here" in asked:  # each rank has a disk of its own
        here = Path(asked["here"], str(dist.get_rank()))
        here.mkdir(parents=True, exist_ok=True)
        os.chdir(here)
    options = {"ckpt_format": "torch_dist", "load_rng": False, **asked.get("options", {})}
    options |= {"dist_ckpt_optim_fully_reshardable": True}
    chosen = CheckpointConfig(save=asked.get("save"), load=asked.get("load"), **options)
    shardstore.bridge.use(chosen)
    manager = created(chosen)
    own = training(chosen, asked)
    megatron.core.parallel_state.destroy_model_parallel()
    model = gpt.build(asked.get("tp", 1), asked.get("pp", 1))
    optimizer = gpt.with_optimizer(model)
    of_load = getattr(checkpointing, "CheckpointLoadContext", LoadContext)
    of_save = getattr(checkpointing, "CheckpointSaveContext", SaveContext)
    found, operations = manager.load(of_load(own, [model], optimizer, None))
    sharded = gpt.state_of(model, optimizer, "fully_reshardable", loading=False)
    with torch.no_grad():
        for tensor in gpt.tensors_of(sharded):
            if found:
                assert torch.equal(tensor.data, gpt.expected(tensor) + found), tensor
    answer = {"from": found, "operations": int(operations), "step": own.train_state.step}
    for step in asked.get("steps", ()):
        with torch.no_grad():
            for tensor in gpt.tensors_of(sharded):
                tensor.data.copy_(gpt.expected(tensor) + step)
        # What is gathered is a copy of the optimizer's state.
        optimizer.load_state_dict(dict_list_map_outplace(data_of, sharded["optimizer"]))
        own.train_state.step = step
        own.train_state.consumed_train_samples = 4 * step
        manager.save(of_save(own, [model], optimizer, None, 1000 * step), None)
        if asked.get("die_at") == step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            for tensor in gpt.tensors_of(sharded):
                tensor.data.zero_()  # a save in the background has its own copy
        own.train_state.step = step + 1  # training goes on meanwhile
        if asked.get("abandon"):
            return answer
        manager.finalize_async_saves(own, blocking=True)
    manager.finalize_async_saves(own, blocking=True, terminate=True)
    return answer


def main() -> None:
    """All runs, one after another."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    init_num_microbatches_calculator(dist.get_rank(), None, 4, 1, 1)
    for asked in map(json.loads, sys.argv[1:]):
        answer: dict[str, Any]
        try:
            answer = one_run(asked)
        except Exception as error:
            if asked.get("expect", "no error") not in str(error):
                raise
            answer = {"error": f"{type(error).__name__}: {error}"}
        if dist.get_rank() == 0:
            os.write(1, f"{json.dumps(answer)}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
