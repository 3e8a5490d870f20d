"""Locations, file systems, object stores and their errors."""
