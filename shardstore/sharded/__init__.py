"""Sharded tensors, objects and factories: their common base, positions and layouts."""
