"""What tests and scripts share: S3 servers, a proxy with faults, memory, roads. Not installed."""
