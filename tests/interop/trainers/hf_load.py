"""Models that save_pretrained wrote are loaded under tensor and expert parallelism, and give the
logits of from_pretrained.

torchrun hf_load.py FOLDER; each model is written to a folder below FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from shardstore import hf
from shardstore.hf.rules import concat, stack

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: dict[str, Any] = {**COMMON, "head_dim": 8, "num_experts_per_tok": 2}
EXPERTS = "model.layers.{layer}.mlp.experts"
RULES = {
    f"{EXPERTS}.gate_up_proj": stack(
        concat(f"{EXPERTS}.{{e}}.gate_proj.weight", f"{EXPERTS}.{{e}}.up_proj.weight"), over="e"
    ),
    f"{EXPERTS}.down_proj": stack(f"{EXPERTS}.{{e}}.down_proj.weight", over="e"),
}
IDS = torch.arange(24).reshape(2, 12)


def written(place: Path, config: Any) -> torch.Tensor:
    """Write a model in several files; return its logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if dist.get_rank() == 0:
        model.save_pretrained(place, max_shard_size="20KB")
        assert len(list(place.glob("*.safetensors"))) > 1
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(place).eval()
    return logits(read)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def other(config: Any) -> Any:
    """A model with other weights."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


def tensor_parallel(place: Path, mesh: DeviceMesh) -> None:
    """With tied embeddings, of which one is stored."""
    config = Qwen2Config(**COMMON, tie_word_embeddings=True)
    expected, model = written(place, config), other(config)
    rows, columns = ColwiseParallel(), RowwiseParallel()
    plan = {f"self_attn.{name}_proj": rows for name in "qkv"}
    plan |= {"self_attn.o_proj": columns, "mlp.down_proj": columns}
    plan |= {"mlp.gate_proj": rows, "mlp.up_proj": rows}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    state = model.state_dict()
    assert sum(isinstance(value, DTensor) for value in state.values()) == 20
    hf.load(state, place, strict="raise_all")
    torch.testing.assert_close(logits(model), expected)


def expert_parallel(place: Path, mesh: DeviceMesh, config: Any, rules: Any) -> None:
    """Each rank has half of the experts of each layer."""
    expected, model = written(place, config), other(config)
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    state = model.state_dict()
    sharded = {
        key: distribute_tensor(value, mesh, [Shard(0)])
        for key, value in state.items()
        if ".mlp.experts." in key
    }
    assert sharded
    hf.load({**state, **sharded}, place, rules=rules, strict="raise_all")
    for number, layer in enumerate(model.model.layers):
        for name, _ in list(layer.mlp.experts.named_parameters()):
            held = sharded[f"model.layers.{number}.mlp.experts.{name}"].to_local()
            setattr(layer.mlp.experts, name, torch.nn.Parameter(held))
        spread(layer.mlp.experts, mesh, layer.mlp.experts.down_proj.shape[0])
    torch.testing.assert_close(logits(model), expected)


def spread(experts: Any, mesh: DeviceMesh, count: int) -> None:
    """Make the experts of this rank add their part to the result of all."""
    first, forward = count * mesh.get_local_rank(), experts.forward
    experts.num_experts = count

    def own(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        here = (chosen >= first) & (chosen < first + count)
        part = forward(hidden, (chosen - first).clamp(0, count - 1), weights * here)
        dist.all_reduce(part)
        return part

    experts.forward = own


def main() -> None:
    dist.init_process_group("gloo")
    folder, mesh = Path(sys.argv[1]), init_device_mesh("cpu", (2,))
    tensor_parallel(folder / "qwen2", mesh)
    moe = Qwen3MoeConfig(**MOE, moe_intermediate_size=24, num_experts=4, decoder_sparse_step=1)
    expert_parallel(folder / "qwen3-moe", mesh, moe, RULES)
    oss = GptOssConfig(**MOE, num_local_experts=4)
    expert_parallel(folder / "gpt-oss", mesh, oss, None)
    dist.destroy_process_group()
    print("equal logits")


if __name__ == "__main__":
    main()
