"""Attempts to write a checkpoint, their commit, and the deletion of checkpoints."""
