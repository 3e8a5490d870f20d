"""The checkpoints of one training run: saved by step, old ones deleted, the newest restored."""

from shardstore.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from shardstore.manager.restore import Restored as Restored
