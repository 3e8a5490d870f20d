"""Inspection of stored checkpoints without ranks and without torch: verification, differences,
statistics, layout."""
