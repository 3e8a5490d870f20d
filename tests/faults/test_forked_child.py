"""A process that forks while it saves: the child has no part in the save. It ends at once, whatever
the way, and what it does or leaves undone harms nothing of its parent's.

All forks are in programs of their own: TensorStore does not survive one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shardstore
from testing.s3_servers import S3Server
from tests.helpers.programs import run_text

SAVES = """
import multiprocessing, os, signal, sys, threading
import torch, shardstore
from shardstore import ShardedTensor, async_handle

# Who waits for the save at its exit never ends.
async_handle.ABORT_WAIT_S = threading.TIMEOUT_MAX
folder, at_exit, held, go_on = sys.argv[1], sys.argv[2], threading.Event(), threading.Event()

def hold(event):
    if event.bytes_done:
        held.set()
        assert go_on.wait(120)

def code_of(child):
    "How a forked child ends; by a signal where it does not."
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

options = {"progress": hold, "at_exit": at_exit}
state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0))}
manager = shardstore.CheckpointManager(os.path.join(folder, "run"))
if sys.argv[3] == "managed":
    handle = manager.async_save(1, state, **options)
else:
    handle = shardstore.async_save(state, os.path.join(folder, "run", "step-1"), **options)
assert held.wait(60)
"""

# Then children, of several kinds, while the save goes on.
CHILDREN = """
process = multiprocessing.get_context("fork").Process(target=print, args=("a child",))
process.start()
process.join(20)
print("process", process.exitcode)
process.kill()

loader = torch.utils.data.DataLoader(
    [torch.tensor(n) for n in range(8)], num_workers=2, multiprocessing_context="fork"
)
batches = iter(loader)
workers = batches._workers
assert [int(batch) for batch in batches] == list(range(8))
# The loader kills, after 5 s each, what does not end by itself.
print("workers", *(worker.exitcode for worker in workers))

print("exit", code_of(sys.exit))

def ask():
    # As in a `finally` of the trainer's.
    assert handle.done() and handle.wait() and handle.wait_staged()
    handle.abort()
    manager.close()
    try:
        handle.result()
    except shardstore.CheckpointingException as error:
        text = str(error)
        assert handle.url in text and f"process {os.getppid()}" in text, text
    else:
        raise AssertionError("it knows nothing of its parent's save")
    sys.exit()

print("ask", code_of(ask))
assert not handle.done()
go_on.set()
handle.result(60)
manager.close()
"""


@pytest.mark.parametrize(("at_exit", "by"), [("wait", "managed"), ("abort", "itself")])
def test_a_forked_child_ends_at_once_and_the_save_goes_on(
    tmp_path: Path, at_exit: str, by: str
) -> None:
    ended = run(SAVES + CHILDREN, tmp_path, at_exit, by)
    assert ended.splitlines() == ["a child", "process 0", "workers 0 0", "exit 0", "ask 0"]
    assert os.listdir(tmp_path / "run") == ["step-1"]
    loaded = shardstore.load_plain_tensors(tmp_path / "run" / "step-1")
    assert torch.equal(loaded["w"], torch.arange(1000.0))


OF_DCP = """
import os, sys, threading, warnings
import torch, torch.distributed.checkpoint as dcp
from shardstore.dcp import StorageWriter

warnings.simplefilter("ignore")  # of one process that saves
held, go_on = threading.Event(), threading.Event()

class Held(StorageWriter):
    def write_data(self, plan, planner):
        held.set()
        assert go_on.wait(120)
        return super().write_data(plan, planner)

def save():
    dcp.save({"w": torch.arange(1000.0)}, storage_writer=writer, no_dist=True)

