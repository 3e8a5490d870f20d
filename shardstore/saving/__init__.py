"""The steps of a save on each rank: agreement, plan, copy, writing, commit."""
