"""Checksums, threads, counters and pauses of the garbage collector, for all of storage."""
