"""Manages the checkpoints of a training run: saves steps, deletes old ones, restores the newest."""

from shardstore.manager.checkpoint_manager import CheckpointManager as CheckpointManager
from shardstore.manager.checkpoint_manager import Restored as Restored
