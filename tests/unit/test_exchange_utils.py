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


def test_fewest_candidates_then_largest_then_id_each_to_the_least_loaded() -> None:
    ranks = {"a": [0, 1], "b": [0, 1], "c": [1], "d": [0, 1, 2], "e": [0, 1]}
    sizes = {"a": 4, "b": 4, "c": 6, "d": 100, "e": 9}
    given_out = distribute_shards_to_ranks(ranks, sizes, 3, set())
    assert given_out == {"c": 1, "e": 0, "a": 1, "b": 0, "d": 2}
    assert list(given_out) == ["c", "e", "a", "b", "d"]


def test_shards_of_other_groups_come_last() -> None:
    ranks = {"a": [0], "b": [0, 1], "c": [0, 1]}
    sizes = {"a": 5, "b": 1, "c": 1}
    assert list(distribute_shards_to_ranks(ranks, sizes, 2, {"a"})) == ["b", "c", "a"]
    assert distribute_shards_to_ranks(ranks, sizes, 2, set()) == {"a": 0, "b": 1, "c": 1}


def test_ties_go_to_the_lowest_rank_whatever_the_order_of_candidates() -> None:
    assert distribute_shards_to_ranks({"a": [2, 0, 1]}, {"a": 1}, 3, set()) == {"a": 0}


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
