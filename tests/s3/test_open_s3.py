"""``shardstore.open`` of a checkpoint in an object store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardstore
from shardstore.errors import MissingKeyError
from shardstore.mapping import ShardedObject, ShardedTensor
from testing.s3_servers import S3Server


def test_a_checkpoint_on_s3_is_opened(s3_server: S3Server) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/run/step-1", s3_server.storage_options
    values = torch.arange(600.0).reshape(30, 20)
    state = {
        "w": ShardedTensor.from_rank_offsets("w", values),
        "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "step": 3,
    }
    shardstore.save(state, url, storage_options=options, compression="zstd")
    ckpt = shardstore.open(url, options)
    assert np.array_equal(ckpt["w"][3:9:2, ::-1], values.numpy()[3:9:2, ::-1])
    assert (ckpt.common["step"], dict(ckpt.objects)) == (3, {"rng/shard_0_1": {"seed": 1}})
    assert ckpt["w"].zarr[29, 19] == ckpt["w"].tensorstore[29, 19].read().result() == 599
    with pytest.raises(MissingKeyError, match=url):
        ckpt["v"]
