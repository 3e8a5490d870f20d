"""The check of what ranks report agrees with the check of the shards themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from shardstore import validation
from shardstore.coverage import reports as shard_reports
from shardstore.errors import CheckpointingException
from shardstore.mapping import ShardedObject, ShardedTensor


def shard(
    offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], **more: Any
) -> ShardedTensor:
    return ShardedTensor("w", None, torch.float32, shape, whole, offset, None, **more)


def outcome(ranks: list[list[ShardedTensor | ShardedObject]]) -> tuple[str, str]:
    """What the two checks say; the thorough one first."""
    texts = []
    for check, given_ in (
        (validation.validate_sharding_integrity, ranks),
        (shard_reports.check_reports, [shard_reports.report_shards(r) for r in ranks]),
    ):
        try:
            check(given_)  # type: ignore[operator]
            texts.append("")
        except CheckpointingException as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts[0], texts[1]


@st.composite
def arrangements(draw: st.DrawFn) -> list[list[ShardedTensor | ShardedObject]]:
    """A grid of shards over ranks, flat ones among them, and perhaps something wrong with it."""
    whole = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=2)))
    edges = tuple(draw(st.integers(1, 4)) for _ in whole)
    shards: list[ShardedTensor | ShardedObject] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for n, edge in zip(whole, edges, strict=True):
        cuts = [(o, min(edge, n - o)) for o in range(0, n, edge)] or [(0, 0)]
        boxes = [((*o, a), (*s, b)) for o, s in boxes for a, b in cuts]
    for offset, shape in boxes:
        size = 1
        for n in shape:
            size *= n
        if draw(st.booleans()):
            shards.append(shard(offset, shape, whole))
            continue
        cut = draw(st.integers(0, size))
        for start, stop in ((0, cut), (cut, size)):
            shards.append(shard(offset, shape, whole, flattened_range=slice(start, stop)))
    fault = draw(st.sampled_from(["none", "none", "drop", "double", "replica", "shape", "dtype"]))
    number = draw(st.integers(0, len(shards) - 1))
    odd = shards[number]
    if fault == "drop":
        shards.pop(number)
    elif fault == "double":
        shards.append(odd)
    elif fault == "replica":
        odd.replica_id = 1
    elif fault == "shape":
        assert isinstance(odd, ShardedTensor)
        odd.global_shape = tuple(n + 1 for n in odd.global_shape)
    elif fault == "dtype":
        assert isinstance(odd, ShardedTensor)
        odd.dtype = torch.int32
    world = draw(st.integers(1, 3))
    ranks: list[list[ShardedTensor | ShardedObject]] = [[] for _ in range(world)]
    for item in shards:
        ranks[draw(st.integers(0, world - 1))].append(item)
    return ranks


@given(arrangements())
def test_agrees_with_the_thorough_check(ranks: list[list[ShardedTensor | ShardedObject]]) -> None:
    thorough, quick = outcome(ranks)
    assert quick == thorough


def test_tensors_that_are_cut_alike_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    check = shard_reports.check_access
    monkeypatch.setattr(shard_reports, "check_access", lambda m: (looked.append(m), check(m)))

    def row(key: str, rank: int, width: int) -> ShardedTensor:
        return replace(shard((2 * rank, 0), (2, width), (8, width)), key=key)

    ranks = [[row("a", r, 3), row("b", r, 3), row("c", r, 5)] for r in range(4)]
    shard_reports.check_reports([shard_reports.report_shards(r) for r in ranks])
    assert [[item.key for item in one] for one in looked[0]] == [["a", "c"]] * 4
    del ranks[3][1]
    with pytest.raises(CheckpointingException, match="'b'"):
        shard_reports.check_reports([shard_reports.report_shards(r) for r in ranks])


def test_objects_and_a_key_that_is_both() -> None:
    thing = ShardedObject("w", {"x": 1}, (1,), (0,))
    thorough, quick = outcome([[thing], [shard((0,), (2,), (2,))]])
    assert "ShardedTensor on ranks [1] and a ShardedObject on ranks [0]" in quick
    assert quick == thorough
    assert outcome([[thing], []]) == ("", "")
    assert outcome([[thing], [thing]])[1].startswith("AccessPatternError: Duplicate")


def test_replica_ids_that_can_not_be_looked_up() -> None:
    main, other = ([shard((0,), (4,), (4,), replica_id=[0, n])] for n in (0, 1))
    assert outcome([main, other]) == ("", "")
    thorough, quick = outcome([main, main])
    assert quick == thorough != ""


def test_what_comes_back_is_what_was_described() -> None:
    tensor = ShardedTensor.from_rank_offsets_flat(
        "k", torch.ones(3), (2, 4), (0, 1, 2), flattened_range=slice(1, 4), replica_id=(0, 1)
    )
    thing = ShardedObject("o", 5, (2,), (1,), 1)
    found = shard_reports.shards_of_report(shard_reports.report_shards([tensor, 7, thing]))
    assert found == [tensor.without_data(), thing.without_data()]
