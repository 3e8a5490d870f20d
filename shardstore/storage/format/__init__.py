"""Pure functions for the format on disk: names, data types, grid, documents, manifest."""
