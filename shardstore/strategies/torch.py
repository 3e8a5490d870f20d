"""The ``torch_dist`` strategies of :mod:`shardstore.dcp.torch_dist`, under Megatron-Core's name."""

from __future__ import annotations

from shardstore.dcp.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

__all__ = ["TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"]
