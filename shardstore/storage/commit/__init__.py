"""How a checkpoint appears whole or not at all, and how it goes."""
