"""PyTorch DCP with DTensors over all ranks, the usual way to give it sharded state."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.clients.base import Share, sync_once
from shardstore.dcp import StorageReader, StorageWriter


class Dcp:
    """FileSystemWriter with a number of threads; one syncfs at the end, not one fsync a file."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._mesh: DeviceMesh | None = None
        self.settings = (
            f"FileSystemWriter(thread_count={threads}, sync_files=False), no checksum; "
            "sync: one syncfs after save"
        )

    def prepare(self, share: Share) -> dict[str, torch.Tensor]:
        """DTensors over the share's tensors; plain tensors in a world of one."""
        if share.world == 1:
            return dict(share.tensors)
        self._mesh = self._mesh or init_device_mesh("cpu", (share.world,))
        state: dict[str, torch.Tensor] = {}
        for entry in share.entries:
            if entry.flat is not None:
                raise NotImplementedError("DCP holds no flattened ranges")
            placement = Replicate() if entry.axis is None else Shard(entry.axis)
            state[entry.key] = DTensor.from_local(
                share.tensors[entry.key], self._mesh, [placement], run_check=False
            )
        return state

    def save(self, prepared: dict[str, torch.Tensor], path: Path, sync: bool) -> None:
        """`torch.distributed.checkpoint.save`, planning included."""
        writer = FileSystemWriter(path, thread_count=self._threads, sync_files=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(prepared), storage_writer=writer)
        if sync:
            sync_once(path)

    def load(self, prepared: dict[str, torch.Tensor], path: Path) -> None:
        """`torch.distributed.checkpoint.load`, which reads into the given tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(prepared), storage_reader=FileSystemReader(path))


class DcpOverShardstore(Dcp):
    """The same program with one line changed: our storage under DCP."""

    def __init__(self, array_documents: int = True) -> None:
        super().__init__(threads=0)
        self._array_documents = bool(array_documents)
        self.settings = "StorageWriter, checksums written and verified; sync: durable=True" + (
            "" if array_documents else "; array_documents=False"
        )

    def save(self, prepared: dict[str, torch.Tensor], path: Path, sync: bool) -> None:
        """`torch.distributed.checkpoint.save`, planning and commit included."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = StorageWriter(path, durable=sync, array_documents=self._array_documents)
            save(dict(prepared), storage_writer=writer)

    def load(self, prepared: dict[str, torch.Tensor], path: Path) -> None:
        """`torch.distributed.checkpoint.load`, every byte verified."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(prepared), storage_reader=StorageReader(path))
