"""What the coordinator makes of the groups that ranks gave to a load: it takes no ranks."""

from __future__ import annotations

import pickle

import pytest

from shardstore.distributed.groups import Members, members_of
from shardstore.errors import ArgumentError
from shardstore.loading.replicas import ReadGroup, groups_reading_alone, read_group
from shardstore.storage.stores.location import Location

URL = "s3://bucket/run/step-1"


def report(ranks: tuple[int, ...], share: str = "always", shares: bool = True) -> ReadGroup:
    return ReadGroup(members_of(ranks), share, shares)


def alone(reports: list[ReadGroup | None]) -> frozenset[Members]:
    return groups_reading_alone(dict(enumerate(reports)), URL)


def test_ranks_that_all_share_or_all_do_not() -> None:
    twos = [report((0, 2)), report((1, 3)), report((0, 2)), report((1, 3))]
    assert alone(twos) == frozenset()
    assert alone([None] * 4) == frozenset()
    assert alone([report((0, 1, 2), "never", False), None, None]) == frozenset()
    mixed = [report((0, 1)), report((0, 1), "auto"), report((2,), "always", False), None]
    assert alone(mixed) == frozenset()


def test_a_group_that_is_not_given_by_all_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        alone([report((0, 2)), report((1, 3)), report((0, 2)), None])
    assert caught.value.url == URL
    assert str(caught.value) == (
        "loading s3://bucket/run/step-1: rank(s) [1] gave the group of ranks [1, 3] with "
        "share_replicas='always', rank(s) [3] gave none; the ranks of a replica_group share their "
        "reading, so give the same group and share_replicas on each of them, or none"
    )


def test_ranks_with_other_choices_are_named() -> None:
    for share in ("never", "auto"):
        with pytest.raises(ArgumentError, match=rf"\[1\] gave .* with share_replicas='{share}'"):
            alone([report((0, 1)), report((0, 1), share, False)])
    with pytest.raises(ArgumentError, match=r"rank\(s\) \[1, 2\] gave none"):
        alone([report((0, 1, 2), "auto"), None, None])


def test_by_auto_all_share_or_none() -> None:
    near, far = report((0, 2), "auto", False), report((0, 2), "auto", True)
    other = report((1, 3), "auto", True)
    for first, second in ((near, far), (far, near)):
        assert alone([first, other, second, other]) == {range(0, 3, 2)}


def test_many_ranks_are_few_bytes_and_few_words() -> None:
    count = 10_000
    every = report(tuple(range(count)))
    assert len(pickle.dumps(every)) < 150
    assert alone([every] * count) == frozenset()
    with pytest.raises(ArgumentError, match="and 9991 more] gave") as caught:
        alone([every] * (count - 1) + [None])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("ranks", [(3,), (0, 1), (1, 9, 17), (0, 1, 8, 9), (5, 2), (7, 3, 5)])
def test_the_form_of_a_group_keeps_its_ranks(ranks: tuple[int, ...]) -> None:
    members = members_of(ranks)
    assert tuple(members) == ranks
    assert pickle.loads(pickle.dumps(members)) == members
    assert hash(members) == hash(members_of(ranks))


def test_no_group_is_no_report() -> None:
    assert read_group(None, "auto", Location.of(URL)) is None
