"""The last steps of every save: record chunks, merge and check reports, write documents, commit.

:func:`shardstore.save` calls each step. Programs with their own ranks (PyTorch DCP) and without
ranks (converters) call :func:`publish` with the reports of all writers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.packing import ChunkWriter, PackingMover, write_pack
from shardstore.storage.format import documents
from shardstore.storage.format.documents import ArrayMeta, array_document
from shardstore.storage.format.manifest import ChunkRecord, RankManifest, content_digest
from shardstore.storage.format.merge import Merged, joined, merge
from shardstore.storage.format.names import CONFIG_NAME, MANIFEST_NAME, check_collisions
from shardstore.storage.movers.chunks import ChunkWrite, SmallFiles, constant_record
from shardstore.storage.movers.mover import Mover
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.checksums import crc32c
from shardstore.storage.runtime.parallel import collector_paused

CONFIG = "config"
"""Member of ``attributes.shardstore`` of the root group with the content of ``metadata.json``, so
that a reader of the root document needs no other document."""
BUDGET_PART = 16
"""Files that wait to be sent together take at most 1/16 of the memory for chunks."""


@dataclass(frozen=True, kw_only=True)
class RootContent:
    """The content of the root document other than the arrays.

    Attributes:
        common_backend: name and version of the backend of common values; with ``None`` the
            checkpoint gets no ``metadata.json``.
        sharded_backend: name and version of the backend of the arrays.
        attributes: attributes of the root group.
        record: further members of ``attributes.shardstore``.
        world_size: number of writers.
        seconds: duration of the writing, in seconds.
        has_root: whether the checkpoint has a root document. If not, ``metadata.json`` is the
            commit.
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
        """The content of ``metadata.json``; ``None`` if the checkpoint has none."""
        if self.common_backend is None:
            return None
        return {
            "sharded_backend": self.sharded_backend[0],
            "sharded_backend_version": self.sharded_backend[1],
            "common_backend": self.common_backend[0],
            "common_backend_version": self.common_backend[1],
        }


@dataclass
class Files:
    """Files of an attempt other than chunks.

    Files are collected and written in parallel: in an object store, each is one request.

    Attributes:
        attempt: the attempt that the files belong to.
        manifest: receives their checksums.
        budget_bytes: memory for chunks in flight; collected files may take 1/16 of it in addition.
    """

    attempt: Attempt
    manifest: RankManifest
    budget_bytes: int
    _kept: list[tuple[str, bytes]] = field(default_factory=list)
    _kept_bytes: int = 0

    def put(self, name: str, data: bytes) -> None:
        """Collect a file; first write those that were collected if their room is full.

        Raises:
            StorageError: the store refused an earlier file.
        """
        self.manifest.files[name] = crc32c(data, 0), len(data)
        if self._kept_bytes + len(data) > self.budget_bytes // BUDGET_PART:
            self.attempt.put_all(self.taken())
        self._kept.append((name, data))
        self._kept_bytes += len(data)

    def add_arrays(self, arrays: Iterable[tuple[ArrayMeta, bool]]) -> None:
        """Record arrays in the manifest, and the chunks of constant ones. Collect the documents of
        those that this writer creates, if arrays have documents. The root document contains them
        too, so the manifest has no checksums of them.

        Args:
            arrays: arrays, and whether this writer creates them.

        Raises:
            AccessPatternError: see :meth:`RankManifest.add_array`.
        """
        manifest = self.manifest
        for meta, created in arrays:
            manifest.add_array(meta, created=created)
            if created and meta.constant is not None:
                for index in map(meta.grid.index_at, range(meta.grid.size)):
                    manifest.add_chunk(meta, index, constant_record(meta, index))
            documented = created and manifest.array_documents
            if documented and meta.has_document(packs=manifest.has_packs):
                data = array_document(meta).encode()
                self._kept.append((f"{meta.node}/{meta.document_name}", data))
                self._kept_bytes += len(data)

    def taken(self) -> list[tuple[str, bytes]]:
        """Return names and contents of the collected files, which the caller must write."""
        kept, self._kept, self._kept_bytes = self._kept, [], 0
        return kept


def put_chunks(
    attempt: Attempt,
    options: SaveOptions,
    manifest: RankManifest,
    metas: Iterable[tuple[ArrayMeta, bool]],
    writes: Sequence[ChunkWrite],
    files: SmallFiles = (),
) -> None:
    """Write chunks, and the documents of their arrays, into an attempt and record them. Each writer
    calls it for its own chunks.

    Args:
        attempt: the attempt of the save.
        options: options of the save.
        manifest: receives one row per chunk.
        metas: the arrays of ``writes``, and whether this writer creates them.
        writes: whole chunks.
        files: further files, which are in the manifest.

    Raises:
        StorageError: the store failed.
    """
    manifest.array_documents, manifest.has_packs = options.array_documents, options.pack
    own = Files(attempt, manifest, options.budget_bytes)
    own.add_arrays(metas)

    def done(item: ChunkWrite, record: ChunkRecord) -> None:
        manifest.add_chunk(item.array, item.index, record)

    mover: ChunkWriter = Mover.of(attempt.location, options, attempt.check)
    if options.pack:
        mover = PackingMover(mover, attempt, manifest, options)
    mover.write(writes, done, files)
    # After the chunks: by its document, the next save finds a chunk that a late writer left.
    attempt.put_all(own.taken())
    write_pack(attempt, manifest)


