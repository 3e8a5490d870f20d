"""Attempts, the commit, and the deletion of checkpoints."""
