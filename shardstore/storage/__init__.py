"""The storage engine: arrays, chunks, bytes and URLs. It uses no process group and no state
dict."""
