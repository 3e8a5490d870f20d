"""Inspection of stored checkpoints without ranks and without torch: verification, differences,
statistics, layout. Nothing here prints or changes a checkpoint."""
