"""Save and load strategies, the interface of Megatron-Core.

This module imports nothing, so that ``import shardstore`` does not import torch.
"""
