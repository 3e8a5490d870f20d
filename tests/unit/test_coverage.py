"""What ranks report of their shards, and the check of all reports."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardstore import coverage
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor


def shard(
    offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], **more: Any
) -> ShardedTensor:
    return ShardedTensor("w", None, torch.float32, shape, whole, offset, None, **more)


def outcome(ranks: list[list[ShardedTensor | ShardedObject]]) -> str:
    """What the check says, of the reports of all ranks, joined or not."""
    reports = [coverage.report_shards(r) for r in ranks]
    joined = [reports[0], coverage.join_reports(reports[1:])]
    said = []
    for told in (reports, joined, [coverage.join_reports(joined)]):
        try:
            coverage.check_reports(told, range(len(ranks)))
            said.append("")
        except CheckpointingException as error:
            said.append(f"{type(error).__name__}: {error}")
    assert len(set(said)) == 1
    return said[0]


def test_tensors_that_are_cut_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    check = coverage._check_cover
    monkeypatch.setattr(coverage, "_check_cover", lambda m: (looked.append(m), check(m)))

    def row(key: str, rank: int, width: int) -> ShardedTensor:
        return replace(shard((2 * rank, 0), (2, width), (8, width)), key=key)

    ranks = [[row("a", r, 3), row("b", r, 3), row("c", r, 5)] for r in range(4)]
    assert outcome(ranks) == ""
    assert [[(rank, item.key) for rank, item in one] for one in looked] == 3 * [
        [(rank, key) for rank in range(4)] for key in "ac"
    ]
    del ranks[3][1]
    assert "'b'" in outcome(ranks)


def test_objects_and_a_key_that_is_both() -> None:
    thing = ShardedObject("w", {"x": 1}, (1,), (0,))
    both = outcome([[thing], [shard((0,), (2,), (2,))]])
    assert "'w' is a ShardedObject on rank 0 and a ShardedTensor on rank 1" in both
    assert outcome([[thing], []]) == ""


def test_lists_that_were_set_by_hand() -> None:
    main, other = ([shard((0,), (4,), (4,), replica_id=[0, n])] for n in (0, 1))
    assert outcome([main, other]) == ""
    assert "has 2 main replicas, on ranks [0, 1]" in outcome([main, main])


def test_whole_shards_are_those_that_one_rank_covers() -> None:
    """A load of one rank looks no further at them, so the check refuses no such shards."""
    thing, main = ShardedObject("o", 1, (1,), (0,)), shard((0, 0), (2, 4), (2, 4))
    scalar = replace(shard((), (), ()), key="s")
    assert coverage.are_whole([thing, main, scalar])
    assert outcome([[thing, main, scalar]]) == ""
    refused: list[Any] = [
        *([main, main], [thing, thing], [replace(main, key="o"), thing]),
        *([replace(main, replica_id=1)], [replace(thing, replica_id=(0, 1))]),
        *([shard((0, 2), (2, 4), (2, 4))], [shard((0, 0), (2, 2), (2, 4))]),
        *([replace(one, flattened_range=slice(0, 0))] for one in (main, scalar)),
        *([ShardedObject("o", 1, (2,), (0,))], [ShardedObject("o", 1, (1,), (1,))]),
        [shard((0, 0), (4,), (2, 4), prepend_axis_num=1)],
    ]
    for wrong in refused:
        assert not coverage.are_whole(wrong)
        assert outcome([wrong])


def test_reports_give_back_the_shards() -> None:
    tensor = ShardedTensor.from_rank_offsets_flat(
        "k", torch.ones(3), (2, 4), (0, 1, 2), flattened_range=slice(1, 4), replica_id=(0, 1)
    )
    thing = ShardedObject("o", 5, (2,), (1,), 1)
    reports = [coverage.report_shards([tensor, 7, thing])]
    assert coverage.keys_of(reports) == {"k", "o"}
    assert coverage.shards_of(reports, [0]) == {
        "k": [(0, tensor.without_data())],
        "o": [(0, thing.without_data())],
    }


def test_joined_reports_grow_with_the_cuts_alone() -> None:
    def of_rank(rank: int) -> coverage.ShardReport:
        return coverage.report_shards(
            replace(shard((rank, 0), (1, 4), (16, 4)), key=f"model.layers.{i}.weight")
            for i in range(200)
        )

    reports = [of_rank(rank) for rank in range(16)]
    joined = pickle.dumps(coverage.join_reports(reports))
    assert len(joined) < 2 * len(pickle.dumps(reports[0]))
