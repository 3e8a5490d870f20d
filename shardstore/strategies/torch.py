"""The ``torch_dist`` strategies under the module name that programs import them from.

They are :mod:`shardstore.dcp.torch_dist`'s.
"""

from __future__ import annotations

from shardstore.dcp.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

__all__ = ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"]
