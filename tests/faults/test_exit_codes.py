"""A program exits with 1, and says why, if its last asynchronous save failed and it never asked."""

from __future__ import annotations

import os
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
CODES = {"fails": 1, "raises": 1, "seen": 0, "seen by a hook": 0, "another": 0, "managed": 1}


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


QUEUES = """
import sys, torch, shardstore
from shardstore.strategies.async_utils import AsyncCallsQueue

def scheduled(name):
    queue, state = AsyncCallsQueue(), shardstore.shard({"w": torch.ones(3)})
    request = shardstore.save(state, f"{sys.argv[1]}/{name}", async_sharded_save=True)
    queue.schedule_async_request(request)
    return queue

scheduled("closed").close()
scheduled("aborted").close(abort=True)
scheduled("dropped")
print("not finalised:", file=sys.stderr)
forgotten = scheduled("forgotten")
"""


def test_queues_whose_saves_nobody_finalised_say_so(tmp_path: Path) -> None:
    done = run_text(QUEUES, tmp_path)
    assert done.returncode == 0, done.stderr
    dropped, forgotten = done.stderr.split("not finalised:")
    for said in (dropped, forgotten):
        assert said.count("not committed") == 1, done.stderr
        assert "maybe_finalize_async_calls" in said
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["closed"]
