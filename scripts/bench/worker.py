"""One rank of a crew: keeps a state dict in memory and runs what it is told over a pipe.

Started as `python -m bench.worker RANK WORLD RENDEZVOUS_FILE` under the interpreter of the
clients that it runs. Commands and replies are JSON, one a line, on stdin and on what was stdout;
stdout itself is turned to stderr so that no library can write into the protocol.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import clients, io_counters, memory
from bench.clients.base import Client, Share
from bench.workload import WORKLOADS, build, wanted_bytes, written_bytes

_LIBC = ctypes.CDLL(None)
_PACKAGES = (
    "torch",
    "numpy",
    "zarr",
    "tensorstore",
    "safetensors",
    "megatron-core",
    "crc32c",
    "orbax-checkpoint",
    "jax",
)


class Worker:
    """The state of one rank between commands."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._clients: dict[str, Client] = {}
        self._source: Share | None = None
        self._target: Share | None = None
        self._loaded: dict[str, torch.Tensor] | None = None
        self._prepared: Any = None

    def setup(self, workload: str, scale: float, names: list[str]) -> dict[str, Any]:
        """Build the state and a touched destination of the same shapes; create the clients."""
        self._source = self._target = self._loaded = self._prepared = None
        entries = WORKLOADS[workload](self._rank, self._world, scale)
        tensors = build(entries, self._rank, self._world)
        targets = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        place = {"rank": self._rank, "world": self._world}
        self._source = Share(entries=entries, tensors=tensors, **place)
        self._target = Share(entries=entries, tensors=targets, **place)
        absent: dict[str, str] = {}
        for name in names:
            if name in self._clients:
                continue
            try:
                self._clients[name] = clients.create(name)
            except Exception as reason:
                absent[name] = f"{type(reason).__name__}: {reason}"
        return {
            "absent": absent,
            "settings": {name: client.settings for name, client in self._clients.items()},
            "written_bytes": written_bytes(entries, self._rank, self._world),
            "wanted_bytes": wanted_bytes(entries, self._world),
            "tensors": len(entries),
            "versions": _versions(),
        }

    def prepare_save(self, client: str) -> dict[str, Any]:
        """Build the client's state dict, and give freed memory back; in no figure."""
        assert self._source is not None
        self._prepared = self._clients[client].prepare(self._source)
        return self._settle()

    def prepare_load(self, client: str) -> dict[str, Any]:
        """The same over the destination, which is zeroed."""
        assert self._target is not None
        self._loaded = None
        for tensor in self._target.tensors.values():
            tensor.zero_()
        self._prepared = self._clients[client].prepare(self._target)
        return self._settle()

    def save(self, client: str, path: str, sync: bool) -> dict[str, Any]:
        """Save what was prepared; start and end are on the clock shared by all processes."""
        mark = self._start()
        self._clients[client].save(self._prepared, _place(path), sync)
        return self._end(mark)

    def load(self, client: str, path: str) -> dict[str, Any]:
        """Load into what was prepared."""
        mark = self._start()
        self._loaded = self._clients[client].load(self._prepared, _place(path))
        return self._end(mark)

    def touch(self) -> dict[str, Any]:
        """Read the state, a byte of every cache line, as a step of training would have done just
        before."""
        assert self._source is not None
        for tensor in self._source.tensors.values():
            tensor.reshape(-1).view(torch.uint8)[::64].sum()
        return {}

    def check(self) -> dict[str, Any]:
        """Compare what the last load gave with the state, bit for bit."""
        assert self._source is not None
        assert self._target is not None
        found: dict[str, Any] = {**self._target.tensors, **(self._loaded or {})}
        in_place = all(
            found[key].data_ptr() == tensor.data_ptr()
            for key, tensor in self._target.tensors.items()
        )
        wrong = [
            key for key, tensor in self._source.tensors.items() if not _same(tensor, found[key])
        ]
        self._loaded = None
        return {"wrong": wrong[:5], "in_place": in_place}

    def _settle(self) -> dict[str, Any]:
        gc.collect()
        _LIBC.malloc_trim(0)
        return {}

    def _start(self) -> dict[str, Any]:
        dist.barrier()
        mark = {"io": io_counters.snapshot(), "memory": memory.reset_peak()}
        mark["start"] = time.monotonic()
        return mark

    def _end(self, mark: dict[str, Any]) -> dict[str, Any]:
        end = time.monotonic()
        peak = memory.peak_rss_bytes()
        reply = {
            "start": mark["start"],
            "end": end,
            "anonymous_bytes_before": mark["memory"].anonymous_bytes,
            "peak_rss_above_bytes": peak - mark["memory"].rss_bytes,
            "io": io_counters.since(mark["io"]),
        }
        dist.barrier()
        return reply


def _place(path: str) -> Any:
    """A folder, or the URL as it is."""
    return path if "://" in path else Path(path)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Serve commands until stdin closes."""
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    worker = Worker(rank, world)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(worker, command.pop("op"))(**command)
        except BaseException as error:
            reply = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    # No farewell to the process group: its other ranks may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
