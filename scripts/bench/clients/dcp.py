"""PyTorch DCP with DTensors over all ranks, the usual way to give it sharded state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import _fsspec_filesystem as over_fsspec
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from bench.clients.base import Share, sync_once
from shardstore import hf
from shardstore.dcp import StorageReader, StorageWriter

warnings.simplefilter("ignore")  # of DCP, about its own parts
State = dict[str, torch.Tensor]
S3_OPTIONS: dict[str, Any] = {"config_kwargs": {"s3": {"addressing_style": "path"}}}


class Dcp:
    """FileSystemWriter with a number of threads; one syncfs at the end, not one fsync a file.

    In the background it saves in its thread form at its defaults, which sync every file. A stager
    that is reused keeps its buffers.
    """

    words = (
        "FileSystemWriter(thread_count={threads}, sync_files=False), no checksum; "
        "sync: one syncfs after save"
    )
    syncs = True

    def __init__(self, *, threads: int = 1, reused: bool = False) -> None:
        self._threads = threads
        self._mesh: DeviceMesh | None = None
        cuda = torch.cuda.is_available()  # then all of DCP's options are on
        options = StagingOptions(cuda, False, cuda, cuda)
        self._stager = DefaultStager(options) if reused else None
        self.settings = self.words.format(threads=threads)

    def prepare(self, share: Share) -> State:
        """DTensors over the share's tensors; plain tensors in a world of one."""
        if share.world == 1:
            return dict(share.tensors)
        self._mesh = self._mesh or init_device_mesh("cpu", (share.world,))
        state: State = {}
        for entry in share.entries:
            if entry.flat is not None:
                raise NotImplementedError("DCP holds no flattened ranges")
            placement = Replicate() if entry.axis is None else Shard(entry.axis)
            state[entry.key] = DTensor.from_local(
                share.tensors[entry.key], self._mesh, [placement], run_check=False
            )
        return state

    def save(self, prepared: State, path: Path, sync: bool) -> None:
        """`torch.distributed.checkpoint.save`, planning included."""
        save(dict(prepared), storage_writer=self._writer(path, sync))
        if sync and self.syncs:
            sync_once(path)

    def load(self, prepared: State, path: Path) -> None:
        """`torch.distributed.checkpoint.load`, which reads into the given tensors."""
        load(dict(prepared), storage_reader=self._reader(path))

    def start(self, prepared: State, path: Path) -> _Staged:
        """`torch.distributed.checkpoint.async_save`."""
        writer = FileSystemWriter(path)
        saving = async_save(dict(prepared), storage_writer=writer, async_stager=self._stager)
        return _Staged(saving)

    def _writer(self, path: Path, sync: bool) -> Any:
        return FileSystemWriter(path, thread_count=self._threads, sync_files=False)

    def _reader(self, path: Path) -> Any:
        return FileSystemReader(path)


class _Staged:
    """What `async_save` returns with or without asynchronous staging, as one kind of future."""

    def __init__(self, saving: Any) -> None:
        self._staging = getattr(saving, "staging_completion", None)
        upload = getattr(saving, "upload_completion", saving)
        self.done, self.result = upload.done, upload.result

    def wait_staged(self) -> None:
        """Wait until the state may be changed."""
        if self._staging is not None:
            self._staging.result()


class DcpOverShardstore(Dcp):
    """The same program with one line changed: our storage under DCP."""

    words = "StorageWriter, checksums written and verified; sync: durable=True"
    syncs = False

    def __init__(self, **saving: Any) -> None:
        super().__init__()
        self._saving = saving
        self.settings += "".join(f"; {name}={value}" for name, value in saving.items())

    def _writer(self, path: Path, sync: bool) -> Any:
        return StorageWriter(path, durable=sync, **self._saving)

    def _reader(self, path: Path) -> Any:
        return StorageReader(path)


class DcpS3(Dcp):
    """FsspecWriter over s3fs, credentials from the environment."""

    words = "FsspecWriter(thread_count={threads}) over s3fs, no checksum"
    syncs = False

    def _writer(self, path: Path, sync: bool) -> Any:
        return over_fsspec.FsspecWriter(path, thread_count=self._threads, **S3_OPTIONS)

    def _reader(self, path: Path) -> Any:
        return over_fsspec.FsspecReader(path, **S3_OPTIONS)


class DcpHf(Dcp):
    """DCP's files of Hugging Face's format, put together by one rank."""

    words = "HuggingFaceStorageWriter, consolidated; sync: one syncfs after save"

    def _writer(self, path: Path, sync: bool) -> Any:
        return HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)

    def _reader(self, path: Path) -> Any:
        return HuggingFaceStorageReader(str(path))


class Hf(Dcp):
    """The same files by `shardstore.hf`."""

    words = "shardstore.hf.save and load; sync: durable=True"

    def __init__(self, *, unsigned: bool = False) -> None:
        super().__init__()
        s3 = {"payload_signing_enabled": False}
        self._options = {"config_kwargs": {"s3": s3}} if unsigned else None
        self.settings += "; signatures without a hash of the content" if unsigned else ""

    def save(self, prepared: State, path: Path, sync: bool) -> None:
        """`shardstore.hf.save`."""
        hf.save(prepared, path, durable=sync, storage_options=self._options)

    def load(self, prepared: State, path: Path) -> None:
        """`shardstore.hf.load`, which reads into the given tensors."""
        hf.load(prepared, path, storage_options=self._options)
