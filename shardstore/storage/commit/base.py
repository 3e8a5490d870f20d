"""Link or copy unchanged chunks from an earlier checkpoint (the base) instead of writing them.

A chunk is reused if it has the same index, grid, encoding and 128-bit hash (xxh3, from the
manifest; 32-bit checksums collide too often). On the same file system it becomes a hard link, in
the same object store a copy made by the store. So each checkpoint is complete by itself, and any
checkpoint may be deleted. The base may be damaged, and may be replaced or deleted during the save.
So the save always checks the size and the stored checksum of links and copies, and their bytes if
the options ask for it. At the end, the root document of the base must be unchanged.

A copy must not replace objects of a newer attempt. Few stores support conditional copies, so this
module reads the claims before each copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from shardstore.errors import NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint, settled
from shardstore.storage.commit.attempt import Attempt, SupersededError
from shardstore.storage.format.manifest import ChunkRecord, RankManifest
from shardstore.storage.format.names import MANIFEST_NAME
from shardstore.storage.movers.chunk_bytes import pieces
from shardstore.storage.movers.chunks import CRC, CRC_BYTES, ChunkWrite, SmallFiles, WriteDone
from shardstore.storage.movers.mover import Mover
from shardstore.storage.runtime.counters import counters
from shardstore.storage.runtime.parallel import default_threads, run_batched
from shardstore.storage.stores.location import Location

logger = logging.getLogger(__name__)


def read_base(location: Location) -> dict[str, bytes]:
    """Return the documents of a base, after the end of this process's asynchronous save to it. One
    rank calls it.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the base is not a checkpoint with a manifest,
            or cannot be read.
    """
    found = {}
    settled(location)
    for name in ("zarr.json", MANIFEST_NAME):
        if (text := location.read_range(name)) is None:
            raise location.error(
                f" has no {name}: it is not a committed checkpoint of backend ('zarr', 2); leave "
                "base out",
                NotACheckpointError,
            )
        found[name] = text
    stored = StoredCheckpoint(location, documents=found)
    stored.arrays, stored.manifest  # noqa: B018 (parsed before the save begins)
    return found


@dataclass
class ReusingMover:
    """Mover that links or copies the chunks that the base has, and writes the others.

    Attributes:
        mover: writes the other chunks.
        base: the base, with the documents that :func:`read_base` returned.
        attempt: the attempt of the save.
        manifest: receives the number of reused bytes.
    """

    mover: Mover
    base: StoredCheckpoint
    attempt: Attempt
    manifest: RankManifest

    def __post_init__(self) -> None:
        one, other = self.base.location, self.attempt.location
        # Read now, not by each of the threads.
        self._arrays, self._base_manifest = self.base.arrays, self.base.manifest
        self._damaged: list[str] = []
        self._refused = threading.Event()
        self._turn, self._checked = threading.Lock(), -1.0
        self._hashing = threading.Semaphore()
        if not other.shares_store(one):
            self._refuse("that is another store; all chunks are written")

    def _refuse(self, why: str) -> None:
        """Reuse no further chunks. Log the reason, once."""
        if not self._refused.is_set():
            self._refused.set()
            logger.warning(
                "chunks of %s cannot be %s to %s: %s",
                self.base.location.url,
                self.base.location.copied,
                self.attempt.location.url,
                why,
            )

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """See :meth:`Mover.write`."""
        taken: dict[str, ChunkRecord] = {}
        options, base = self.mover.options, self.base
        # The budget limits the number of chunks in memory.
        largest = max((item.array.chunk_bytes for item in writes), default=1)
        self._hashing = threading.Semaphore(max(1, options.budget_bytes // largest))

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                if (record := self._taken_over(item)) is not None:
                    taken[item.array.chunk_name(item.index)] = record

        threads = base.location.copy_requests or options.threads or default_threads()
        run_batched(writes, work, threads=threads)
        if taken and base.location.read_range("zarr.json") != base.documents["zarr.json"]:
            logger.warning(
                "%s was replaced or deleted while its chunks were reused; all chunks are written",
                base.location.url,
            )
            for name in taken:
                self.attempt.location.delete(name)
            taken.clear()
        others = list[ChunkWrite]()
        for item in writes:
            if (record := taken.get(item.array.chunk_name(item.index))) is None:
                others.append(item)
                continue
            counters.add(bytes_reused=record.stored_bytes)
            self.manifest.reused_bytes += record.stored_bytes
            done(item, record)
        self.mover.write(others, done, files)

    def _taken_over(self, item: ChunkWrite) -> ChunkRecord | None:
        """Link or copy a chunk if the base has an equal one, of an array with the same grid, data
        type and codecs. Return its record, else ``None``."""
        array, hasher = item.array, xxhash.xxh3_128()
        theirs = self._arrays.get(array.key)
        if theirs is None or replace(theirs, shard_shape=array.shard_shape) != array:
            return None
        rows = None if self._base_manifest is None else self._base_manifest.rows(array)
        if rows is None or self._refused.is_set():
            return None
        with self._hashing:
            for piece in pieces(item.data(), array.grid.chunk_shape):
                hasher.update(piece)
        n, digest = array.grid.linear(item.index), hasher.digest()
        if rows.digest[n].tobytes() != digest:
            return None
        stored, crc = int(rows.stored[n]), int(rows.crc[n])
        record = ChunkRecord(stored, crc, digest, rows.running[n].tolist())
        return record if self.take(item, record) else None

    def take(self, item: ChunkWrite, record: ChunkRecord) -> bool:
        """Link or copy a chunk, and check the result, because the base may change at any time.

        Args:
            item: the chunk.
            record: the base's record of it.

        Returns:
            Whether the chunk was reused. If not, the caller must write it.

        Raises:
            SupersededError: a newer attempt owns the target.
            StorageError: a damaged copy could not be removed.
        """
        name, place = item.array.chunk_name(item.index), self.attempt.location
        if record.stored_bytes < max(CRC_BYTES, place.least_copied_bytes):
            return False
        taken, wrong = False, None
        try:
            self._check()
            taken = place.copy_from(self.base.location, name)
            if not taken or (wrong := self._damage(item, record)) is None:
                return taken
        except SupersededError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            wrong = "is missing"
        except OSError as error:
            self._refuse(f"{error.strerror or error}; they are written")
        if wrong is not None:
            self._damaged.append(f"{name}, which {wrong}")
        if taken:
            # No write may go through a link into the base.
            place.delete(name)
        return False

    def _damage(self, item: ChunkWrite, record: ChunkRecord) -> str | None:
        """Describe the damage of a linked or copied chunk: by the bytes at its expected end, and by
        all its bytes if the options ask for it; ``None`` if it is intact."""
        array, size, location = item.array, record.stored_bytes, self.attempt.location
        name = array.chunk_name(item.index)
        end = location.read_range(name, size - CRC_BYTES, size + 1) or b""
        if len(end) != CRC_BYTES:
            more = "more" if len(end) > CRC_BYTES else "fewer"
            return f"has {more} than its {size} bytes"
        if array.has_crc and array.is_plain and end != CRC.pack(record.crc):
            return "ends in another checksum than when it was written"
        if not self.mover.options.verify_base:
            return None
        with self._hashing:
            theirs = self._arrays[array.key]
            read, problem = Mover.of(location).verify(theirs, item.index, self._base_manifest)
        counters.add(bytes_read=read)
        return None if problem is None else problem.text

    def warn(self) -> None:
        """Log one warning for all damaged chunks."""
        if self._damaged:
            logger.warning(
                "%d chunk(s) of the base %s are missing or damaged, and were written instead of "
                "reused, such as %s. Verify the base: it is damaged, or was replaced",
                len(self._damaged),
                self.base.location.url,
                "; ".join(sorted(self._damaged)[:3]),
            )

    def _check(self) -> None:
        """Raise :class:`SupersededError` if a newer attempt owns the target."""
        asked = time.monotonic()
        # Threads share a check: one that began after a thread came here is valid for that thread.
        with self._turn:
            if self._checked < asked:
                begun = time.monotonic()
                self.attempt.check()
                self._checked = begun
