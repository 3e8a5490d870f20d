"""PyTorch Distributed Checkpoint (DCP) over shardstore, both ways.

:class:`StorageWriter` and :class:`StorageReader` put plain Zarr under any program that uses
``torch.distributed.checkpoint``; :mod:`shardstore.dcp.files` reads DCP's own file format.
"""

from __future__ import annotations

from shardstore.dcp.reader import StorageReader
from shardstore.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
