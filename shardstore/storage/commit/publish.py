"""Chunks, documents and commit of a checkpoint whose writers are coordinated by somebody else.

For programs that bring their own ranks (PyTorch DCP) or none at all (converters): whoever calls
:func:`publish` has the manifests of all that was written. It knows no process groups and no state
dicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardstore.storage import arrays
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import documents, names
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import (
    MANIFEST_NAME,
    ChunkRecord,
    RankManifest,
    RankReport,
    content_digest,
)
from shardstore.storage.format.merge import Merged, merge, rank_record
from shardstore.storage.format.names import CONFIG_NAME
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.options import SaveOptions

__all__ = [
    "CONFIG",
    "CONFIG_NAME",
    "About",
    "commit_record",
    "last_documents",
    "publish",
    "write_chunks",
]

CONFIG = "config"
"""In ``attributes.shardstore`` of the root: the content of ``metadata.json``, so that who has the
root document needs no other."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What the root document says beside the arrays.

    Attributes:
        common_backend: name and version of the backend of what is no array.
        attributes: attributes of the root group.
        record: further members of ``attributes.shardstore``.
        world_size: number of writers.
        seconds: how long the writing took.
    """

    common_backend: tuple[str, int]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    seconds: float = 0.0


def write_chunks(
    attempt: Attempt,
    options: SaveOptions,
    manifest: RankManifest,
    metas: Iterable[tuple[ArrayMeta, bool]],
    writes: Sequence[ChunkWrite],
) -> None:
    """Write chunks into an attempt and note them. Called by each writer, for its own chunks.

    Args:
        attempt: where to.
        options: how.
        manifest: gets a row a chunk.
        metas: the arrays of ``writes``, and whether this writer creates them.
        writes: whole chunks.

    Raises:
        StorageError: the store refused.
    """
    manifest.array_documents = options.array_documents
    created = []
    for meta, first in metas:
        text = manifest.add_array(meta, created=first)
        if first:
            created.append((meta, text))

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        manifest.add_chunk(item.array, item.index, record)

    if not options.array_documents:
        arrays.create_folders(attempt.location, [meta for meta, _ in created])
    elif not attempt.defers_documents:
        arrays.create_arrays(attempt.location, created, threads=options.threads)
    arrays.mover_for(attempt.location, options, attempt).write(writes, done)


def publish(
    attempt: Attempt,
    options: SaveOptions,
    reports: Sequence[bytes | RankReport],
    about: About,
) -> None:
    """Check that everything was written exactly once, and commit. Called by one process.

    Args:
        attempt: where everything was written.
        options: how.
        reports: of each writer, see :func:`merge`.
        about: what the root document says.

    Raises:
        AccessPatternError: chunks are missing or were written twice; nothing is committed.
        StorageError: as :meth:`Attempt.commit`.
    """
    with collector_paused():
        merged = merge(reports, check=options.validate)
    names.check_collisions(meta.key for meta in merged.arrays)
    backend, backend_version = about.common_backend
    config = {
        "sharded_backend": "zarr",
        "sharded_backend_version": 2,
        "common_backend": backend,
        "common_backend_version": backend_version,
    }
    with collector_paused():
        record = commit_record(attempt, merged, about.world_size, about.seconds)
        last = [(CONFIG_NAME, json.dumps(config).encode())]
        last += last_documents(merged, record, about.attributes, {**about.record, CONFIG: config})
    if merged.array_documents and attempt.defers_documents:
        attempt.put_all([(f"{node}/zarr.json", t.encode()) for node, t in merged.documents])
    attempt.commit(last, durable=options.durable)


def commit_record(
    attempt: Attempt, merged: Merged, world_size: int, seconds: float
) -> dict[str, Any]:
    """What the commit says of itself, for people."""
    record = {
        "attempt": attempt.id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": world_size,
        "arrays": len(merged.arrays),
        "chunks": len(merged.manifest.crc),
        "stored_bytes": int(merged.manifest.stored.sum()),
        "reused_bytes": merged.reused_bytes,
        "seconds": round(seconds, 3),
        "shardstore": _version(),
        "ranks": rank_record(merged.ranks),
    }
    content = content_digest(merged.arrays, merged.manifest)
    return record if content is None else {**record, "content": content}


def last_documents(
    merged: Merged,
    record: Mapping[str, Any],
    attributes: Mapping[str, Any],
    further: Mapping[str, Any] | None = None,
) -> list[tuple[str, bytes]]:
    """Names and contents of the manifest and the root document, which is the commit.

    Args:
        merged: all ranks' manifests.
        record: :func:`commit_record`.
        attributes: of the root group.
        further: members of ``attributes.shardstore`` beside ours.
    """
    about = {
        **(further or {}),
        "format_version": documents.FORMAT_VERSION,
        "commit": record,
        documents.CHUNK_SUMS: merged.manifest.chunk_sums(),
    }
    if not merged.array_documents:
        about[documents.ARRAY_DOCUMENTS] = False
    if merged.files:
        about[documents.FILE_SUMS] = dict(sorted(merged.files.items()))
    root = documents.root_document(merged.documents, {**attributes, "shardstore": about})
    return [(MANIFEST_NAME, merged.manifest.to_bytes()), ("zarr.json", root.encode())]


@cache
def _version() -> str:
    try:
        return version("shardstore")
    except PackageNotFoundError:
        return "unknown"
