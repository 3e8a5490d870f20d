"""Trainers that the cluster ends: a signal to any rank makes all save the same step, and a resumed
run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardstore import CheckpointManager
from shardstore.errors import RanksError
from shardstore.manager import checkpoint_manager
from tests.helpers.ranks_helper import run_ranks

WORLD = 2


def train(
    folder: Path, last: int, struck: Mapping[int, signal.Signals], **options: Any
) -> tuple[int, str | None, torch.Tensor]:
    """One rank of a trainer: restores, trains, saves when its manager says so, and ends at ``last``
    or after a SIGTERM.

    Args:
        folder: root of the checkpoints.
        last: number of the last step.
        struck: step -> signal that this rank gets in it.
        **options: of the manager.

    Returns:
        The last step, the last notice, and the trained weights.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    manager = CheckpointManager(folder, every=1000, save_on_signal=True, **options)

    def state() -> dict[str, Any]:
        return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}

    start = 0
    model(torch.ones(1, 4)).sum().backward()  # AdamW has a state after its first step
    optimizer.step()
    if (restored := manager.restore(state())) is not None:
        start = restored.step
        model.module.load_state_dict(restored.state["model"])
        optimizer.load_state_dict(restored.state["optimizer"])
    step = start
    for step in range(start + 1, last + 1):
        (folder.parent / f"rank-{dist.get_rank()}").write_text(str(step))
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step in struck:
            os.kill(os.getpid(), struck[step])
        if manager.should_save(step):
            manager.save(step, state())
        if manager.notice == "SIGTERM":
            break
    manager.close()
    return step, manager.notice, model.module.weight.detach().clone()


Ended = tuple[int, str | None, torch.Tensor, list[int]]


def rank_of_runs(
    rank: int, world_size: int, runs: list[tuple[Path, int, list[dict[int, signal.Signals]]]]
) -> list[Ended]:
    """One rank of trainers, one after the other; how each ended, and the steps that it left."""
    found = []
    for folder, last, struck in runs:
        folder.parent.mkdir(exist_ok=True)
        ended = train(folder, last, struck[rank] if struck else {})
        dist.barrier()
        found.append((*ended, CheckpointManager(folder).steps()))
    return found


def test_a_signal_to_one_rank_makes_all_save_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    root, unbroken = (tmp_path / name / "checkpoints" for name in ("run", "unbroken"))
    struck = [{3: signal.SIGUSR1}, {6: signal.SIGTERM}]
    for (found,) in run_ranks(rank_of_runs, WORLD, [(root, 20, struck)]):
        assert found[:2] == (6, "SIGTERM")
        assert found[3] == [3, 6]
    for one, other in run_ranks(rank_of_runs, WORLD, [(root, 10, []), (unbroken, 10, [])]):
        assert one[:2] == other[:2] == (10, None)
        assert torch.equal(one[2], other[2])


@pytest.mark.long
def test_torchrun_passes_its_own_end_on(tmp_path: Path) -> None:
    """As SLURM and Kubernetes end a job: SIGTERM to the launcher, which tells its workers."""
    root = tmp_path / "run" / "checkpoints"
    root.parent.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, "--local-addr=127.0.0.1", __file__, str(root)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            while launcher.poll() is None and not _all_reached(root.parent, 3):
                time.sleep(0.05)
            launcher.terminate()
            _, errors = launcher.communicate(timeout=120)
        finally:
            launcher.kill()
    (step,) = CheckpointManager(root).steps()
    assert step >= 3, errors
    ended = {file.name: file.read_text() for file in root.parent.glob("ended-*")}
    assert ended == {f"ended-{rank}": f"{step} SIGTERM" for rank in range(WORLD)}, errors
    for (found,) in run_ranks(rank_of_runs, WORLD, [(root, step + 1, [])]):
        assert found[0] == step + 1


def _all_reached(folder: Path, step: int) -> bool:
    files = list(folder.glob("rank-*"))
    return len(files) == WORLD and all(int(file.read_text() or 0) >= step for file in files)


def a_rank_that_does_not_come(rank: int, world_size: int, folder: Path) -> None:
    """Rank 1 hangs after the ranks agreed; rank 0 gives up when the cluster's time is over."""
    checkpoint_manager.LEAST_GRACE_S = 0.5
    manager = CheckpointManager(folder, save_on_signal=True, grace_s=0.1)
    state = {"w": torch.ones(3)}
    manager.save(1, state)  # without a notice, nobody hurries
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_save(2)
    gone = folder / "gone"
    if rank == 1:
        while not gone.exists():
            time.sleep(0.01)
        return
    try:
        with pytest.raises(RanksError, match="rank 1"):
            manager.save(2, state)
    finally:
        gone.touch()
    assert manager.steps() == [1]


def test_ranks_do_not_wait_longer_than_the_cluster(tmp_path: Path) -> None:
    run_ranks(a_rank_that_does_not_come, WORLD, tmp_path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    reached, why, _ = train(place, 10**9, {})
    (place.parent / f"ended-{dist.get_rank()}").write_text(f"{reached} {why}")
    dist.destroy_process_group()
