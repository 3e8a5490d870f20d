"""The helper that starts ranks must not swallow what happens on them, and each begins afresh."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.rank_server import start
from tests.helpers.ranks_helper import RankFailed, run_ranks


def _raise_on_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("said rank 1")
    dist.barrier()


def _die_on_0(rank: int, world_size: int) -> int:
    if rank == 0:
        os._exit(3)
    return rank


def _double(rank: int, world_size: int, number: int) -> tuple[int, int]:
    return rank, number * world_size


def test_results_come_back_by_rank() -> None:
    assert run_ranks(_double, 2, 21) == [(0, 42), (1, 42)]


def test_the_first_exception_is_raised_with_the_tracebacks() -> None:
    with pytest.raises(KeyError, match="said rank 1") as caught:
        run_ranks(_raise_on_1, 2, timeout_s=60)
    assert any("_raise_on_1" in note for note in caught.value.__notes__)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 0 died with exit code 3"):
        run_ranks(_die_on_0, 2, timeout_s=60)


def _surroundings(rank: int, world_size: int) -> dict[str, Any]:
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"rank {rank} speaks\n".encode())  # a line, not two pieces of one
    return {
        "threads": threading.active_count(),
        "variable": os.environ.get("SHARDSTORE_TEST_VARIABLE"),
        "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
        "folder": os.getcwd(),
        "path": sys.path,
        "seen": sorted({"torch", "shardstore", "tensorstore"} & set(sys.modules)),
        "hash": hash("one word"),
    }


def test_ranks_begin_in_the_surroundings_of_their_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_surroundings, 1)  # what follows has changed since the first rank of all
    monkeypatch.setenv("SHARDSTORE_TEST_VARIABLE", "set late")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "more"))
    capfd.readouterr()
    seen = run_ranks(_surroundings, 3)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"rank {i} speaks" for i in range(3)]
    for one in seen:
        assert one["variable"] == "set late"
        assert one["blas"] == os.environ.get("OPENBLAS_NUM_THREADS")
        assert one["folder"] == os.getcwd()
        assert one["path"] == sys.path
        assert one["seen"] == ["shardstore", "torch"]
    assert seen[0]["hash"] != seen[1]["hash"] or "PYTHONHASHSEED" in os.environ


def _end(file: str, how: str) -> None:
    atexit.register(Path(file).write_text, "ended in order")
    if how == "raise":
        raise KeyError("no such thing")
    if how == "leave":
        sys.exit(7)


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("leave", 7)])
def test_a_process_ends_as_a_program_does(
    tmp_path: Path, how: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "end"
    (process,) = start([(_end, (str(file), how))])
    process.join()
    assert process.exitcode == code
    assert file.read_text() == "ended in order"
    assert ("KeyError: 'no such thing'" in capfd.readouterr().err) == (how == "raise")
