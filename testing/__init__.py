"""What tests and scripts share: S3 servers, a proxy with faults, strikes, memory. Not installed."""
