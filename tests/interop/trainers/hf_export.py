"""A tiny model of transformers, trained under FSDP2 and tensor parallelism, is exported by all
ranks, and loaded by transformers.

torchrun hf_export.py PLACE
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shardstore import hf

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def main() -> None:
    """Train three steps, export, and compare the logits."""
    (place,) = sys.argv[1:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=34,
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        ids = torch.randint(0, 34, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=ids.chunk(2)[mesh.get_local_rank("dp")]).logits.square().mean()
        loss.backward()
        optimizer.step()
    files = {"config.json": model.config.to_json_string(use_diff=False)}
    state = model.state_dict()
    cut = {str(value.placements) for value in state.values() if isinstance(value, DTensor)}
    assert len(cut) >= 3, cut
    hf.save(state, f"{place}/now", file_bytes=4000, files=files)
    later = hf.async_save(state, f"{place}/later", files=files)
    ids = torch.arange(24).reshape(4, 6)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    later.result()
    if dist.get_rank() == 0:
        assert len([name for name in os.listdir(f"{place}/now") if "-of-" in name]) > 3
        for name in ("now", "later"):
            loaded = AutoModelForCausalLM.from_pretrained(f"{place}/{name}").eval()
            with torch.no_grad():
                torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
            for key, value in loaded.state_dict().items():
                assert value.isfinite().all(), key
        print("equal logits")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
