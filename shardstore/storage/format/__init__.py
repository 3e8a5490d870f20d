"""The format on disk as pure functions: names, data types, grid, documents, manifest."""
