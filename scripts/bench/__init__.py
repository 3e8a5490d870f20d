"""The benchmark of shardstore against raw I/O and its peers, run by `scripts/benchmark`."""