def publish(
    attempt: Attempt,
    options: SaveOptions,
    reports: Sequence[bytes | RankManifest],
    about: RootContent,
) -> dict[str, Any]:
    """Check that every chunk was written exactly once, and commit. One process calls it.

    Args:
        attempt: the attempt with all chunks and the documents of the arrays.
        options: options of the save.
        reports: the reports of all writers, see :func:`merge`.
        about: further content of the root document.

    Returns:
        The commit record, see :func:`commit`.

    Raises:
        AccessPatternError: chunks are missing or were written twice; nothing is committed.
        CheckpointExistsError, StorageError: see :meth:`Attempt.commit`.
    """
    return commit(attempt, options, merge_reports(attempt, reports, options), about)


def merge_reports(
    attempt: Attempt, reports: Sequence[bytes | RankManifest], options: SaveOptions, rank: int = 0
) -> Merged:
    """Merge the writers' reports and check them. Write the pack of what the writers have left.

    Args:
        attempt: the attempt of the save.
        reports: the reports of all writers.
        options: options of the save.
        rank: global rank of the caller.

    Raises:
        AccessPatternError: chunks are missing or were written twice.
        KeyNameError: the names of two arrays collide.
        StorageError: the store failed.
    """
    with collector_paused():
        whole = joined(reports, rank)
        write_pack(attempt, whole)
        merged = merge([whole], check=options.validate_access_integrity)
    check_collisions(meta.key for meta in merged.arrays)
    return merged


def commit(
    attempt: Attempt, options: SaveOptions, merged: Merged, about: RootContent
) -> dict[str, Any]:
    """Write the last documents: ``metadata.json``, the manifest, and the root, which is the commit.

    Returns:
        The commit record; empty if there is no root document.

    Raises:
        CheckpointExistsError, StorageError: see :meth:`Attempt.commit`.
    """
    config, record, last = about.config, {}, []
    if config is not None:
        last.append((CONFIG_NAME, json.dumps(config).encode()))
    if about.has_root:
        with collector_paused():
            record = _commit_record(attempt, merged, about)
            manifest = merged.manifest.to_bytes()
            last.append((MANIFEST_NAME, manifest))
            last.append(("zarr.json", _root(merged, about, record, len(manifest))))
    attempt.commit(last, durable=options.durable)
    return record


def _commit_record(attempt: Attempt, merged: Merged, about: RootContent) -> dict[str, Any]:
    """Return the commit record: who wrote the checkpoint, when, and how much."""
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
        "ranks": merged.ranks,
        **({} if content is None else {"content": content}),
    }


def _root(
    merged: Merged, about: RootContent, record: Mapping[str, Any], manifest_bytes: int
) -> bytes:
    """Return the root document, which is the commit."""
    files, manifest = sorted(merged.files.items()), merged.manifest
    is_new = any(array.constant or array.places for array in merged.arrays)
    ours: dict[str, Any] = {
        **about.record,
        **({} if about.config is None else {CONFIG: about.config}),
        "format_version": documents.FORMAT_VERSION if is_new else documents.PLAIN_VERSION,
        "commit": record,
        documents.CHUNK_SUMS: manifest.by_node(manifest.crc),
    }
    compressed = [m.node for m in merged.arrays if m.is_compressed and m.places is None]
    if compressed:
        ours[documents.CHUNK_BYTES] = manifest.by_node(manifest.stored, compressed)
    if merged.packs is not None:
        packed = (array for array in merged.arrays if array.places is not None)
        ours[documents.PACKS] = documents.packed_arrays(packed, merged.packs)
    if not merged.array_documents:
        ours[documents.ARRAY_DOCUMENTS] = False
    if files:
        ours[documents.FILE_SUMS] = {name: crc for name, (crc, _) in files}
    sizes = {name: size for name, (_, size) in files}
    ours[documents.FILE_BYTES] = {MANIFEST_NAME: manifest_bytes, **sizes}
    return documents.root_document(merged.documents, {**about.attributes, "shardstore": ours})


@cache
def _version() -> str:
    try:
        return version("shardstore")
    except (PackageNotFoundError, OSError):  # an unreadable file of the installation too
        return "unknown"
