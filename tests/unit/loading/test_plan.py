"""The tensors that a load fills."""

from __future__ import annotations

import torch

from shardstore.loading.plan import with_destinations
from shardstore.mapping import ShardedTensor


def test_tensors_without_memory_are_made_on_the_device_and_others_keep_theirs() -> None:
    given = torch.zeros(2)
    wanted = {
        "given": ShardedTensor.from_rank_offsets("given", given),
        "none": ShardedTensor("none", None, torch.int8, (2,), (2,), (0,), None),
        "meta": ShardedTensor.from_rank_offsets("meta", torch.zeros(2, device="meta")),
    }
    made = with_destinations(wanted, torch.device("cpu"))
    assert made["given"] is wanted["given"]
    assert [made[name].data.device.type for name in ("none", "meta")] == ["cpu", "cpu"]
