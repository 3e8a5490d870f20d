"""One rank of a crew: keeps a state dict in memory and runs what it is told over a pipe.

Started as `python -m bench.worker RANK WORLD RENDEZVOUS_FILE PIPE` under the interpreter of the
clients that it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module, metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import clients
from bench.clients.base import Share
from bench.workload import build, entries_of
from testing.memory import BytesRead, peak_rss_bytes, reset_peak

_LIBC = ctypes.CDLL(None)
_PACKAGES = ("shardstore", "torch", "numpy", "zarr", "tensorstore", "safetensors", "megatron-core")


class Rank:
    """The state of one rank between commands; each method without an underscore is a command.

    Attributes:
        rank: number of this rank.
        world: number of ranks.
        source: what is saved.
        target: tensors of the same shapes, to load into.
    """

    source: Share
    target: Share

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._clients: dict[str, Any] = {}
        self._loaded: dict[str, torch.Tensor] | None = None
        self._prepared: Any = None

    def setup(
        self, workload: str, scale: float, names: list[str], device: str = "cpu"
    ) -> dict[str, Any]:
        """Build the state and touched tensors to load into; create the clients."""
        self.source = self.target = Share([], {}, self.rank, self.world)
        self._loaded = self._prepared = None
        entries = entries_of(workload, self.rank, self.world, scale)
        tensors = build(entries, self.rank, self.world, device)
        self.source = Share(entries, tensors, self.rank, self.world)
        empty = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        self.target = Share(entries, empty, self.rank, self.world)
        absent: dict[str, str] = {}
        for name in names:
            try:
                self.client(name)
            except Exception as reason:
                absent[name] = f"{type(reason).__name__}: {reason}"
        held = [entry.nbytes(self.world) for entry in entries]
        writes = [self.rank == 0 or not entry.replicated for entry in entries]
        return {
            "absent": absent,
            "settings": {name: client.settings for name, client in self._clients.items()},
            "written_bytes": sum(n for n, mine in zip(held, writes, strict=True) if mine),
            "wanted_bytes": sum(held),
            "tensors": len(entries),
            "versions": _versions(),
        }

    def client(self, name: str) -> Any:
        """The client of that name; each is made once."""
        if name not in self._clients:
            self._clients[name] = clients.create(name)
        return self._clients[name]

    def prepare(self, client: str, load: bool) -> None:
        """Build the client's state dict and give freed memory back; in no figure."""
        self._loaded = None
        if load:
            for tensor in self.target.tensors.values():
                tensor.zero_()
        share = self.target if load else self.source
        self._prepared = self.client(client).prepare(share)
        gc.collect()
        _LIBC.malloc_trim(0)

    def touch(self) -> None:
        """Read a byte of every cache line of the state, as a step of training would."""
        for tensor in self.source.tensors.values():
            tensor.reshape(-1).view(torch.uint8)[::64].sum()

    def save(self, client: str, path: str, sync: bool) -> dict[str, Any]:
        """Save what was prepared; start and end are on the clock shared by all processes."""
        return self._timed(lambda: self.client(client).save(self._prepared, place(path), sync))

    def load(self, client: str, path: str) -> dict[str, Any]:
        """Load into what was prepared."""

        def load() -> None:
            self._loaded = self.client(client).load(self._prepared, place(path))

        return self._timed(load)

    def check(self) -> list[str]:
        """Keys of tensors that the last load did not give bit for bit."""
        found = {**self.target.tensors, **(self._loaded or {})}
        return [k for k, tensor in self.source.tensors.items() if not _same(tensor, found[k])][:5]

    def _timed(self, work: Callable[[], None]) -> dict[str, Any]:
        dist.barrier()
        read, before = BytesRead(), reset_peak()
        start = time.monotonic()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        end = time.monotonic()
        reply = {
            "start": start,
            "end": end,
            "resident_bytes": peak_rss_bytes() - before,
            "bytes_read": read.so_far(),
        }
        dist.barrier()
        return reply


def place(path: str) -> Any:
    """A folder, or the URL as it is."""
    return path if "://" in path else Path(path)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def main() -> None:
    """Serve commands until the other end of the pipe closes."""
    number, world, pipe = int(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[4]))
    method = f"file://{sys.argv[3]}"
    dist.init_process_group("gloo", init_method=method, rank=number, world_size=world)
    rank = Rank(number, world)
    with contextlib.suppress(EOFError):
        while True:
            where, arguments = pipe.recv()
            module, _, name = where.rpartition(":")
            try:
                if module:
                    arguments["rank"] = rank
                call = getattr(import_module(module) if module else rank, name)
                pipe.send((call(**arguments), None))
            except BaseException as error:
                pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    # No farewell to the process group: its other ranks may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
