"""A small GPT of Megatron-Core's own classes on gloo ranks: saved and loaded by its own calls.

The ranks are forked from a process that has imported Megatron-Core and torch and has used neither
TensorStore nor a thread. Runs with any megatron-core on PYTHONPATH::

    python gpt.py '{"tp": 2, "pp": 2, "install": "zarr", "actions": [["save", DIR, {}], ...]}'

``install`` names the format that this package is installed with before Megatron-Core is imported,
or with ``late`` after it; without it Megatron-Core saves and loads by itself, and this package need
not be there. Actions are ``save``, ``save_async`` and ``load``, each with a folder and keywords.
With ``optimizer`` there is a distributed optimizer too.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
CONTENT = {"note": "of a test"}


class OnCpu(TorchFunctionMode):
    """What Megatron-Core does on the device ``cuda`` happens on the CPU, if there is no other."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")  # it asks types of parameters by name
        return found


def build(tp: int, pp: int, **options: Any) -> Any:
    """This rank's part of a model, for a layout of tensor and pipeline parallel ranks.

    ``options`` are further ones of Megatron-Core's ``TransformerConfig``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        gated_linear_unit=True,  # its weights are sharded by a factory
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **options,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=96,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model.bfloat16()


class Adam(torch.optim.Optimizer):
    """Adam with its step beside the state, as Apex and Transformer Engine have it.

    They need CUDA, and Megatron-Core cannot load the state of PyTorch's own.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Change each parameter and its state."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["exp_avg"])


def with_optimizer(model: Any) -> Any:
    """Megatron-Core's distributed optimizer of a model, after a step."""
    import megatron.core.optimizer as optimizers
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    for module in (optimizers, optimizers.distrib_optimizer):
        module.Adam, module.USING_PYTORCH_OPTIMIZER = Adam, False
        module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(model.config, config, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()
    return optimizer


def tensors_of(sharded: dict[str, Any]) -> Iterator[Any]:
    """The sharded tensors of a state dict, those that factories build included."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(sharded):
        if isinstance(value, ShardedTensorFactory):
            yield from tensors_of({"built": value.build()})
        elif isinstance(value, ShardedTensor) and value.data is not None:
            yield value


def expected(tensor: Any) -> torch.Tensor:
    """What a shard holds: whole numbers by its key and the place of each element."""
    # Main parameters have one name in old formats and another in new ones.
    key = tensor.key.replace(".fp32_param.", ".param.")
    offsets = tensor.global_offset
    found = torch.tensor(zlib.crc32(key.encode()) % 1009)
    found = found + sum(offsets[: tensor.prepend_axis_num]) * 17
    shape = tensor.local_shape
    for axis, offset in enumerate(offsets[tensor.prepend_axis_num :]):
        along = (torch.arange(shape[axis]) + offset) * (7 + 6 * axis)
        found = found + along.reshape([-1 if axis == i else 1 for i in range(len(shape))])
    found = (found % 251 - 125).to(tensor.dtype)
    if getattr(tensor, "flattened_range", None) is not None:
        found = found.reshape(-1)[tensor.flattened_range]
    return found


def save_in_background(state: dict[str, Any], place: str, options: dict[str, Any]) -> None:
    """Save by Megatron-Core's queue, and change the state meanwhile."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    options = {**options, "async_sharded_save": True}
    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(dist_checkpointing.save(state, place, **options))
    with torch.no_grad():
        for tensor in tensors_of(state["model"]):
            tensor.data.zero_()
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(blocking=False)
    queue.close()


def state_of(model: Any, optimizer: Any, sharding: str | None, loading: bool) -> dict[str, Any]:
    """The sharded state dict, as Megatron-Core's trainer makes it."""
    metadata = {"distrib_optim_sharding_type": sharding}
    state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        options = {"is_loading": loading, "metadata": metadata}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], **options)
    return {**state, "iteration": 7}


def one_rank(rank: int, task: dict[str, Any], meet: str) -> None:
    """What each rank does; ``meet`` is a file that the ranks find each other by."""
    torch.set_num_threads(1)
    world = task["tp"] * task["pp"] * task.get("dp", 1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    with nullcontext() if torch.cuda.is_available() else OnCpu():
        model = build(task["tp"], task["pp"])
        optimizer = with_optimizer(model) if task.get("optimizer") else None
        for action, place, options in task["actions"]:
            if action == "load":
                load(model, optimizer, place, options)
            else:
                save(model, optimizer, place, options, in_background=action == "save_async")
            dist.barrier()
    dist.destroy_process_group()


def save(
    model: Any, optimizer: Any, place: str, options: dict[str, Any], in_background: bool
) -> None:
    """Fill the state and save it; ``sharding`` among the options is the optimizer's."""
    from megatron.core import dist_checkpointing

    sharding = options.pop("sharding", None)
    content = {**CONTENT, "distrib_optim_sharding_type": sharding}
    if "sharded_strategy" in options:
        options["sharded_strategy"] = tuple(options["sharded_strategy"])
    options = {"content_metadata": None if options.pop("old", False) else content, **options}
    state = state_of(model, optimizer, sharding, loading=False)
    with torch.no_grad():
        for tensor in tensors_of(state):
            tensor.data.copy_(expected(tensor))
    if in_background:
        save_in_background(state, place, options)
    else:
        dist_checkpointing.save(state, place, **options)


def load(model: Any, optimizer: Any, place: str, options: dict[str, Any]) -> None:
    """Load into a state of zeros, hand it to model and optimizer, and compare what they hold."""
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(place) or {}
    sharding = content.get("distrib_optim_sharding_type")
    state = state_of(model, optimizer, sharding, loading=True)
    tensors = list(tensors_of(state))
    assert len(tensors) > 10
    with torch.no_grad():
        for tensor in tensors:
            tensor.data.zero_()
    loaded = dist_checkpointing.load(state, place, **options)
    assert loaded["iteration"] == 7
    model.load_state_dict(loaded["model"])
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    found = list(tensors_of(state_of(model, optimizer, sharding, loading=False)))
    assert len(found) >= len(tensors)
    for tensor in found:
        assert torch.equal(tensor.data, expected(tensor)), tensor


def main() -> None:
    """Command line: the task as JSON."""
    task = json.loads(sys.argv[1])
    if not torch.cuda.is_available():
        # Megatron-Core calls them wherever it runs.
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: torch.device("cpu")
    if task.get("install") and not task.get("late"):
        from shardstore.megatron import install

        install(task["install"])
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401 (once, for all ranks)

    if task.get("late"):
        from shardstore.megatron import install

        install(task["install"])
    for _, place, _ in task["actions"]:
        Path(place).mkdir(parents=True, exist_ok=True)
    world = task["tp"] * task["pp"] * task.get("dp", 1)
    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(one_rank, (task, f"{scratch}/meet"), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
