"""Looking into stored checkpoints without ranks and without torch: statistics, differences, layout,
sizes. Nothing here prints, and nothing changes a checkpoint."""
