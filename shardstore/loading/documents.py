"""The documents that every rank of a load needs, and whether all ranks found the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeAlias

import xxhash

from shardstore.core import CONFIG_FNAME
from shardstore.loading.context import ROOT_DOCUMENT
from shardstore.storage.movers.parallel import local_ranks, run_together
from shardstore.storage.stores.location import Location
from shardstore.strategies.common import COMMON_STATE_FNAME

__all__ = ["Documents", "digest_of", "each_reads", "read_documents"]

Documents: TypeAlias = Mapping[tuple[str, str], bytes | None]
"""``(url, name) -> bytes``, ``None`` where there is no such document."""


def read_documents(location: Location) -> Documents:
    """Read the documents of a checkpoint, or find that they are not there.

    Raises:
        StorageError: the store refused.
    """
    names = (ROOT_DOCUMENT, CONFIG_FNAME, COMMON_STATE_FNAME)

    def read(name: str) -> bytes | None:
        try:
            return location.read(name)
        except FileNotFoundError:
            return None

    if location.is_local:
        return {(location.url, name): read(name) for name in names}
    found = run_together(*(partial(read, name) for name in names))
    return {(location.url, name): data for name, data in zip(names, found, strict=True)}


def each_reads(location: Location, world_size: int) -> bool:
    """Whether each rank reads the documents itself.

    So it is where the page cache of one machine hands them to all of its ranks; between machines,
    and from an object store, one rank reads them once for all.
    """
    return location.is_local and local_ranks() >= world_size


def digest_of(documents: Documents | None) -> bytes | None:
    """What tells documents from all others, 128 bits; ``None`` of none."""
    if documents is None:
        return None
    hasher = xxhash.xxh3_128()
    for _, data in sorted(documents.items()):
        hasher.update(b"-" if data is None else len(data).to_bytes(8, "little") + b"+")
        hasher.update(data or b"")
    return hasher.digest()
