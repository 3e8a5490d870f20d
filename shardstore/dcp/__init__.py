"""Support for PyTorch Distributed Checkpoint (DCP).

:class:`StorageWriter` and :class:`StorageReader` make ``torch.distributed.checkpoint`` write and
read plain Zarr. :func:`install` does so for programs that offer no way to choose the storage.
:mod:`shardstore.dcp.files` reads DCP's own file format.
"""

from __future__ import annotations

from shardstore.dcp.installation import Installation, install
from shardstore.dcp.reader import StorageReader
from shardstore.dcp.writer import StorageWriter

__all__ = ["Installation", "StorageReader", "StorageWriter", "install"]
