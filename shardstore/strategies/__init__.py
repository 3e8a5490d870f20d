"""Save and load strategies: policy over :mod:`shardstore.storage`.

Imports nothing by itself, so that ``import shardstore`` stays free of torch.
"""
