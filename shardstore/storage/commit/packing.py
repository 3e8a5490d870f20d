"""Collects small chunks in packs, and writes other chunks through a mover.

A pack is closed when it is full, and after a call of :meth:`PackingMover.write` if it has at least
:attr:`PackingMover.loose` bytes. What is left goes with the writer's report: who joins the reports
of several writers writes a pack of what they have left, and who commits writes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format.manifest import RankManifest
from shardstore.storage.format.packs import MOST_BYTES
from shardstore.storage.movers.chunks import ChunkWrite, EncodedChunk, SmallFiles, WriteDone
from shardstore.storage.options import SaveOptions
from shardstore.storage.runtime.counters import counters


def most_bytes(options: SaveOptions) -> int:
    """Return the size at which a pack is closed. While it is written, it is in memory up to four
    times."""
    return min(MOST_BYTES, options.budget_bytes // 5)


class ChunkWriter(Protocol):
    """What writes whole chunks."""

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """See :meth:`Mover.write`."""


@dataclass
class PackingMover:
    """Puts the chunks of packed arrays into packs.

    Attributes:
        mover: writes the other chunks.
        attempt: the attempt of the save.
        manifest: receives the places of the chunks, and holds the pack that is not full.
        options: options of the save.
        loose: size in bytes below which a pack is left for another writer to write.
    """

    mover: ChunkWriter
    attempt: Attempt
    manifest: RankManifest
    options: SaveOptions
    loose: int = 0

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """See :meth:`Mover.write`."""
        others, most = list[ChunkWrite](), most_bytes(self.options)
        for item in writes:
            if item.array.places is None:
                others.append(item)
                continue
            chunk = EncodedChunk(item.array, item.data())
            name = item.array.chunk_name(item.index)
            file, first = self.manifest.pack_chunk(name, next(iter(chunk)))
            record = replace(chunk.record, file=file, first=first)
            counters.add(bytes_written=record.stored_bytes, chunks_written=1)
            done(item, record)
            write_pack(self.attempt, self.manifest, from_bytes=most)
        pack = self.manifest.close_pack(self.loose)
        self.mover.write(others, done, [*files, pack] if pack else files)


def write_pack(attempt: Attempt, manifest: RankManifest, *, from_bytes: int = 0) -> bool:
    """Write the manifest's loose pack, if it has at least ``from_bytes``.

    Returns:
        Whether a pack was written.

    Raises:
        StorageError: the store failed.
    """
    if pack := manifest.close_pack(from_bytes):
        attempt.put_all([pack])
    return pack is not None
