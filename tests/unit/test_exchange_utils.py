"""Sharing out shards, a pure function, by its rules; and exchanging in a world of one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstore.errors import CheckpointingException
from shardstore.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
)
from shardstore.mapping import ShardedTensor


def test_whole_and_flat_shards_of_one_key_compare() -> None:
    whole, flat = ("k", (0,), None), ("k", (0,), (0, 4))
    assert list(distribute_shards_to_ranks({flat: [0], whole: [0]}, {flat: 1, whole: 1}, 1, set()))


def test_shard_that_nobody_holds() -> None:
    with pytest.raises(CheckpointingException, match="'lost'"):
        distribute_shards_to_ranks({"lost": []}, {"lost": 1}, 2, set())


@given(
    shards=st.dictionaries(
        st.tuples(st.sampled_from("ab"), st.integers(0, 9)),
        st.tuples(st.sets(st.integers(0, 4), min_size=1), st.integers(0, 9)),
    ),
    data=st.data(),
)
def test_independent_of_the_order_in_which_shards_are_listed(
    shards: dict[tuple[str, int], tuple[set[int], int]], data: st.DataObject
) -> None:
    names = list(shards)
    cross = {name for name in names if data.draw(st.booleans())}
    shuffled = data.draw(st.permutations(names))
    first, second = (
        distribute_shards_to_ranks(
            {name: data.draw(st.permutations(sorted(shards[name][0]))) for name in order},
            {name: shards[name][1] for name in order},
            5,
            cross,
        )
        for order in (names, shuffled)
    )
    assert list(first.items()) == list(second.items())
    assert all(rank in shards[name][0] for name, rank in first.items())


def test_one_rank_distributes_nothing() -> None:
    shard = ShardedTensor.from_rank_offsets("k", torch.zeros(2))
    assert determine_main_replica_uniform_distribution({"k": shard}, None) is None
    shard_id = ("k", (0,), None)
    alone = ShardDistribution({shard_id: 0}, {shard_id}, {shard_id: shard}, {shard_id: [0]})
    tensor = torch.ones(2)
    assert exchange_by_distribution({shard_id: tensor}, {}, alone) == {shard_id: tensor}
    objects = {("o", (0,), (1,)): "x"}
    assert exchange_loaded_objects_gather_object(objects) == objects
