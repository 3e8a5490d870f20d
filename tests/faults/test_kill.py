"""kill -9 of a rank at many moments of a save that replaces a checkpoint.

The moments are counted in file system calls of the rank that is killed, not in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zarr

import shardstore
from shardstore.mapping import ShardedObject, ShardedTensor
from shardstore.strategies.zarr import ZarrSaveShardedStrategy
from tests.helpers.deaths import die_at
from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import join

WORLD = 3
KEYS = 12
SMALL = ZarrSaveShardedStrategy("zarr", 2, target_chunk_bytes=1024)


def state(rank: int, parts: int, version: int) -> dict[str, Any]:
    """One rank's part; ``parts`` 1 is everything."""
    found: dict[str, Any] = {"step": version}
    for i in range(KEYS):
        whole = torch.full((30, 64), float(version * 100 + i))
        part = whole.chunk(parts)[rank].clone()
        found[f"w{i}"] = ShardedTensor.from_rank_offsets(f"w{i}", part, (0, rank, parts))
    whole = torch.full((64 * 64,), float(version))
    bounds = (rank * 1500, min((rank + 1) * 1500, 4096)) if parts > 1 else (0, 4096)
    found["flat"] = ShardedTensor.from_rank_offsets_flat(
        "flat", whole[slice(*bounds)].clone(), (64, 64), flattened_range=slice(*bounds)
    )
    found["o"] = ShardedObject("o", version, (WORLD,), (rank,)) if parts > 1 else 0
    return found


def version_of(place: Path) -> int:
    """The version that a checkpoint holds, every value of it; a mixture fails."""
    loaded: Any = shardstore.load(
        {k: v for k, v in state(0, 1, 0).items() if k not in ("o", "step")}, place
    )
    version = loaded["step"]
    assert isinstance(version, int)
    for i in range(KEYS):
        assert torch.equal(loaded[f"w{i}"], torch.full((30, 64), float(version * 100 + i)))
    assert torch.equal(loaded["flat"], torch.full((64 * 64,), float(version)))
    return version


def _main(rank: int, folder: str, rendezvous: str, victim: int, moment: int) -> None:
    """Save version 2; the victim kills itself at its given call below the folder."""
    torch.set_num_threads(1)
    os.environ["SHARDSTORE_DEADLINE_S"] = "20"
    join(f"{rendezvous}/store", rank, WORLD)
    dist.barrier()
    calls = die_at(moment if rank == victim else -1, folder)
    text = ""
    try:
        shardstore.save(state(rank, WORLD, 2), Path(folder, "c"), SMALL, overwrite=True)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    outcome = {"error": text, "calls": len(calls)}
    Path(rendezvous, f"{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # the group may be beyond an orderly end


def run(folder: Path, victim: int = -1, moment: int = -1) -> list[dict[str, Any]]:
    """The outcomes by rank, empty for one that was killed."""
    with tempfile.TemporaryDirectory(prefix="kill-") as rendezvous:
        ranks = start(
            (_main, (rank, str(folder), rendezvous, victim, moment)) for rank in range(WORLD)
        )
        deadline = time.monotonic() + 90
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
        for rank in hung:
            ranks[rank].kill()
            ranks[rank].join()
        assert not hung, f"rank(s) {hung} wait for the dead one"
        codes = [process.exitcode for process in ranks]
        wanted = [-signal.SIGKILL if rank == victim else 0 for rank in range(WORLD)]
        # Which rank makes a folder is a race: a victim may be done before its last moment comes.
        assert codes in (wanted, [0] * WORLD)
        files = [Path(rendezvous, f"{rank}.json") for rank in range(WORLD)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def save_whole(version: int, place: Path) -> None:
    """A version as three ranks would have saved it, but by this process alone."""
    whole = state(0, 1, version)
    whole["o"] = [ShardedObject("o", version, (WORLD,), (i,)) for i in range(WORLD)]
    shardstore.save(whole, place, SMALL, overwrite=True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """How many calls each rank makes where none is killed."""
    folder = tmp_path_factory.mktemp("whole")
    save_whole(1, folder / "c")
    outcomes = run(folder)
    assert [outcome["error"] for outcome in outcomes] == [""] * WORLD
    assert version_of(folder / "c") == 2
    assert os.listdir(folder) == ["c"]
    return [outcome["calls"] for outcome in outcomes]


MOMENTS = [(1, 0.0), (2, 0.6), (1, 1.0), (0, 0.5), (0, 0.85), (0, 1.0)]


@pytest.mark.parametrize(("victim", "part"), MOMENTS)
def test_the_previous_checkpoint_survives(
    victim: int, part: float, calls: list[int], tmp_path: Path
) -> None:
    save_whole(1, tmp_path / "c")
    moment = min(int(calls[victim] * part), calls[victim] - 1)
    outcomes = run(tmp_path, victim, moment)
    if all(outcomes):  # the others made folders that the victim made where none was killed
        assert outcomes[victim]["calls"] <= moment
        assert [outcome["error"] for outcome in outcomes] == [""] * WORLD
        assert version_of(tmp_path / "c") == 2
        return
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert f"rank {victim}" in outcome["error"], outcome
            assert outcome["error"].startswith("RanksError"), outcome
    found = version_of(tmp_path / "c")
    if victim or part <= 0.5:
        assert found == 1
    # Whatever zarr opens, under whatever name it was left, is whole.
    for name in os.listdir(tmp_path):
        try:
            group = zarr.open_group(tmp_path / name, mode="r")
        except FileNotFoundError:
            assert name != "c"
            continue
        assert len(list(group.keys())) == KEYS + 1
        assert version_of(tmp_path / name) in (1, 2)
    save_whole(3, tmp_path / "c")
    assert version_of(tmp_path / "c") == 3
    assert os.listdir(tmp_path) == ["c"]
