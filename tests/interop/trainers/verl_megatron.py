"""verl's two functions that save and load with Megatron-Core, over this package.

PYTHONPATH=MEGATRON_CORE torchrun verl_megatron.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import shardstore.megatron


def main() -> None:
    """Save as verl's Megatron engine does, and load."""
    place = Path(sys.argv[1]) / "dist_ckpt"
    shardstore.megatron.install()
    from megatron.core.dist_checkpointing import ShardedTensor
    from verl.utils.megatron.dist_checkpointing import (
        load_dist_checkpointing,
        save_dist_checkpointing,
    )

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel()

    def state(value: float) -> dict[str, object]:
        part = torch.full((2, 3), value + rank) if value else torch.zeros(2, 3)
        copy = torch.full((4,), value)
        return {
            "part": ShardedTensor.from_rank_offsets("part", part, (0, rank, world)),
            "copy": ShardedTensor.from_rank_offsets("copy", copy, replica_id=rank),
            "step": 7 if value else None,
        }

    place.mkdir(parents=True, exist_ok=True)
    save_dist_checkpointing(state(5.0), str(place), content_metadata={"from": "verl"})
    dist.barrier()
    loaded = load_dist_checkpointing(state(0.0), str(place))
    assert loaded["part"].eq(5 + rank).all()
    assert loaded["copy"].eq(5).all()
    assert loaded["step"] == 7
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
