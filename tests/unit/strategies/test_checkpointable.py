"""What the wrappers tell DCP, without DCP."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedTensor
from shardstore.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer


def _shard(column: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("k", torch.full((2, 3), float(column)), (1, column, 4))


def _wrapped(column: int) -> CheckpointableShardedTensor:
    return CheckpointableShardedTensor.from_sh_ten(_shard(column))


def test_shape_and_dtype_are_the_global_ones() -> None:
    shard = CheckpointableShardedTensor(torch.zeros(2, 3, dtype=torch.bfloat16), _shard(1))
    assert isinstance(shard, _Checkpointable)
    assert tuple(shard.size()) == (2, 12)
    assert shard.dtype == torch.bfloat16


def test_flattened_range_is_refused_with_the_key() -> None:
    sh_ten = ShardedTensor.from_rank_offsets_flat(
        "flat.key", torch.zeros(4), (2, 3), flattened_range=slice(1, 5)
    )
    wrapped = CheckpointableShardedTensor.from_sh_ten(sh_ten)
    with pytest.raises(CheckpointingException, match=r"flat\.key") as caught:
        wrapped.__create_write_items__("k", wrapped)
    assert caught.value.key == "flat.key"


def test_operations_on_wrappers_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="CheckpointableShardedTensor"):
        _wrapped(0) + 1
    with pytest.raises(NotImplementedError, match="LocalShardsContainer"):
        LocalShardsContainer([_wrapped(0)]) + 1


def test_container_finds_shards_whatever_the_hint() -> None:
    container = LocalShardsContainer([_wrapped(3), _wrapped(1)])
    assert isinstance(container, _Checkpointable)
    assert [tuple(c.offsets) for c in container.__create_chunk_list__()] == [(0, 9), (0, 3)]
    for hint in (None, 0, 1, 9):
        for column in (1, 3):
            index = MetadataIndex("k", torch.Size([0, 3 * column]), hint)
            assert container.__get_tensor_shard__(index).eq(column).all()
    items = container.__create_write_items__("k", container)
    assert [item.index.index for item in items] == [0, 1]  # type: ignore[attr-defined]
    assert [item.tensor_data.properties.dtype for item in items] == [torch.float32] * 2


def test_a_shard_that_the_container_lacks_is_an_error() -> None:
    container = LocalShardsContainer([_wrapped(3)])
    with pytest.raises(ValueError, match=r"\(0, 4\).*\(0, 9\)"):
        container.__get_tensor_shard__(MetadataIndex("k", torch.Size([0, 4])))
    with pytest.raises(ValueError, match="offset"):
        container.__get_tensor_shard__(MetadataIndex("k"))
    with pytest.raises(CheckpointingException, match="at least one"):
        LocalShardsContainer([])
    other = CheckpointableShardedTensor.from_sh_ten(
        ShardedTensor.from_rank_offsets("k", torch.zeros(5))
    )
    with pytest.raises(CheckpointingException, match=r"\(2, 12\).*\(5,\)"):
        LocalShardsContainer([_wrapped(0), other])


def test_repr_needs_no_tensor_operation() -> None:
    assert "global_shape=(2, 12)" in repr(LocalShardsContainer([_wrapped(0)]))
    assert "global_shape=(2, 12)" in f"{_wrapped(0)}"


def test_description_without_data() -> None:
    wrapped = CheckpointableShardedTensor.from_sh_ten(_shard(0).without_data())
    assert tuple(wrapped.shape) == (2, 12)
    assert len(wrapped.__create_chunk_list__()) == 1
