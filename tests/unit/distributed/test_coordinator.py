"""A world of one, and what errors look like when several ranks have one."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from shardstore.distributed.coordinator import (
    DEADLINE_VARIABLE,
    Ranks,
    _failure,
    _Gathered,
    deadline_from_environment,
    neighbours,
)
from shardstore.distributed.messages import Message
from shardstore.errors import CheckpointingException, RanksError, StorageError


def test_a_world_of_one_decides_for_itself() -> None:
    ranks = Ranks.current()
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator) == (0, 1, True)
    assert ranks.together(b"x", what="testing", decide=lambda r: r[0] * 2) == b"xx"
    assert ranks.together(b"x", what="testing") is None
    with pytest.raises(StorageError, match="full"):
        ranks.together(what="testing", error=StorageError("full"), decide=lambda r: b"")

    def refuse(reports: list[bytes]) -> bytes:
        raise KeyError(len(reports))

    with pytest.raises(KeyError):
        ranks.together(what="testing", decide=refuse)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_strange_deadline_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(DEADLINE_VARIABLE, text)
    with pytest.raises(CheckpointingException, match=DEADLINE_VARIABLE):
        deadline_from_environment()


def test_the_deadline_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEADLINE_VARIABLE, raising=False)
    assert deadline_from_environment() == 1800
    monkeypatch.setenv(DEADLINE_VARIABLE, "2.5")
    assert deadline_from_environment() == 2.5


class Unreachable:
    """A channel on which every rank reports, and none can be told the verdict."""

    is_connected, is_broken = True, False

    def __init__(self) -> None:
        self.kept: list[object] = []

    def ask(self, rank: int) -> int:
        return rank

    def receive(self, *_: object) -> Message:
        return Message(0, _Gathered([pickle.dumps(None)]).to_bytes(None))

    def begin(self, *_: object) -> None: ...
    def sent(self, *_: object) -> None:
        raise RuntimeError("connection lost")


def test_ranks_that_cannot_be_told_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    channel: Any = Unreachable()
    ranks = replace(Ranks.current(), members=range(6), _held=lambda: channel)
    ranks.together(what="testing")
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith(
        "5 rank(s) did not receive the outcome of testing: 1 (connection lost), "
    )
    assert text.endswith(", ...")


def test_different_errors_are_listed_and_counted() -> None:
    failures = {rank: f"no {rank}" for rank in range(20)}
    error = _failure("saving to /x", failures)
    assert isinstance(error, RanksError)
    assert error.failures == failures
    assert "saving to /x failed on 20 rank(s): rank 0: no 0; rank 1: no 1" in str(error)
    assert str(error).endswith("and 12 more")


@pytest.mark.parametrize("world", [1, 2, 7, 8, 9, 64, 65, 1000, 16_384])
def test_the_tree_has_every_rank_once_and_few_neighbours(world: int) -> None:
    found = [neighbours(rank, world) for rank in range(world)]
    reported = [below for _, below in found]
    assert sorted(rank for below in reported for rank in below) == list(range(1, world))
    for rank, (above, below) in enumerate(found):
        assert all(found[one][0] == rank for one in below)
        assert above is None if rank == 0 else (above == 0 or found[above][0] == 0)
        assert len(below) <= max(8, math.isqrt(world - 1) + 1)
    # Put together from the lowest on, reports are in the order of the ranks.
    order = [0]
    for rank in found[0][1]:
        order += [rank, *found[rank][1]]
    assert order == list(range(world))


def test_equal_reports_are_sent_once() -> None:
    sent = _Gathered([b"x" * 1000] * 100 + [b"y"], broken=True)
    message = sent.to_bytes(None)
    assert len(message) < 1500
    assert _Gathered.from_bytes(message) == sent
    failed = _Gathered([b"x"], {3: "no memory"})
    assert _Gathered.from_bytes(failed.to_bytes(None)) == _Gathered([], {3: "no memory"})


def test_an_error_within_a_meeting_is_raised_at_its_end() -> None:
    with Ranks().meet("testing", lambda reports: reports[0] + b"!") as meeting:
        meeting.report = b"done"
        assert meeting.answer is None
    assert meeting.answer == b"done!"
    with pytest.raises(KeyError, match="own"), Ranks().meet("testing"):
        raise KeyError("own")
