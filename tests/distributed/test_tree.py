"""The tree that ranks report along: who connects with whom, and what survivors of deaths are told.

The trees are of three levels in small worlds: the least block is one rank.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from shardstore.distributed import coordinator
from shardstore.distributed.coordinator import DEADLINE_VARIABLE, Ranks, neighbours
from shardstore.distributed.messages import Channel
from shardstore.errors import RanksError
from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import run_ranks

WORLD = 7  # rank 1 leads 2, rank 3 leads 4 and 5, rank 6 leads nobody
TIMEOUT_S = {"before": 4, "arrived": 20, "connecting": 20, "later": 20}
"""Of the process group; the deadline of saves is half an hour."""
LEADERS, LEAVES = (1, 3, 6), (2, 4, 5)


def _merged(reports: list[bytes]) -> bytes:
    return b"(" + b"+".join(reports) + b")"


def _meets(rank: int, world: int) -> Any:
    coordinator.LEAST_BLOCK = 1
    before = len(os.listdir("/proc/self/fd"))
    ranks = Ranks.current()
    answers = []
    for size in (1, 1000):
        report = bytes([ord("a") + rank]) * size
        answers.append(
            ranks.together(report, what="testing", merge=_merged, decide=lambda r: b",".join(r))
        )
    return answers, sorted(ranks._channel._links), len(os.listdir("/proc/self/fd")) - before


def test_reports_are_merged_and_only_neighbours_connect() -> None:
    found = run_ranks(_meets, WORLD)
    for number, (answers, links, descriptors) in enumerate(found):
        for size, answer in zip((1, 1000), answers, strict=True):
            told = [chr(ord("a") + rank) * size for rank in range(WORLD)]
            a, b, c, d, e, f, g = told
            assert answer.decode() == f"{a},({b}+{c}),({d}+{e}+{f}),{g}"
        above, below = _neighbours(number)
        assert links == sorted([*below, *([] if above is None else [above])])
        assert descriptors <= len(links) + 4  # of the device: a listening socket, an event loop


def _neighbours(rank: int) -> tuple[int | None, list[int]]:
    before, coordinator.LEAST_BLOCK = coordinator.LEAST_BLOCK, 1
    try:
        return neighbours(rank, WORLD)
    finally:
        coordinator.LEAST_BLOCK = before


# -- deaths ----------------------------------------------------------------------------------------


def _until_an_error(
    rank: int, folder: str, port: int, timeout_s: float, dies_after_s: float | None, when: str
) -> None:
    """Meet again and again, over one channel or a new one each time, until told of a death."""
    os.environ.pop(DEADLINE_VARIABLE, None)
    coordinator.LEAST_BLOCK = 1
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.barrier()
    if when == "later":
        Ranks.current().together(what="beginning")
    if dies_after_s is not None:

        def die() -> None:
            Path(folder, f"{rank}.dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        if when == "before":
            die()
        if when == "arrived":
            Channel._linked = lambda *_: die()  # type: ignore[method-assign]
        threading.Timer(dies_after_s, die).start()
    outcome: Any = None
    try:
        for number in range(1_000_000):
            purpose = "" if when == "later" else str(number)
            Ranks.current(purpose).together(what="committing /x", decide=lambda _: b"x" * 1000)
    except RanksError as error:
        outcome = (str(error), dict(error.failures))
    path = Path(folder, f"{rank}.tmp")
    path.write_bytes(pickle.dumps(outcome))
    path.rename(path.with_suffix(".outcome"))
    dead = sum(1 for _ in Path(folder).glob("*.expected"))
    while len(list(Path(folder).glob("*.outcome"))) < WORLD - dead:  # others may wait for this one
        time.sleep(0.05)
    os._exit(0)


def deaths(folder: Path, dying: dict[int, float], when: str) -> None:
    """Let some ranks die, and check what the others are told, and that they are told in time: while
    ranks connect, within the timeout of the process group.

    Args:
        folder: an empty one.
        dying: rank -> seconds after which it dies.
        when: "before" the first meeting, in it before the first connection is made ("arrived"),
            over connections made for each meeting ("connecting"), or "later", over those of the
            first.
    """
    for rank in dying:
        Path(folder, f"{rank}.expected").touch()
    # Like torchrun's, the store outlives each rank. In a file store, a rank that is killed while it
    # writes leaves a part of a record, and torch's readers of it never end.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = [
        (_until_an_error, (rank, str(folder), store.port, TIMEOUT_S[when], dying.get(rank), when))
        for rank in range(WORLD)
    ]
    processes = start(calls)
    begun = time.monotonic()
    ended = []
    for process in processes:
        process.join(max(1.0, 150 - (time.monotonic() - begun)))
        ended.append(process.exitcode)
        process.kill()
        process.join()
    assert any(folder.glob("*.dead"))
    for rank in set(range(WORLD)) - dying.keys():
        path = folder / f"{rank}.outcome"
        assert path.exists(), f"rank {rank} was told nothing, {dying}, {when}, {ended}"
        text, failures = pickle.loads(path.read_bytes())
        about = f"rank {rank}, {dying}, {when}: {text}"
        assert failures.keys() & dying.keys(), about
        assert any(f"rank {one}" in text for one in dying), about


def _many_pieces(rank: int, world: int) -> int:
    ranks, other = Ranks.current(), 1 - rank
    ranks.together(what="beginning")
    ranks.connect([other])
    sizes = [*[10] * 1000, 16 << 20, *[10] * 2000]
    sends = [(other, np.full(size, rank + 1, np.uint8)) for size in sizes]
    receives = [(other, np.zeros(size, np.uint8)) for size in sizes]
    ranks.exchange(sends, receives)
    assert all((data == other + 1).all() for _, data in receives)
    ranks.together(what="ending")
    return len(ranks._channel.kept)


def test_many_pieces_go_both_ways_and_none_is_kept() -> None:
    assert max(run_ranks(_many_pieces, 2)) < 10


def _exchanging(rank: int, port: int, folder: str, sends: bool) -> None:
    """Rank 1 begins to send to rank 0, or to receive from it; rank 0 does the other half."""
    os.environ.pop(DEADLINE_VARIABLE, None)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = Ranks.current()
    ranks.together(what="beginning")
    ranks.connect([1 - rank])
    piece = np.zeros(400 << 20, np.uint8)
    channel = ranks._channel
    if rank == 1:
        begun = (channel.begin_send if sends else channel.begin_receive)(0, piece)
        Path(folder, "begun").touch()
        channel.sent(begun, 100)
    pieces = [(1, piece)]
    try:
        ranks.exchange([] if sends else pieces, pieces if sends else [])
    except RanksError as error:
        Path(folder, "outcome").write_text(str(error))
    os._exit(0)


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_dies_in_the_middle_of_a_piece(tmp_path: Path, sends: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other, dying = start([(_exchanging, (r, store.port, str(tmp_path), sends)) for r in (0, 1)])
    until = time.monotonic() + 100
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.02)
    os.kill(dying.pid, signal.SIGSTOP)  # with a part on the way
    time.sleep(0.5)
    dying.kill()
    other.join(60)
    other.kill()
    assert "lost rank 1" in (tmp_path / "outcome").read_text()


LONG = pytest.mark.long


@pytest.mark.parametrize("who", [0, pytest.param(3, marks=LONG), 5])
def test_a_rank_that_dies_before_the_first_meeting(tmp_path: Path, who: int) -> None:
    deaths(tmp_path, {who: 0}, "before")


@pytest.mark.parametrize("who", [pytest.param(0, marks=LONG), 2, 3])
def test_a_rank_that_dies_before_its_first_connection(tmp_path: Path, who: int) -> None:
    deaths(tmp_path, {who: 100}, "arrived")


@pytest.mark.parametrize("when", ["connecting", "later"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
def test_leaders_and_leaves_that_die(tmp_path: Path, when: str, seed: int) -> None:
    deaths(tmp_path, _dying(random.Random(seed)), when)


@LONG
@pytest.mark.parametrize("batch", range(25))
def test_five_hundred_deaths(tmp_path: Path, batch: int) -> None:
    chance = random.Random(batch)
    worlds: list[tuple[Path, dict[int, float], str]] = []
    while sum(len(dying) for _, dying, _ in worlds) < 20:
        when = chance.choice(["connecting", *["later"] * 4])
        worlds.append((tmp_path / str(len(worlds)), _dying(chance), when))
        worlds[-1][0].mkdir()
    with ThreadPoolExecutor(4) as side_by_side:
        ended = [side_by_side.submit(deaths, *world) for world in worlds]
    for one in ended:
        one.result()


def _dying(chance: random.Random) -> dict[int, float]:
    """Leaders, leaves, or some of both, and sometimes the coordinator."""
    kinds = [(chance.choice(LEADERS),), (chance.choice(LEAVES),), (0,)]
    kinds.append(tuple(chance.sample(LEADERS + LEAVES, chance.randint(2, 3))))
    chosen = chance.choices(kinds, [4, 4, 1, 3])[0]
    return {rank: chance.uniform(0, 0.4) for rank in chosen}
