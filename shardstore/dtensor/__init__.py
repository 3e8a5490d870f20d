"""State dicts of PyTorch: DTensors and plain tensors as sharded tensors."""

from shardstore.dtensor.adoption import shard as shard
