"""One digest of all arrays of a checkpoint: equal where every chunk of every array is equal.

Pure. It is made from the manifest's 128-bit hashes, so nothing is read for it. It knows nothing of
what is not an array.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import xxhash

from shardstore.storage.documents import ArrayMeta
from shardstore.storage.manifest import Manifest

__all__ = ["content_digest"]


def content_digest(arrays: Iterable[ArrayMeta], manifest: Manifest) -> str | None:
    """XXH3-128, in hexadecimal, over keys, data types, shapes and chunk shapes (as JSON), and then
    the hashes of all chunks, in the order of the keys.

    Args:
        arrays: of a checkpoint, in any order.
        manifest: of the same.

    Returns:
        ``None`` where there is no chunk at all, or the manifest is not about these arrays.
    """
    metas = sorted(arrays, key=lambda meta: meta.key)
    rows = [(meta.node, meta.grid.size, meta.chunk_bytes) for meta in metas]
    if rows != manifest.arrays or not len(manifest.digest):
        return None
    described = [[m.key, m.dtype, list(m.shape), list(m.grid.chunk_shape)] for m in metas]
    hasher = xxhash.xxh3_128(json.dumps(described, separators=(",", ":")).encode())
    hasher.update(manifest.digest.tobytes())
    return hasher.hexdigest()
