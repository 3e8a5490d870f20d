"""Megatron-Core's trainer as far as it runs without CUDA, with a small GPT and its optimizer.

Its arguments, ``save_checkpoint`` and ``load_checkpoint``. It knows nothing of this package::

    torchrun --nproc-per-node 2 -m shardstore.megatron trainer.py --load DIR --save DIR ...

Loads what is below ``--load``, if anything is, and compares it; saves iteration 100 below
``--save``.
"""

from __future__ import annotations

import os
import typing
from contextlib import nullcontext
from typing import Any

import gpt
import torch
import torch.distributed as dist
import typing_extensions

# Its wheel is for Python 3.12.
typing.override = typing_extensions.override

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)
from megatron.training import checkpointing, global_vars  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402
from megatron.training.async_utils import maybe_finalize_async_save  # noqa: E402


def data_of(value: Any) -> Any:
    """A sharded tensor's data, and everything else as it is."""
    return value.data if isinstance(value, ShardedTensor | ShardedTensorFactory) else value


def main() -> None:
    """One rank."""
    args = parse_args()
    args.use_dist_ckpt, args.iteration = True, 100
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    global_vars.set_args(args)
    if not torch.cuda.is_available():
        torch.cuda.get_rng_state = torch.get_rng_state
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group("gloo")
    init_num_microbatches_calculator(dist.get_rank(), None, 4, 1, 1)
    with nullcontext() if torch.cuda.is_available() else gpt.OnCpu():
        model = gpt.build(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
        optimizer = gpt.with_optimizer(model)
        found, _ = checkpointing.load_checkpoint([model], optimizer, None, checkpointing_context={})
        state = gpt.state_of(model, optimizer, "fully_reshardable", loading=False)
        with torch.no_grad():
            for tensor in gpt.tensors_of(state):
                if found:
                    assert torch.equal(tensor.data, gpt.expected(tensor)), tensor
                tensor.data.copy_(gpt.expected(tensor))
        # What is gathered is a copy of the optimizer's state.
        optimizer.load_state_dict(dict_list_map_outplace(data_of, state["optimizer"]))
        if args.save:
            checkpointing.save_checkpoint(100, [model], optimizer, None, 0, {})
            maybe_finalize_async_save(blocking=True, terminate=True)
    os.write(1, f"found {found} {ShardedTensor.__module__}\n".encode())  # ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
