"""Processes that are forked off while a save runs: they end at once, and leave it alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SLOW = """
    import atexit, multiprocessing, os, sys, threading, time, torch
    import shardstore
    from shardstore import CheckpointManager, ShardedTensor

    gate, begun = threading.Event(), threading.Event()

    def slow(event):
        if event.bytes_done:
            begun.set()
            gate.wait(100)

    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000, 1000))}
"""


def run(program: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SLOW) + textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip().endswith("as it should be"), ended.stdout + ended.stderr


@pytest.mark.parametrize("at_exit", ["wait", "abort"])
@pytest.mark.parametrize("by", ["async_save", "manager"])
def test_a_child_ends_while_the_save_runs(tmp_path: Path, at_exit: str, by: str) -> None:
    program = """
        root, at_exit, by = sys.argv[1:]
        if by == "manager":
            manager = CheckpointManager(root, keep_last=1)
            manager.save(0, state)
            handle = manager.async_save(1, state, at_exit=at_exit, progress=slow)
        else:
            place = os.path.join(root, "step-1")
            handle = shardstore.async_save(state, place, at_exit=at_exit, progress=slow)
        assert begun.wait(60)
        child = multiprocessing.get_context("fork").Process(target=print, args=("a child",))
        child.start()
        child.join(60)
        assert child.exitcode == 0, child.exitcode

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, number):
                return number

        began = time.monotonic()
        loader = torch.utils.data.DataLoader(
            Numbers(), num_workers=6, multiprocessing_context="fork"
        )
        assert [int(number) for number in loader] == list(range(8))
        # PyTorch gives each worker five seconds before it ends it by force.
        assert time.monotonic() - began < 20

        child = os.fork()
        if child == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not handle.done()
        gate.set()
        handle.result(60)
        loaded = shardstore.load_plain_tensors(os.path.join(root, "step-1"))
        assert bool((loaded["w"] == 1).all())
        print("as it should be")
    """
    run(program, str(tmp_path), at_exit, by)


def test_a_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    program = """
        from shardstore import async_handle
        handle = shardstore.async_save(state, sys.argv[1], progress=slow)
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0 if async_handle._latest is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        gate.set()
        handle.result(60)
        print("as it should be")
    """
    run(program, str(tmp_path / "c"))


def test_a_child_does_not_give_up_a_save_of_dcp(tmp_path: Path) -> None:
    program = """
        import torch.distributed.checkpoint as dcp
        from shardstore.dcp import StorageWriter

        class Forking(dcp.DefaultSavePlanner):
            def resolve_data(self, item):
                child = os.fork()
                if child == 0:
                    atexit._run_exitfuncs()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                return super().resolve_data(item)

        state = {"w": torch.ones(4), "n": 3}
        writer = StorageWriter(sys.argv[1])
        dcp.save(state, storage_writer=writer, planner=Forking(), no_dist=True)
        assert bool((shardstore.load_plain_tensors(sys.argv[1])["w"] == 1).all())
        print("as it should be")
    """
    run(program, str(tmp_path / "c"))
