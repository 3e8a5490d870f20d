"""A program exits with 1, and says why, if its last asynchronous save failed and it never asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.programs import run_text

PROGRAM = """
import atexit, os, sys, torch
atexit.register(print, "a hook from before the import")
late = open(sys.argv[1] + ".late", "w")
late.write("written in a buffer")
import shardstore
from shardstore import ShardedTensor

atexit.register(print, "a hook from after the import")

def begin(fails):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}
    if fails:
        state["refused"] = print
    if sys.argv[2] == "managed":
        return manager.async_save(1, state, overwrite=True)
    return shardstore.async_save(state, sys.argv[1], overwrite=True)

manager = shardstore.CheckpointManager(sys.argv[1])

def seen():
    handle.wait()
    assert handle.exception() is not None

mode = sys.argv[2]
handle = begin(True)
if mode == "seen":
    seen()
if mode == "seen by a hook":
    atexit.register(seen)
if mode == "another":
    handle = begin(False)
print("the end of the program")
if mode == "raises":
    raise SystemExit(3)
"""
CODES = {
    "fails": 1,
    "raises": 1,
    "seen": 0,
    "seen by a hook": 0,
    "another": 0,
    "managed": 1,
}


@pytest.mark.parametrize("mode", CODES)
def test_the_exit_code(tmp_path: Path, mode: str) -> None:
    done = run_text(PROGRAM, tmp_path / "c", mode)
    assert done.returncode == CODES[mode], done.stderr
    assert done.stdout.splitlines() == [
        "the end of the program",
        "a hook from after the import",
        "a hook from before the import",
    ]
    assert (tmp_path / "c.late").read_text() == "written in a buffer"
    if CODES[mode]:
        assert "'refused' is a builtins.builtin_function" in done.stderr
        assert f"save to {tmp_path / 'c'}" in done.stderr


QUEUE = """
import sys, torch, shardstore
from shardstore.strategies.async_utils import AsyncCallsQueue

queue = AsyncCallsQueue()
state = shardstore.shard({"w": torch.ones(3)})
queue.schedule_async_request(shardstore.save(state, sys.argv[1], async_sharded_save=True))
if sys.argv[2] == "dropped":
    del queue
if sys.argv[2] == "closed":
    queue.close()
if sys.argv[2] == "aborted":
    queue.close(abort=True)
"""


@pytest.mark.parametrize("mode", ["forgotten", "dropped", "closed", "aborted"])
def test_a_queue_whose_saves_nobody_finalised_says_so(tmp_path: Path, mode: str) -> None:
    done = run_text(QUEUE, tmp_path / "c", mode)
    assert done.returncode == 0, done.stderr
    is_lost = "not committed" in done.stderr and "maybe_finalize_async_calls" in done.stderr
    assert is_lost == (mode in ("forgotten", "dropped")), done.stderr
    assert (tmp_path / "c").exists() == (mode == "closed")
