"""torchtitan's own Trainer on CPUs: its debug model of llama 3, with this package's manager.

torchrun --nproc-per-node=N titan_trainer.py FOLDER STEPS SHARDS TENSOR_PARALLEL

Prints the losses on rank 0. torchtitan supports no CPUs: the device type, the device's memory
statistics, the attention and two calls that gloo refuses are replaced.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._utils


def use_cpus() -> None:
    """Make torchtitan use CPUs."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # Kernels for triton, which has none for CPUs and is not installed.
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30)
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.memory_stats = lambda *_: {}


use_cpus()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry, model_registry  # noqa: E402

import shardstore.torchtitan  # noqa: E402


def attend(q: Any, k: Any, v: Any, **how: Any) -> tuple[torch.Tensor, None]:
    """Causal attention, in place of FlexAttention, which has no backward pass on CPUs."""
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, is_causal=True, enable_gqa=how["enable_gqa"]), None


FlexAttention.compiled_flex_attn = staticmethod(attend)
utils.set_pg_timeouts = lambda **_: None  # its barrier names devices, which gloo refuses


class Tokens(torch.utils.data.IterableDataset[Any]):
    """Sequences of tokens that depend on the rank and the position, which is saved."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.position = rank, length, 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
            tokens = torch.randint(0, 2048, (self.length + 1,), generator=generator)
            positions = torch.arange(self.length)
            yield {"input": tokens[:-1], "positions": positions}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Loader(ParallelAwareDataloader):
    """torchtitan's data loader over these tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **about: Any) -> None:
        tokens = Tokens(dp_rank, about["seq_len"])
        super().__init__(tokens, dp_rank, dp_world_size, batch_size=about["local_batch_size"])


class Tokenizer(BaseTokenizer):
    """No text is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def main(folder: str, steps: int, shards: int, tensor_parallel: int) -> None:
    """Build the trainer from its configuration, and train."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.dump_folder = folder
    config.tokenizer, config.dataloader = Tokenizer.Config(), Loader.Config()
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.total_steps = 10
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps, config.training.disable_cuda_graphs = steps, True
    config.training.mixed_precision_param = "float32"
    config.parallelism.data_parallel_shard_degree = shards
    config.parallelism.tensor_parallel_degree = tensor_parallel
    config.parallelism.spmd_backend = "full_dtensor"
    config.debug.seed = 0
    options: Any = shardstore.torchtitan.CheckpointManager.Config
    enabled = {"enable": True} if "enable" in options.__dataclass_fields__ else {}
    config.checkpoint = options(
        **enabled, interval=2, async_mode="async", last_save_model_only=False
    )
    if tensor_parallel > 1:
        config.checkpoint.exclude_from_loading = ["dataloader"]
    trainer = config.build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):  # gloo reduces by sums only
            module.set_force_sum_reduction_for_comms(True)
    losses, log = [], trainer.metrics_processor.log

    def keep(step: int, loss: float, *others: Any, **more: Any) -> None:
        losses.append(loss)
        log(step, loss, *others, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(losses))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
