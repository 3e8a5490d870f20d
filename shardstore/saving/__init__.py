"""The steps of a save on each rank: agreement, plan, staging, writing, commit."""
