"""PyTorch Distributed Checkpoint (DCP) over shardstore, both ways.

:class:`StorageWriter` and :class:`StorageReader` put plain Zarr under any program that uses
``torch.distributed.checkpoint``, and :func:`install` under those that let nobody choose its
storage; :mod:`shardstore.dcp.files` reads DCP's own file format.
"""

from __future__ import annotations

from shardstore.dcp.installation import Installation, install
from shardstore.dcp.reader import StorageReader
from shardstore.dcp.writer import StorageWriter

__all__ = ["Installation", "StorageReader", "StorageWriter", "install"]
