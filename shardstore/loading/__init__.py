"""The steps of a load on each rank: documents, plan, reading, assembly."""
