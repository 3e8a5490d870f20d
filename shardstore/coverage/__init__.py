"""Checks that every element of every tensor is held exactly once."""
