"""Several ranks: one verdict for all, and an error that names who failed, died or is late."""

from __future__ import annotations

import os
import pickle
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardstore.coverage import FlatRange
from shardstore.distributed import messages
from shardstore.distributed.coordinator import DEADLINE_VARIABLE, Ranks
from shardstore.errors import AccessPatternError, RanksError, StorageError
from shardstore.saving import session as sessions
from shardstore.saving.plan import CutChunk
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.grid import Grid
from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import join, run_ranks

WORLD = 4
LONG = 64 * 1024
INLINE = messages._INLINE_BYTES - (len(pickle.dumps(bytes(256))) - 256)
SIZES = [0, 1, LONG - 1, LONG, 3 * LONG + 1, INLINE - 1, INLINE, INLINE + 1, 0, INLINE]
"""Of messages of one piece and of two."""


def every_rank_gets_the_same_answer(rank: int, folder: Path) -> None:
    ranks = Ranks.current()
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator) == (rank, WORLD, rank == 0)
    for size in SIZES:
        # Every other rank has little to say where this one has much.
        told = [bytes([r]) * (size if r % 2 else size // 2) for r in range(WORLD)]

        def decide(reports: list[bytes], told: list[bytes] = told) -> bytes:
            assert reports == told
            return bytes(max(map(len, told)))

        with torch.device("meta"):  # where a trainer builds its model
            answer = Ranks.current().together(told[rank], what="testing", decide=decide)
        assert answer == bytes(size)
    assert ranks.together(b"x", what="testing") is None


class Private(Exception):  # noqa: N818
    """An error that other ranks cannot rebuild."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def an_error_on_one_rank_reaches_all_with_its_name(rank: int, folder: Path) -> None:
    ranks = Ranks.current()

    def caught(**arguments: Any) -> tuple[str, str, Any]:
        with pytest.raises(Exception) as error:  # noqa: PT011 (what it is is told by the caller)
            ranks.together(b"", what="saving to /x", **arguments)
        about = getattr(error.value, "failures", getattr(error.value, "key", None))
        return error.typename, str(error.value), about

    full = StorageError("the disk is full", key="a")
    one = caught(error=full if rank == 2 else None)
    if rank == 2:
        assert one == ("StorageError", "the disk is full", "a")
    else:
        assert one[::2] == ("RanksError", {2: "the disk is full"})
        assert "saving to /x failed on 1 rank(s): rank 2: the disk is full" in one[1]
    foreign = caught(error=Private(1, 2) if rank == 0 else None, decide=lambda _: b"never")
    if rank == 0:
        assert foreign[:2] == ("Private", "1 and 2")
    else:
        assert foreign[::2] == ("RanksError", {0: "Private: 1 and 2"})
    assert caught(error=full) == ("StorageError", "the disk is full", "a")

    def refuse(reports: list[bytes]) -> bytes:
        raise AccessPatternError("Invalid access pattern", key="k")

    def fail(reports: list[bytes]) -> bytes:
        raise Private(3, 4)

    assert caught(decide=refuse) == ("AccessPatternError", "Invalid access pattern", "k")
    assert caught(decide=fail)[:2] == ("CheckpointingException", "Private: 3 and 4")
    assert ranks.together(b"", what="saving to /x", decide=lambda _: b"at work") == b"at work"


def pieces_arrive_in_order(rank: int, folder: Path) -> None:
    """Every rank sends two pieces to every other one, in order, one of them read-only."""
    ranks = Ranks.current()
    others = [r for r in range(WORLD) if r != rank]
    first = {to: np.full(5 + to, rank, np.uint8) for to in others}
    second = {to: np.frombuffer(bytes([rank, to]) * 1000, np.uint8) for to in others}
    buffers = [(r, np.zeros(5 + rank, np.uint8)) for r in others]
    buffers += [(r, np.zeros(2000, np.uint8)) for r in others]
    sends = [(to, pieces[to]) for pieces in (first, second) for to in others]
    ranks.together(what="beginning")
    ranks.connect(others)
    ranks.exchange(sends, buffers)
    expected = [bytes([r]) * (5 + rank) for r in others]
    expected += [bytes([r, rank]) * 1000 for r in others]
    assert [buffer.tobytes() for _, buffer in buffers] == expected


def test_a_scenario_holds_on_all_ranks(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


def _piece_that_nobody_waits_for(rank: int, world: int) -> str:
    """Rank 0 gave up before it asked for the piece that rank 1 sends it."""
    os.environ[DEADLINE_VARIABLE] = "2"
    ranks = Ranks.current()
    ranks.together(what="beginning")
    ranks.connect([1 - rank])
    try:
        if rank == 1:
            ranks.exchange([(0, np.zeros(412, np.uint8))], [])
        ranks.together(what="saving", error=StorageError("the disk is full") if not rank else None)
    except (StorageError, RanksError) as error:
        return type(error).__name__
    return "nothing"


def test_an_unexpected_piece_is_not_taken_for_a_report() -> None:
    assert run_ranks(_piece_that_nobody_waits_for, 2) == ["StorageError", "RanksError"]


# Ranks that die or are silent, in processes of our own: the helper would take it for a failure.


def _main(rank: int, folder: str, who: int, how: str) -> None:
    os.environ[DEADLINE_VARIABLE] = "600"
    join(f"{folder}/rendezvous", rank, WORLD)
    ranks = Ranks.current()
    ranks.together(b"", what="beginning")
    ranks.connect({(rank - 1) % WORLD, (rank + 1) % WORLD})
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    error: RanksError | None = None
    if how in ("exchanging", "rounds"):
        time.sleep(1)  # the death is known where the dead one's piece is asked for
        try:
            _exchange(ranks, rank, in_rounds=how == "rounds")
        except RanksError as problem:
            error = problem
    try:
        ranks.together(b"", what="committing /x", error=error, decide=lambda r: b"")
        outcome: Any = None
    except RanksError as error:
        outcome = (str(error), error.failures)
    broken = ranks.is_broken
    path = Path(folder, f"{rank}.tmp")
    path.write_bytes(pickle.dumps((outcome, broken)))
    path.rename(path.with_suffix(".outcome"))
    # Neither side of a broken group can end it in order.
    if rank == 0:
        while len(list(Path(folder).glob("*.outcome"))) < WORLD - 1:
            time.sleep(0.05)
    os._exit(0)


def _exchange(ranks: Ranks, rank: int, *, in_rounds: bool) -> None:
    """Each rank waits for a piece of the next one: at once, or rank 1 in a round of its own."""
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    if not in_rounds:
        ranks.exchange([(before, np.ones(9, np.uint8))], [(after, np.zeros(9, np.uint8))])
        return
    meta = ArrayMeta("a", "a", Grid((40,), (10,)), "uint8")
    of_rank = [
        CutChunk(meta, (n,), (10,), n, (FlatRange(0, 1, n), FlatRange(1, 10, (n + 1) % WORLD)))
        for n in range(WORLD)
    ]
    cut = [
        replace(
            chunk,
            local={
                int(chunk.owner != rank): np.full(
                    1 if chunk.owner == rank else 9, chunk.owner, np.uint8
                )
            },
        )
        for chunk in (of_rank[n] for n in (1, 0, 3))
        if rank in (chunk.owner, (chunk.owner + 1) % WORLD)
    ]
    session: Any = SimpleNamespace(ranks=ranks, timed=lambda _: nullcontext())
    most: list[int] = []
    sessions._exchange(session, cut, lambda writes: most.append(len(writes)), 1)
    assert max(most, default=0) <= 1


def outcomes(folder: Path, who: int, how: str) -> dict[int, tuple[Any, bool]]:
    processes = start((_main, (rank, str(folder), who, how)) for rank in range(WORLD))
    for process in processes:
        process.join(90)
        process.kill()
        process.join()
    assert processes[who].exitcode == -signal.SIGKILL
    return {
        rank: pickle.loads(path.read_bytes())
        for rank in range(WORLD)
        if (path := folder / f"{rank}.outcome").exists()
    }


@pytest.mark.parametrize("who", [0, 2])
def test_a_killed_rank_is_named_on_all_others(tmp_path: Path, who: int) -> None:
    found = outcomes(tmp_path, who, "killed")
    assert sorted(found) == [r for r in range(WORLD) if r != who]
    for outcome, broken in found.values():
        text, failures = outcome
        assert text.startswith("committing /x")
        assert f"rank {who}" in text
        assert list(failures) == [who]
        assert broken  # on all, or the next group would be made by some alone


@pytest.mark.parametrize("how", ["exchanging", "rounds"])
def test_who_lost_a_rank_leaves_nobody_else_without_a_piece(tmp_path: Path, how: str) -> None:
    found = outcomes(tmp_path, 2, how)
    assert sorted(found) == [0, 1, 3]
    for outcome, _ in found.values():
        text, _ = outcome
        assert "rank 2" in text
