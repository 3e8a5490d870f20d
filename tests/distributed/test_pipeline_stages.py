"""FSDP2 in each of two pipeline stages: no mesh contains all ranks, and what ``shard`` makes for a
save or a load is right for whichever ranks call it, again and again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardstore
from shardstore import CheckpointManager, ShardedTensor
from shardstore.mapping import ShardedTensorFactory
from shardstore.strategies.zarr import ZarrSaveShardedStrategy

WORLD = 4
SIZE = 6
Made = tuple[dict[str, nn.Module], torch.optim.Optimizer]


def trained(rank: int, steps: int, *, stages: bool = True) -> Made:
    """The layers of this rank's stage (or all of them, on all ranks), after some steps, and the
    embedding that both stages hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    layers: dict[str, nn.Module] = {}
    for number in (0, 1) if not stages else (rank // 2,):
        torch.manual_seed(number)
        layers[f"layer{number}"] = nn.Sequential(nn.Linear(SIZE, 7), nn.Linear(7, SIZE))
    torch.manual_seed(9)
    layers["tied"] = nn.Embedding(5, SIZE)
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp"] if stages else init_device_mesh("cpu", (WORLD,)))
    modules = nn.ModuleDict(layers)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.1)
    for _ in range(steps):
        for name, layer in layers.items():
            given = torch.arange(5) if name == "tied" else torch.ones(3, SIZE)
            layer(given).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layers, optimizer


def state_of(made: Made) -> dict[str, Any]:
    model, optimizer = get_state_dict(nn.ModuleDict(made[0]), made[1])
    return {"model": model, "optim": optimizer}


def beside(rank: int, scale: float = 1) -> dict[str, Any]:
    """A plain tensor of all ranks, and a factory of each stage."""
    stage = rank // 2

    def build(key: str, tensor: Any, *_: Any) -> dict[str, Any]:
        cut = tensor.chunk(2)
        return {
            str(n): ShardedTensor.from_rank_offsets(key, part, (0, n, 2), replica_id=rank % 2)
            for n, part in enumerate(cut)
        }

    data = scale * (torch.arange(4.0) + stage)
    merge: Callable[[Any], Any] = lambda parts: torch.cat([parts["0"], parts["1"]])  # noqa: E731
    return {
        "everywhere": scale * torch.arange(3.0),
        "made": {f"w{stage}": ShardedTensorFactory(f"made{stage}", data, build, merge)},
    }


def check_beside(rank: int, loaded: dict[str, Any]) -> None:
    stage = rank // 2
    assert loaded["everywhere"].tolist() == [0, 1, 2]
    assert loaded["made"][f"w{stage}"].tolist() == [stage, stage + 1, stage + 2, stage + 3]


def local(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, list):
        return [local(value) for value in state]
    return state.to_local().tolist() if isinstance(state, DTensor) else state


def the_same_program_saves_and_loads(rank: int, folder: Path) -> None:
    saved = {**state_of(trained(rank, 3)), **beside(rank)}
    expected = local(saved)
    for number, way in enumerate(("zarr", "v2", "async", "manager", "strategy", "direct")):
        place = folder / str(number)
        if way == "async":
            shardstore.async_save(shardstore.shard(saved), place).result(60)
        elif way == "manager":
            CheckpointManager(place).save(1, shardstore.shard(saved))
            place = place / "step-1"
        elif way == "strategy":
            place.mkdir(exist_ok=True)
            sharded = {"w": ShardedTensor.from_rank_offsets("x", torch.ones(2), (0, rank, 4))}
            plain = {k: v for k, v in saved.items() if isinstance(v, torch.Tensor)}
            ZarrSaveShardedStrategy("zarr", 2).save({**shardstore.shard(plain), **sharded}, place)
            continue
        else:
            made = saved if way == "direct" else shardstore.shard(saved)
            shardstore.save(made, place, ("zarr", 1 if way == "v2" else 2))
        layers, optimizer = trained(rank, 1)
        wanted = {**state_of((layers, optimizer)), **beside(rank, 0)}
        loaded = shardstore.load(
            wanted if way == "direct" else shardstore.shard(wanted), place, strict="raise_all"
        )
        check_beside(rank, loaded)
        set_state_dict(
            nn.ModuleDict(layers),
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
        )
        again = local(state_of((layers, optimizer)))
        assert again["model"] == expected["model"], way
        assert str(again["optim"]["state"]) == str(expected["optim"]["state"]), way


def one_description_serves_many_saves_and_loads(rank: int, folder: Path) -> None:
    """By all ranks, by the ranks of a stage, and by all ranks again."""
    stages = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = state_of(trained(rank, 2))["model"] | {"plain": torch.arange(3.0)}
    expected = local(state)
    sharded = shardstore.shard(state)
    for number, group in enumerate((None, stages[rank // 2], None)):
        place = folder / f"{number}-{0 if group is None else rank // 2}"
        shardstore.save(sharded, place, process_group=group)
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        loaded = shardstore.load(sharded, place, process_group=group)
        assert local(state) == expected
        assert loaded["plain"].tolist() == [0, 1, 2]


def stages_load_without_stages_and_back(rank: int, folder: Path) -> None:
    for here, there in ((True, False), (False, True)):
        place = folder / str(here)
        shardstore.save(shardstore.shard(state_of(trained(rank, 2, stages=here))["model"]), place)
        wanted = state_of(trained(rank, 1, stages=there))["model"]
        shardstore.load(shardstore.shard(wanted), place)
        assert local(wanted) == local(state_of(trained(rank, 2, stages=there))["model"])


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)
