"""Objects of Megatron-Core's own classes, made before this package is installed, on one rank::

    python made_before.py FOLDER FORMAT

Prints what the classes are called after it.
"""

from __future__ import annotations

import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

typing.override = typing_extensions.override  # wheels for Python 3.12 import it
warnings.simplefilter("ignore")
torch.cuda.synchronize = lambda device=None: None
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor, mapping  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)


def halves(key: str, data: torch.Tensor, replica_id: Any, *_: Any) -> list[Any]:
    """Two sharded tensors, of the classes that the name ``ShardedTensor`` stands for."""
    return [
        ShardedTensor.from_rank_offsets(key, part, (0, n, 2), replica_id=replica_id)
        for n, part in enumerate(data.chunk(2))
    ]


def state(fill: float) -> dict[str, Any]:
    """One object of each class, at several depths."""
    tensor = ShardedTensor.from_rank_offsets("w", torch.full((3,), fill), (0, 0, 1), (0, 0, 1))
    prepended = ShardedTensor.from_rank_offsets(
        "layers", torch.full((2, 2), fill + 1), (0, 0, 1), prepend_axis_num=1
    )
    factory = mapping.ShardedTensorFactory(
        "gate", torch.full((4, 2), fill + 2), halves, lambda parts: torch.cat(parts)
    )
    thing = mapping.ShardedObject("o", {"fill": fill}, (1,), (0,))
    local = mapping.LocalNonpersistentObject(("kept", fill))
    return {"a": tensor, "b": [prepended, {"c": factory}], "o": thing, "l": local, "step": fill}


def main() -> None:
    """Save with strategies made before, load with others, and compare."""
    folder, chosen = sys.argv[1:]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved, asked = state(1.0), state(0.0)
    saving = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))
    loading = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    flatten, own = nested_values, ShardedTensor

    from shardstore.megatron import install

    install(chosen)
    assert own is not ShardedTensor  # the name in this module was mended
    assert flatten is not nested_values
    assert isinstance(asked["a"], own)
    place = Path(folder, chosen)
    place.mkdir()
    dist_checkpointing.save(saved, str(place), saving)
    loaded = dist_checkpointing.load(asked, str(place), loading)
    assert torch.equal(loaded["a"], torch.full((3,), 1.0))
    assert torch.equal(loaded["b"][0], torch.full((2, 2), 2.0))
    assert torch.equal(loaded["b"][1]["c"], torch.full((4, 2), 3.0))
    assert (loaded["o"], loaded["l"], loaded["step"]) == ({"fill": 1.0}, ("kept", 0.0), 1.0)
    assert torch.equal(asked["a"].data, loaded["a"])  # filled in place
    found = dist_checkpointing.serialization.load_sharded_metadata(str(place))
    assert sorted(key for key in found if "common" not in key) == [
        "gate",
        "layers",
        "o/shard_0_1",
        "w",
    ]
    print(own.__module__, ShardedTensor.__module__)


if __name__ == "__main__":
    main()
