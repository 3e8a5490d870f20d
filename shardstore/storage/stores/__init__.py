"""Where bytes live: locations, file systems, object stores and their errors."""
