"""A small GPT of Megatron-Core's own classes on gloo ranks: saved and loaded by its own calls.

The ranks are forked from a process that has imported Megatron-Core and torch and has used neither
TensorStore nor a thread. Runs with any megatron-core on PYTHONPATH::

    python gpt.py '{"tp": 2, "pp": 2, "install": "zarr", "actions": [["save", DIR, {}], ...]}'

``install`` names the format that this package is installed with before Megatron-Core is imported,
or with ``late`` after it; without it Megatron-Core saves and loads by itself, and this package need
not be there. Actions are ``save``, ``save_async`` and ``load``, each with a folder and keywords.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
CONTENT = {"distrib_optim_sharding_type": "dp_reshardable", "note": "of a test"}


def build(tp: int, pp: int) -> Any:
    """This rank's part of a model, for a layout of tensor and pipeline parallel ranks."""
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
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=96,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


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
    lengths = tensor.global_shape[tensor.prepend_axis_num :]
    offsets = tensor.global_offset[tensor.prepend_axis_num :]
    found = torch.tensor(zlib.crc32(tensor.key.encode()) % 1009)
    found = found + sum(tensor.global_offset[: tensor.prepend_axis_num]) * 17
    shape = tensor.local_shape
    for axis, (offset, _) in enumerate(zip(offsets, lengths, strict=True)):
        along = (torch.arange(shape[axis]) + offset) * (7 + 6 * axis)
        found = found + along.reshape([-1 if axis == i else 1 for i in range(len(shape))])
    return (found % 251 - 125).to(tensor.dtype)


def save_in_background(state: dict[str, Any], place: str, options: dict[str, Any]) -> None:
    """Save by Megatron-Core's queue, and change the state meanwhile."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    options = {**options, "async_sharded_save": True, "content_metadata": CONTENT}
    queue = AsyncCallsQueue(persistent=False)
    queue.schedule_async_request(dist_checkpointing.save(state, place, **options))
    with torch.no_grad():
        for tensor in tensors_of(state["model"]):
            tensor.data.zero_()
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(blocking=False)
    queue.close()


def one_rank(rank: int, task: dict[str, Any], meet: str) -> None:
    """What each rank does; ``meet`` is a file that the ranks find each other by."""
    torch.set_num_threads(1)
    world = task["tp"] * task["pp"] * task.get("dp", 1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    from megatron.core import dist_checkpointing

    model = build(task["tp"], task["pp"])
    for action, place, options in task["actions"]:
        sharded = model.sharded_state_dict(metadata={})
        tensors = list(tensors_of(sharded))
        assert len(tensors) > 10
        state = {"model": sharded, "iteration": 7, "rank_of_writer": 0}
        with torch.no_grad():
            for tensor in tensors:
                tensor.data.copy_(tensor.data * 0 if action == "load" else expected(tensor))
        if action == "save":
            dist_checkpointing.save(state, place, content_metadata=CONTENT, **options)
        elif action == "save_async":
            save_in_background(state, place, options)
        else:
            loaded = dist_checkpointing.load(state, place, **options)
            assert loaded["iteration"] == 7
            assert dist_checkpointing.load_content_metadata(preloaded_state_dict=loaded) == CONTENT
            model.load_state_dict(loaded["model"])
            for tensor in tensors_of(model.sharded_state_dict(metadata={})):
                assert torch.equal(tensor.data, expected(tensor)), tensor
        dist.barrier()
    dist.destroy_process_group()


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
