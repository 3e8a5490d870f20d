"""Export and load of a model in Hugging Face's format, beside plain writes and reads of the same
bytes and beside PyTorch DCP, in one run.

PYTHONPATH=. python scripts/hf_models.py FOLDER [--ranks 8] [--mib 4096] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardstore import hf
from testing.memory import Sampler

ROWS, COLUMNS = 8192, 4096
LAYOUTS = {"rows": 0, "columns": 1}


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", default="{}", help="storage options, as JSON")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    os.execv(sys.executable, [*command, f"--nproc-per-node={given.ranks}", *sys.argv])


def measure(given: argparse.Namespace) -> None:
    """Time each way in turn, and print medians of the slowest rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (given.ranks,))
    count = given.mib * 2**20 // (2 * ROWS * COLUMNS)
    seconds: dict[str, list[float]] = {}
    notes: dict[str, Any] = {}
    for layout, axis in LAYOUTS.items():
        whole = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
        state = {f"layer.{n}": distribute_tensor(whole, mesh, [Shard(axis)]) for n in range(count)}
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        for number in range(given.rounds):
            for name, work in ways(given, layout, state, target).items():
                clean(given, name, rank)
                with Sampler() as sampler:
                    took, written = timed(work)
                if rank == 0:
                    seconds.setdefault(f"{layout}: {name}", []).append(took)
                    note = notes.setdefault(f"{layout}: {name}", {"MiB above the state": 0})
                    above = round(sampler.grown_bytes[0] / 2**20)
                    note["MiB above the state"] = max(above, note["MiB above the state"])
                    note["bytes moved"] = round(written / (given.mib * 2**20), 3)
                if name in ("load, shardstore", "load, DCP") and number == 0:
                    for key, value in target.items():
                        assert torch.equal(value.to_local(), state[key].to_local()), (name, key)
                        value.to_local().zero_()
        del state, target
    if rank == 0:
        for name, took in seconds.items():
            line = {"median s": round(statistics.median(took), 3), **notes[name]}
            print(f"{name}: {json.dumps(line)}", flush=True)
        shutil.rmtree(f"{given.folder}/hf-export", ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


def ways(
    given: argparse.Namespace, layout: str, state: dict[str, Any], target: dict[str, Any]
) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    top, rank = f"{given.folder}/hf-export", dist.get_rank()
    ours = f"{top}/shardstore"

    def plain() -> None:
        with open(f"{top}/plain-files-{rank}", "wb", buffering=0) as file:
            for value in state.values():
                file.write(value.to_local().contiguous().view(torch.uint8).numpy().data)
            os.fsync(file.fileno())

    def plain_load() -> None:
        with open(f"{top}/plain-files-{rank}", "rb", buffering=0) as file:
            for value in target.values():
                file.readinto(torch.empty_like(value.to_local()).view(torch.uint8).numpy().data)

    def dcp_save() -> None:
        writer = HuggingFaceStorageWriter(
            f"{top}/DCP", save_distributed=True, enable_consolidation=True
        )
        dcp.save(state, storage_writer=writer)
        os.sync()

    return {
        "save, plain": plain,
        "save, shardstore": lambda: hf.save(state, ours),
        "save, DCP": dcp_save,
        "load, plain": plain_load,
        **({"load, shardstore": lambda: hf.load(target, ours)} if hasattr(hf, "load") else {}),
        "load, DCP": lambda: dcp.load(target, storage_reader=HuggingFaceStorageReader(ours)),
    }


def clean(given: argparse.Namespace, name: str, rank: int) -> None:
    """Remove what the way would find, and let the disk finish."""
    dist.barrier()
    if rank == 0 and name.startswith("save"):
        Path(given.folder, "hf-export").mkdir(exist_ok=True)
        for path in Path(given.folder, "hf-export").glob(f"*{name.rpartition(' ')[2]}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    dist.barrier()


def timed(work: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds until the last rank is done, and the bytes that all ranks moved."""
    before, began = moved(), perf_counter()
    work()
    dist.barrier()
    took = perf_counter() - began
    total = torch.tensor(moved() - before)
    dist.all_reduce(total)
    return took, int(total)


def moved() -> int:
    """Return the bytes of this process's reads and writes."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


if __name__ == "__main__":
    main()
