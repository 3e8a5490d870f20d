"""Who saves in the background: shardstore, PyTorch DCP, and the plainest copy and write there is.

Each client starts a save and says when the call returned, when the state may be changed, and when
all is on the disk. Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

State = dict[str, torch.Tensor]

COPY = "memory copy"
PLAIN = "copy + write"
OURS = "shardstore"
OVERLAP = "shardstore, overlapped"
BUDGET = "shardstore, 256 MiB"
DCP = "dcp, thread"
DCP_REUSED = "dcp, reused stager"
BUDGET_BYTES = 256 * 2**20
WRITE_BYTES = 8 * 2**20


class Save(Protocol):
    """A save that was started."""

    def staged(self) -> None:
        """Wait until the state may be changed."""

    def done(self) -> bool:
        """Whether everything is on the disk."""

    def wait(self) -> None:
        """Wait until everything is on the disk; raises what went wrong."""


class Client(Protocol):
    """Someone who saves in the background."""

    def start(self, state: State, path: Path) -> Save:
        """Start a save; the time that this takes is the stall."""


class _Thread:
    """A save in a thread of this process."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def staged(self) -> None:
        """The copy was made before the thread began."""

    def done(self) -> bool:
        """See `Save`."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """See `Save`."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Plain:
    """One memory copy into buffers that are kept, and with `write` one file, synced."""

    def __init__(self, write: bool) -> None:
        self._write = write
        self._buffers: State = {}

    def start(self, state: State, path: Path) -> Save:
        """Copy, then write in a thread."""
        for key, tensor in state.items():
            if key not in self._buffers:
                self._buffers[key] = torch.empty_like(tensor)
            self._buffers[key].copy_(tensor)
        return _Thread(lambda: self._file(path) if self._write else None)

    def _file(self, path: Path) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            position = 0
            for tensor in self._buffers.values():
                view = tensor.numpy().reshape(-1).view("u1").data
                for start in range(0, len(view), WRITE_BYTES):
                    position += os.pwrite(fd, view[start : start + WRITE_BYTES], position)
            os.fsync(fd)
        finally:
            os.close(fd)


class _Handle:
    def __init__(self, handle: object) -> None:
        from shardstore import AsyncSave

        assert isinstance(handle, AsyncSave)
        self._handle = handle

    def staged(self) -> None:
        self._handle.wait_staged()

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> None:
        self._handle.result()


class Shardstore:
    """`shardstore.async_save`, durable as by default."""

    def __init__(self, *, overlap: bool = False, budget_bytes: int | None = None) -> None:
        import shardstore.async_handle  # noqa: F401 (in no figure)

        self._overlap = overlap
        self._budget_bytes = budget_bytes

    def start(self, state: State, path: Path) -> Save:
        """See `Client`."""
        import shardstore

        sharded = {
            key: shardstore.ShardedTensor.from_rank_offsets(key, tensor)
            for key, tensor in state.items()
        }
        return _Handle(
            shardstore.async_save(
                sharded,
                path,
                overlap_staging=self._overlap,
                staging_budget_bytes=self._budget_bytes,
            )
        )


class Dcp:
    """`torch.distributed.checkpoint.async_save` in its thread form."""

    def __init__(self, *, reused: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        plain = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(plain) if reused else None

    def start(self, state: State, path: Path) -> Save:
        """See `Client`; needs a gloo process group."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        writer = FileSystemWriter(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            future = async_save(dict(state), storage_writer=writer, async_stager=self._stager)
        return _Thread(lambda: _result(future))


def _result(future: object) -> None:
    future.result()  # type: ignore[attr-defined]


CLIENTS: dict[str, Callable[[], Client]] = {
    COPY: lambda: Plain(write=False),
    PLAIN: lambda: Plain(write=True),
    OURS: lambda: Shardstore(),
    OVERLAP: lambda: Shardstore(overlap=True),
    BUDGET: lambda: Shardstore(budget_bytes=BUDGET_BYTES),
    DCP: lambda: Dcp(reused=False),
    DCP_REUSED: lambda: Dcp(reused=True),
}
