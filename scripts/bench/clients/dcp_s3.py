"""PyTorch DCP over fsspec and s3fs, its own way to object stores."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bench.clients.base import Share

OPTIONS: dict[str, Any] = {"config_kwargs": {"s3": {"addressing_style": "path"}}}


class DcpS3:
    """FsspecWriter with a number of threads, credentials from the environment."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.settings = f"FsspecWriter(thread_count={threads}) over s3fs, no checksum"

    def prepare(self, share: Share) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        if share.world != 1:
            raise NotImplementedError("measured in a world of one")
        return dict(share.tensors)

    def save(self, prepared: dict[str, torch.Tensor], path: str, sync: bool) -> None:
        """`torch.distributed.checkpoint.save`, planning included."""
        writer = FsspecWriter(path, thread_count=self._threads, **OPTIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(dict(prepared), storage_writer=writer)

    def load(self, prepared: dict[str, torch.Tensor], path: str) -> None:
        """`torch.distributed.checkpoint.load`, which reads into the given tensors."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(dict(prepared), storage_reader=FsspecReader(path, **OPTIONS))
