"""Trains a model in float8 with torchao under FSDP2, and saves and loads its weights.

torchrun torchao_weights.py FOLDER. Rank 0 prints the class of the weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import shardstore
from shardstore import hf
from shardstore.dcp import StorageReader, StorageWriter


def model_of(seed: int, *, sharded: bool) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).to(torch.bfloat16)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    if sharded:
        fully_shard(model)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    torch.manual_seed(7 + dist.get_rank())
    loss = model(torch.randn(16, 32, dtype=torch.bfloat16)).float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    precompute_float8_dynamic_scale_for_fsdp(model)
    return loss.item()


def values_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The values of weights, sharded or not."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value) + 0
        for name, value in state.items()
    }


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    model = model_of(0, sharded=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    saved = values_of(model_state)
    state = {"model": model_state, "optimizer": optimizer_state}
    shardstore.async_save(state, folder / "own").result()
    dcp.save(state, storage_writer=StorageWriter(folder / "dcp"))
    hf.save(model_state, folder / "hf")
    expected = train(model, optimizer)

    def read_by_dcp(given: dict[str, Any]) -> None:
        dcp.load(given, storage_reader=StorageReader(folder / "dcp"))

    loads = (lambda given: shardstore.load(given, folder / "own"), read_by_dcp)
    for load in loads:
        other = model_of(1, sharded=True)
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
        model_state, optimizer_state = get_state_dict(other, optimizer)
        load({"model": model_state, "optimizer": optimizer_state})
        set_state_dict(
            other, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )
        assert all(map(torch.equal, values_of(other.state_dict()).values(), saved.values()))
        assert train(other, optimizer) == expected
    for sharded in (True, False):
        other = model_of(2, sharded=sharded)
        hf.load(other.state_dict(), folder / "hf")
        assert all(map(torch.equal, values_of(other.state_dict()).values(), saved.values()))
    shardstore.load({"model": model_of(3, sharded=False).state_dict()}, folder / "own")
    if dist.get_rank() == 0:
        print(type(other[0].weight.data).__name__)
    dist.destroy_process_group()


main()