writer = Held(os.path.join(sys.argv[1], "c"))
thread = threading.Thread(target=save)
thread.start()
assert held.wait(60)
pid = os.fork()
if pid == 0:
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(os.listdir(sys.argv[1])))
go_on.set()
thread.join()
"""


def test_a_forked_child_does_not_remove_what_is_being_written(tmp_path: Path) -> None:
    """A writer of PyTorch DCP removes an attempt that failed when its process ends."""
    assert run(OF_DCP, tmp_path) == "0 1\n"
    assert os.listdir(tmp_path) == ["c"]
    loaded = shardstore.load_plain_tensors(tmp_path / "c")
    assert torch.equal(loaded["w"], torch.arange(1000.0))


FORKED = """
import logging, os, sys
import torch, shardstore
from shardstore import ShardedTensor

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
url, options = sys.argv[2], eval(sys.argv[3])

def save(name):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0))}
    shardstore.save(state, f"{url}/{name}", storage_options=options)

save("parent")
print("the child", flush=True)
pid = os.fork()
if pid == 0:
    save("child")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_its_chunks_go_by_another_client(tmp_path: Path, s3_server: S3Server) -> None:
    """TensorStore does not survive a fork."""
    bucket = s3_server.new_bucket()
    said = run(FORKED, tmp_path, f"s3://{bucket}", repr(s3_server.storage_options))
    parent, _, child = said.partition("the child")
    assert "fsspec" not in parent
    assert child.count("fsspec moves chunks too") == 1
    assert "a process that was forked" in child
    assert child.endswith("\n0\n")
    for name in ("parent", "child"):
        place, options = f"s3://{bucket}/{name}", s3_server.storage_options
        loaded = shardstore.load_plain_tensors(place, storage_options=options)
        assert torch.equal(loaded["w"], torch.arange(1000.0))


LOADS = """
import os, signal, sys
import numpy as np, torch, zarr, shardstore
from shardstore import ShardedTensor

values = torch.arange(64.0)

def load(place):
    return torch.from_numpy(np.asarray(shardstore.open(place)["w"][:]))

def load_strictly(place):
    tensor = ShardedTensor.from_rank_offsets("w", torch.zeros(64))
    return shardstore.load({"w": tensor}, place)["w"]

for written in ("zstd", "blosc", "zarr"):
    place, loads = os.path.join(sys.argv[1], written), [load, load_strictly]
    if written == "zarr":  # in shards, which TensorStore decodes
        group, loads = zarr.open_group(place), [load]
        array = group.create_array("w", shape=(64,), chunks=(8,), shards=(32,), dtype="f4")
        array[:] = values.numpy()
    else:
        tensor = ShardedTensor.from_rank_offsets("w", values)
        shardstore.save({"w": tensor}, place, compression=written)
    for one in loads:
        assert torch.equal(one(place), values)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            for one in loads:
                assert torch.equal(one(place), values)
            print("loaded", flush=True)
        except shardstore.CheckpointingException as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_forked_child_loads_or_says_why_not(tmp_path: Path) -> None:
    zstd, blosc, by_zarr = run(LOADS, tmp_path).splitlines()
    assert zstd == blosc == "loaded"
    assert "spawn" in by_zarr


COLLECTS = """
import gc, os, threading
from shardstore.storage.runtime.parallel import collector_paused

def pause(pauses, go_on):
    with collector_paused():
        pauses.set()
        assert go_on.wait(120)

for collects in (True, False):
    if not collects:
        gc.disable()
    pauses, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=pause, args=(pauses, go_on))
    thread.start()
    assert pauses.wait(60)
    pid = os.fork()
    if pid == 0:
        on = gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        os._exit(on + 2 * gc.isenabled())
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    go_on.set()
    thread.join()
"""


def test_a_forked_child_collects_garbage_if_its_parent_does(tmp_path: Path) -> None:
    """A commit in the background pauses the collector of the parent for a moment."""
    assert run(COLLECTS, tmp_path) == "3\n0\n"


# Python 3.12 and later warn of any fork beside a thread.
QUIET = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
"""


def run(program: str, folder: Path, *arguments: str) -> str:
    """What a program printed that is given a folder, and nothing else."""
    ended = run_text(QUIET + program, folder, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout
