"""``shardstore.open`` on an object store: checkpoints, and Zarr of other programs."""

from __future__ import annotations

from typing import Any

import numcodecs  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import zarr
import zarr.codecs

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


CODECS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "blosc": {"compressors": numcodecs.Blosc("lz4", shuffle=numcodecs.Blosc.BITSHUFFLE)},
        "gzip": {"compressors": numcodecs.GZip()},
        "zstd": {"compressors": numcodecs.Zstd()},
    },
    3: {
        "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4")},
        "gzip": {"compressors": zarr.codecs.GzipCodec()},
        "shards": {"chunks": (4, 9), "shards": (8, 18)},
        "packed shards": {
            "chunks": (4, 9),
            "shards": (8, 18),
            "compressors": zarr.codecs.ZstdCodec(),
            "filters": zarr.codecs.TransposeCodec(order=(1, 0)),
        },
    },
}


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_zarr_of_other_programs(s3_server: S3Server, zarr_format: Any) -> None:
    url, options = f"s3://{s3_server.new_bucket()}/data.zarr", s3_server.storage_options
    group = zarr.open_group(url, mode="w", zarr_format=zarr_format, storage_options=options)
    group.create_array("a/b", data=np.arange(12.0).reshape(3, 4), chunks=(2, 3))
    group.create_array("filled", shape=(8,), chunks=(4,), dtype="i2", fill_value=9)[:2] = 1
    packed = np.arange(700, dtype="f4").reshape(20, 35)
    for name, codecs in CODECS[zarr_format].items():
        group.create_array(name, data=packed, **{"chunks": (8, 9), **codecs})
    ckpt = shardstore.open(url, options)
    for name in CODECS[zarr_format]:
        assert np.array_equal(ckpt[name][3:19, ::2], packed[3:19, ::2]), name
    assert np.array_equal(ckpt["a/b"][...], np.arange(12.0).reshape(3, 4))
    assert ckpt["filled"][...].tolist() == [1, 1] + [9] * 6
    assert shardstore.open(f"{url}/filled", options)["filled"][7] == 9
