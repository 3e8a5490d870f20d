"""The checkpoint manager on real ranks: all save, restore and fall back alike, or fail alike."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardstore
from shardstore import CheckpointManager, ShardedTensor
from shardstore.errors import (
    ArgumentError,
    CheckpointingException,
    DamagedCheckpointError,
    RanksError,
    ShapeMismatchError,
)
from shardstore.progress import Progress
from testing.s3_servers import S3Server
from tests.helpers.cli_checkpoints import flip
from tests.helpers.ranks_helper import RankFailed, run_ranks
from tests.helpers.scenarios import gathered, logged, raised, remains, remains_of_all

WORLD = 3


def state_of(rank: int, world_size: int, value: float) -> dict[str, Any]:
    rows = torch.full((8, 16), float(value)) + rank
    flat = torch.arange(90.0).chunk(world_size)[rank] + value
    return {
        "rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, world_size)),
        "flat": ShardedTensor.from_rank_offsets("flat", flat, (0, rank, world_size)),
        "step": value,
    }


def check(state: dict[str, Any], rank: int, value: float) -> None:
    assert state["rows"].data.eq(value + rank).all()


def same_everywhere(value: Any) -> None:
    values = gathered(value)
    assert all(other == value for other in values), values


def every_rank_keeps_and_restores_the_same(rank: int, world_size: int, folder: Path) -> None:
    manager = CheckpointManager(folder, keep_last=2, best=1, metric="loss")
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)):
        with logged() as texts:
            # The ranks' losses differ: rank 0's counts, and that is nothing to warn of.
            metrics = {"loss": loss + 100 * rank * (5 - step)}
            record = manager.save(step, state_of(rank, world_size, step), metrics=metrics)
        assert texts == []
        same_everywhere(record)
        assert record["ranks"]["chunks"] == [2] * world_size
        assert len(record["ranks"]["write_s"]) == world_size
    assert manager.wait(60)
    dist.barrier()
    assert manager.steps() == [1, 3, 4]
    assert manager.latest() == 4
    state = state_of(rank, world_size, -1)
    restored = manager.restore(state)
    same_everywhere((restored.step, restored.damaged, restored.state["step"]))
    check(state, rank, 4)
    restored = manager.restore(state, 1)
    check(state, rank, 1)


def damage_that_one_rank_meets_sends_all_back(rank: int, world_size: int, folder: Path) -> None:
    manager = CheckpointManager(folder)
    for step in (1, 2, 3, 4):
        manager.save(step, state_of(rank, world_size, step))
    if rank == 0:
        (folder / "step-4/rows/c.2.0").unlink()  # rank 2's
        flip(folder / "step-3/flat/c.1", 5)  # rank 1's
    dist.barrier()
    state = state_of(rank, world_size, -1)
    with logged() as texts:
        restored = manager.restore(state)
    assert (restored.step, restored.damaged) == (2, (4, 3))
    assert restored.state["step"] == 2
    check(state, rank, 2)
    assert len(texts) == 2
    assert "step 4" in texts[0]
    assert "chunk (2, 0) of key 'rows' is missing" in texts[0]
    assert "step 3" in texts[1]
    assert "chunk (1,) of key 'flat'" in texts[1]
    same_everywhere(texts)
    # Rank 0 looks before anybody reads: the same decision, the same texts for all.
    with logged() as texts:
        again = manager.restore(state, verify_first=True)
    assert (again.step, again.damaged) == (2, (4, 3))
    same_everywhere(texts)
    # A step asked for by name is not replaced by another.
    kind = DamagedCheckpointError if rank == 2 else RanksError
    raised(lambda: manager.restore(state, 4), "'rows'", kind=kind)
    # Training goes on from 2; the damaged steps are replaced when it comes by.
    manager.save(3, state_of(rank, world_size, 33))
    manager.wait()
    dist.barrier()
    assert manager.restore(state, 3) is not None
    check(state, rank, 33)


def a_rank_s_failure_is_no_damage(rank: int, world_size: int, folder: Path) -> None:
    manager = CheckpointManager(folder)
    manager.save(1, state_of(rank, world_size, 1))
    manager.save(2, state_of(rank, world_size, 2))
    if rank == 0:
        (folder / "step-2/rows/c.0.0").unlink()
    dist.barrier()
    state = state_of(rank, world_size, -1)
    if rank == 1:
        state["flat"] = ShardedTensor.from_rank_offsets("flat", torch.zeros(7), (0, 1, world_size))
    kinds = [DamagedCheckpointError, ShapeMismatchError, RanksError]
    raised(lambda: manager.restore(state, validate_access_integrity=False), kind=kinds[rank])
    # A wrong argument on one rank, at a save and at a load.
    metrics = {"loss": "low"} if rank == 0 else {"loss": 1.0}
    state = state_of(rank, world_size, 3)
    with pytest.raises((TypeError, RanksError), match="metric 'loss'='low'"):
        manager.save(3, state, metrics=metrics)
    step: Any = 3.5 if rank == 2 else 3
    for save in (manager.save, manager.async_save):
        with pytest.raises((TypeError, RanksError), match=r"step=3\.5"):
            save(step, state)
    base: Any = 5 if rank == 2 else None
    with pytest.raises((TypeError, RanksError), match="5"):
        manager.save(3, state, base=base)
    raised(lambda: manager.save(3 + rank % 2, state_of(rank, world_size, 3)), "step-3", "step-4")
    manager.wait()
    assert remains_of_all(folder) == ["step-1", "step-2"]


def nothing_whole_is_an_error_on_all(rank: int, world_size: int, folder: Path) -> None:
    manager = CheckpointManager(folder)
    state = state_of(rank, world_size, 1)
    assert manager.restore(state) is None
    manager.save(1, state)
    if rank == 0:
        (folder / "step-1/rows/c.1.0").write_bytes(b"")
    dist.barrier()
    error = raised(lambda: manager.restore(state), "step 1", kind=DamagedCheckpointError)
    same_everywhere(str(error))


def each_rank_sees_its_own_progress(rank: int, world_size: int, folder: Path) -> None:
    state = state_of(rank, world_size, 1)
    size = 8 * 16 * 4 + 30 * 4
    same = ShardedTensor.from_rank_offsets("same", torch.ones(100), replica_id=rank)
    state["same"] = same
    events: list[Progress] = []
    shardstore.save(state, folder / "c", progress=events.append)
    written = size + (400 if rank == 0 else 0)
    assert events[-1].phase == "done"
    assert (events[-1].bytes_done, events[-1].bytes_total) == (written, written)
    group = dist.new_group(list(range(world_size)))
    for share in ("never", "always"):
        events.clear()
        shardstore.load(
            state, folder / "c", replica_group=group, share_replicas=share, progress=events.append
        )
        last = events[-1]
        assert last.phase == "done"
        assert last.bytes_done == last.bytes_total == size + 400
        assert last.chunks_done == last.chunks_total == 3


def pieces_of_shared_chunks_count_for_their_owner(rank: int, folder: Path) -> None:
    bounds = [0, 1000, 5000, 8192]
    mine = slice(bounds[rank], bounds[rank + 1])
    flat = torch.arange(8192.0)[mine]
    tensor = ShardedTensor.from_rank_offsets_flat("m", flat, (64, 128), flattened_range=mine)
    events: list[Progress] = []
    manager = CheckpointManager(folder)
    record = manager.save(1, {"m": tensor}, progress=events.append)
    last = events[-1]
    assert last.bytes_done == last.bytes_total
    assert record["ranks"]["chunks"] == gathered(last.chunks_done)
    assert sum(record["ranks"]["bytes"]) == record["stored_bytes"]
    assert "exchange_s" in record["ranks"]


def all_ranks_go_back_together(rank: int, world_size: int, folder: Path) -> None:
    manager = CheckpointManager(folder, keep_last=3)
    for step in (1, 2, 3):
        manager.save(step, state_of(rank, world_size, step))
    manager.wait()
    dist.barrier()
    state = state_of(rank, world_size, -1)
    with logged() as texts:
        assert manager.restore(state, 1) is not None
    assert [": 2, 3. Until" in text for text in texts] == [True] * (rank == 0)
    manager.save(0, state_of(rank, world_size, 0))
    dist.barrier()
    same_everywhere((manager.latest(), manager.steps()))
    assert manager.latest() == 0
    restored = manager.restore(state)
    assert restored.step == 0
    check(state, rank, 0)
    # Rank 0's word counts; nobody waits for what another was told.
    restored = manager.restore(state, 1, discard_later=rank == 0)
    assert manager.steps() == [0, 1]
    check(state, rank, 1)
    manager.save(2, state_of(rank, world_size, 22))
    restored = manager.restore(state)
    assert restored.step == 2
    check(state, rank, 22)


def content_metadata_of_the_state_is_kept(rank: int, world_size: int, folder: Path) -> None:
    """The mark of the step replaced it."""
    manager = CheckpointManager(folder)
    state = {**state_of(rank, world_size, 1), "content_metadata": {"kind": "model"}}
    manager.save(1, state, metrics={"loss": rank})
    manager.async_save(2, state, metrics={"loss": rank}).result(60)
    manager.wait()
    for step in (1, 2):
        found = shardstore.load_content_metadata(manager.url(step))
        assert found.pop("kind") == "model"
        assert len(found) == 1
    # Another value leaves no place for the mark, and is refused.
    state["content_metadata"] = "model"
    raised(lambda: manager.save(3, state), "content_metadata", "no dict")
    assert manager.steps() == [1, 2]


def ranks_that_ask_about_different_steps_are_told(rank: int, folder: Path) -> None:
    manager = CheckpointManager(folder, every_s=3600)
    with pytest.raises(ArgumentError, match="rank 0 asks about step 5, rank 1 about step 6"):
        manager.should_save(5 + rank)
    with pytest.raises(ArgumentError if rank else RanksError):
        manager.should_save(-1 if rank else 7)
    assert not manager.should_save(8)


def test_ranks_manage_alike(held: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in held)


def on_a_store(rank: int, world_size: int, url: str, options: dict[str, Any]) -> list[int]:
    manager = CheckpointManager(url, keep_last=2, storage_options=options)
    for step in (1, 2, 3):
        if step == 2:
            manager.async_save(step, state_of(rank, world_size, step)).result(60)
        else:
            manager.save(step, state_of(rank, world_size, step))
    manager.wait()
    dist.barrier()
    if rank == 0:
        manager.root.delete("step-3/flat/c.1")
    dist.barrier()
    state = state_of(rank, world_size, -1)
    restored = manager.restore(state)
    assert (restored.step, restored.damaged) == (2, (3,))
    check(state, rank, 2)
    manager.wait()
    return manager.steps()


def _group_ends_first(rank: int, world_size: int, folder: str) -> None:
    manager = CheckpointManager(folder, keep_last=1)
    manager.save(1, state_of(rank, world_size, 1))
    handle = manager.async_save(2, state_of(rank, world_size, 2))
    handle.result(60)
    gate = threading.Event()
    manager._later(lambda: _held(gate))  # what is to be done has to wait
    manager.async_save(3, state_of(rank, world_size, 3)).result(60)
    dist.barrier()
    dist.destroy_process_group()
    gate.set()
    assert manager.wait(60)
    Path(folder, f"ranks-{rank}").write_text(str(sorted(manager._steps._known)))


def _held(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_only_rank_0_deletes_after_the_group_has_ended(tmp_path: Path) -> None:
    run_ranks(_group_ends_first, 2, str(tmp_path))
    assert remains(tmp_path) == ["ranks-0", "ranks-1", "step-3"]
    assert (tmp_path / "ranks-0").read_text() == "[3]"
    assert (tmp_path / "ranks-1").read_text() == "[]"


def test_ranks_manage_alike_on_a_store(s3_server: S3Server) -> None:
    url = f"s3://{s3_server.new_bucket()}/run"
    assert run_ranks(on_a_store, 2, url, s3_server.storage_options) == [[2, 3]] * 2


def _one_dies(rank: int, world_size: int, folder: str) -> None:
    os.environ["SHARDSTORE_DEADLINE_S"] = "3"
    manager = CheckpointManager(folder)
    manager.save(1, state_of(rank, world_size, 1))
    manager.save(2, state_of(rank, world_size, 2))

    def die(event: Progress) -> None:
        if rank == 1 and event.bytes_done:
            os._exit(0)

    with pytest.raises(CheckpointingException) as caught:
        manager.restore(state_of(rank, world_size, -1), progress=die)
    Path(folder, f"rank-{rank}").write_text(f"{caught.type.__name__}: {caught.value}")


def test_a_rank_that_dies_is_no_damage(tmp_path: Path) -> None:
    """The others get an error within the deadline, and do not go back a step."""
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(_one_dies, WORLD, str(tmp_path), timeout_s=60)
    for rank in (0, 2):
        text = (tmp_path / f"rank-{rank}").read_text()
        assert text.startswith("RanksError: ")
        assert "rank 1: no answer" in text
