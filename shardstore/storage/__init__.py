"""The storage engine: arrays, chunks, bytes and URLs. It knows no process group and no state
dict."""
