"""The end of every save: chunks noted, reports merged and checked, documents written, commit.

Saves of this package call the parts; programs that bring their own ranks (PyTorch DCP) or none
(converters) call :func:`publish` with the reports of all writers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardstore.storage import arrays
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import documents
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import (
    MANIFEST_NAME,
    ChunkRecord,
    RankManifest,
    content_digest,
)
from shardstore.storage.format.merge import Merged, merge, rank_record
from shardstore.storage.format.names import CONFIG_NAME, check_collisions
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.collector import collector_paused
from shardstore.storage.movers.parallel import run_together
from shardstore.storage.options import SaveOptions

CONFIG = "config"
"""In ``attributes.shardstore`` of the root: the content of ``metadata.json``. A reader of the root
document needs no other."""
BUDGET_PART = 16
"""Files that are kept to be sent together take one part in so many of the memory for chunks."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What the root document says beside the arrays.

    Attributes:
        common_backend: name and version of the backend of what is no array; ``None``: the
            checkpoint gets no ``metadata.json``.
        sharded_backend: name and version of the backend of the arrays.
        attributes: attributes of the root group.
        record: further members of ``attributes.shardstore``.
        world_size: number of writers.
        seconds: how long the writing took.
        has_root: whether there is a root document; else ``metadata.json`` is the commit.
    """

    common_backend: tuple[str, int] | None
    sharded_backend: tuple[str, int] = ("zarr", 2)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    seconds: float = 0.0
    has_root: bool = True

    @property
    def config(self) -> dict[str, Any] | None:
        """The content of ``metadata.json``."""
        if self.common_backend is None:
            return None
        return {
            "sharded_backend": self.sharded_backend[0],
            "sharded_backend_version": self.sharded_backend[1],
            "common_backend": self.common_backend[0],
            "common_backend_version": self.common_backend[1],
        }


class Files:
    """Files of an attempt other than chunks.

    In an object store each is a request that somebody waits for: they are kept until there are
    many, and sent side by side.

    Args:
        attempt: the attempt that they are a part of.
        manifest: gets their checksums.
        budget_bytes: memory for chunks under way; a sixteenth of it on top is for kept files.
    """

    def __init__(self, attempt: Attempt, manifest: RankManifest, budget_bytes: int) -> None:
        self._attempt, self._manifest = attempt, manifest
        self._room = budget_bytes // BUDGET_PART
        self._kept: list[tuple[str, bytes]] = []
        self._kept_bytes = 0

    def put(self, name: str, data: bytes) -> None:
        """Write a file, or keep it for :meth:`flush`.

        Raises:
            StorageError: the store refused this file or an earlier one.
        """
        self._manifest.add_file(name, data)
        if not self._attempt.defers_documents:
            self._attempt.put(name, data)
            return
        if self._kept_bytes + len(data) > self._room:
            self.flush()
        self._kept.append((name, data))
        self._kept_bytes += len(data)

    def flush_beside(self, work: Callable[[], None]) -> None:
        """Write the files that are kept while ``work`` goes on. Raises as :meth:`put`."""
        if self._kept:
            run_together(self.flush, work)
        else:
            work()

    def flush(self) -> None:
        """Write the files that are kept. Raises as :meth:`put`."""
        kept, self._kept = self._kept, []
        self._kept_bytes = 0
        if kept:
            self._attempt.put_all(kept)


def note_arrays(
    manifest: RankManifest, metas: Iterable[tuple[ArrayMeta, bool]]
) -> list[tuple[ArrayMeta, str]]:
    """Note arrays in a manifest. Returns those that this writer creates, with their documents.

    Args:
        manifest: of the writer.
        metas: arrays, and whether this writer creates them.
    """
    noted = [(meta, manifest.add_array(meta, created=first)) for meta, first in metas]
    return [(meta, text) for meta, text in noted if text]


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
        StorageError: the store failed.
    """
    manifest.array_documents = options.array_documents
    created = note_arrays(manifest, metas)

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        manifest.add_chunk(item.array, item.index, record)

    if not attempt.defers_documents:
        arrays.write_documents(attempt, options, created)
    arrays.mover_for(attempt.location, options, attempt).write(writes, done)


def publish(
    attempt: Attempt,
    options: SaveOptions,
    reports: Sequence[bytes | RankManifest],
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
    merged = merge_reports(reports, options)
    if merged.array_documents and attempt.defers_documents:
        created = [(m, t) for m, (_, t) in zip(merged.arrays, merged.documents, strict=True)]
        arrays.write_documents(attempt, options, created)
    commit(attempt, options, merged, about)


def merge_reports(reports: Sequence[bytes | RankManifest], options: SaveOptions) -> Merged:
    """Put the writers' reports together and check them. Raises as :func:`publish`."""
    with collector_paused():
        merged = merge(reports, check=options.validate)
    check_collisions(meta.key for meta in merged.arrays)
    return merged


def commit(attempt: Attempt, options: SaveOptions, merged: Merged, about: About) -> dict[str, Any]:
    """Write the last documents: ``metadata.json``, the manifest, and the root, which is the commit.

    Returns:
        The commit record; empty where there is no root document.

    Raises:
        StorageError: as :meth:`Attempt.commit`.
    """
    config, record, last = about.config, {}, []
    if config is not None:
        last.append((CONFIG_NAME, json.dumps(config).encode()))
    if about.has_root:
        with collector_paused():
            record = _commit_record(attempt, merged, about)
            last.append((MANIFEST_NAME, merged.manifest.to_bytes()))
            last.append(("zarr.json", _root(merged, about, record)))
    attempt.commit(last, durable=options.durable)
    return record


def _commit_record(attempt: Attempt, merged: Merged, about: About) -> dict[str, Any]:
    """What the commit says of itself, for people."""
    content = content_digest(merged.arrays, merged.manifest)
    return {
        "attempt": attempt.id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": about.world_size,
        "arrays": len(merged.arrays),
        "chunks": len(merged.manifest.crc),
        "stored_bytes": int(merged.manifest.stored.sum()),
        "reused_bytes": merged.reused_bytes,
        "seconds": round(about.seconds, 3),
        "shardstore": _version(),
        "ranks": rank_record(merged.ranks),
        **({} if content is None else {"content": content}),
    }


def _root(merged: Merged, about: About, record: Mapping[str, Any]) -> bytes:
    """Return the root document, which is the commit."""
    ours: dict[str, Any] = {
        **about.record,
        **({} if about.config is None else {CONFIG: about.config}),
        "format_version": documents.FORMAT_VERSION,
        "commit": record,
        documents.CHUNK_SUMS: merged.manifest.chunk_sums(),
    }
    if not merged.array_documents:
        ours[documents.ARRAY_DOCUMENTS] = False
    if merged.files:
        ours[documents.FILE_SUMS] = dict(sorted(merged.files.items()))
    return documents.root_document(merged.documents, {**about.attributes, "shardstore": ours})


@cache
def _version() -> str:
    try:
        return version("shardstore")
    except PackageNotFoundError:
        return "unknown"
