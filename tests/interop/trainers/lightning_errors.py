"""What strategies of ``shardstore.lightning`` refuse, and what they say.

torchrun --nproc-per-node=1 lightning_errors.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from shardstore.errors import ArgumentError, MissingKeyError
from shardstore.lightning import with_storage


def require(kind: type[BaseException], text: str, function: Callable[..., Any], *args: Any) -> None:
    """An error whose text has these words."""
    caught: BaseException | None = None
    try:
        function(*args)
    except kind as problem:
        caught = problem
    assert text in str(caught), caught


def main() -> None:
    """Wrong classes, options, states and places."""
    place = f"{sys.argv[1]}/one.ckpt"
    dist.init_process_group("gloo")
    for kind in (DDPStrategy, "fsdp", None):
        require(ArgumentError, "ModelParallelStrategy", with_storage, kind)
    fsdp1, fsdp2 = map(with_storage, (FSDPStrategy, ModelParallelStrategy))
    require(ArgumentError, "'sharded'", lambda: fsdp1(state_dict_type="full"))
    whole = {"save_distributed_checkpoint": False}
    require(ArgumentError, "=True", lambda: fsdp2(lambda model, mesh: model, **whole))
    require(ArgumentError, "asynchronous=1", lambda: fsdp1(asynchronous=1))
    strategy = fsdp2(lambda model, mesh: model)
    model = torch.nn.Linear(2, 1)
    require(ArgumentError, "one model", strategy.save_checkpoint, place, {"step": 1})
    two = {"a": model, "b": torch.nn.Linear(1, 1)}
    require(ArgumentError, "['a', 'b']", strategy.save_checkpoint, place, two)
    require(ArgumentError, "filter=", strategy.save_checkpoint, place, {"a": model}, None, {})
    unpickled = {"a": model, "f": lambda: 1}
    require(Exception, "pickle", strategy.save_checkpoint, place, unpickled)
    require(ArgumentError, "'s3://b/x'", strategy.load_checkpoint, Path("s3://b/x"), {"a": model})
    strategy.save_checkpoint(place, {"a": model, "step": 1})
    state = {"a": torch.nn.Linear(2, 1), "other": 2}
    require(MissingKeyError, "'other'", strategy.load_checkpoint, place, state)
    assert strategy.load_checkpoint(place, state, strict=False) == {"step": 1}
    assert state["other"] == 2
    assert torch.equal(state["a"].weight, model.weight)
    more = torch.nn.Linear(2, 1)
    more.register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    require(CheckpointException, "extra", strategy.load_checkpoint, place, {"a": more})
    strategy.load_checkpoint(place, {"a": more}, strict=False)
    assert torch.equal(more.weight, model.weight)
    assert torch.equal(more.extra, torch.ones(3))
    place = Path(sys.argv[1], "run", "one.ckpt")
    background = fsdp2(lambda model, mesh: model, asynchronous=True)
    background.save_checkpoint(place, {"a": model})
    place.with_name("last.ckpt").symlink_to(place.name)  # as of ModelCheckpoint, at once
    background.load_checkpoint(place.with_name("last.ckpt"), {"a": torch.nn.Linear(2, 1)})
    trained = with_storage(lightning.pytorch.strategies.ModelParallelStrategy)()
    whole = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    state = {"state_dict": {}, "callbacks": {"Mean": {"weights": [whole]}}}
    require(
        Exception, "'callbacks.Mean.weights.0' is a DTensor", trained.save_checkpoint, state, place
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
