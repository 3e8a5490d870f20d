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
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import xxhash

from shardstore.errors import NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.attempt import Attempt, SupersededError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import MANIFEST_NAME, ChunkRecord, RankManifest
from shardstore.storage.movers.chunk_bytes import pieces
from shardstore.storage.movers.chunks import ChunkWrite, WriteDone
from shardstore.storage.movers.codecs import CRC, CRC_BYTES
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.mover import Mover, check_chunk
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location

logger = logging.getLogger(__name__)

COPY_THREADS = 32
"""Number of concurrent copy requests. They need no memory for data."""
LEAST_COPIED = 4096
"""Smaller objects are written, because the two requests of a copy cost more."""


def read_base(location: Location) -> dict[str, bytes]:
    """Return the documents of a base. One rank calls it.

    Raises:
        NotACheckpointError, DamagedCheckpointError: the base is not a checkpoint with a manifest,
            or cannot be read.
    """
    found = {}
    for name in ("zarr.json", MANIFEST_NAME):
        if (text := location.read_range(name)) is None:
            raise location.error(
                f" has no {name}: it is not a committed checkpoint of backend ('zarr', 2); leave "
                "base out",
                NotACheckpointError,
            )
        found[name] = text
    BaseChunks(location, found)
    return found


class BaseChunks(StoredCheckpoint):
    """The chunks of a base.

    Args:
        location: the base.
        texts: its documents, as :func:`read_base` returns them.

    Attributes:
        damaged: texts about damaged chunks.
    """

    def __init__(self, location: Location, texts: Mapping[str, bytes]) -> None:
        super().__init__(location, documents=texts)
        self.arrays, self.manifest  # noqa: B018 (read now, not by each of the threads)
        self.damaged: list[str] = []

    def knows(self, array: ArrayMeta) -> bool:
        """Return whether the base has the same array: grid, data type and codecs."""
        theirs = self.arrays.get(array.key)
        return theirs is not None and replace(theirs, shard_shape=array.shard_shape) == array

    def record(self, array: ArrayMeta, index: Sequence[int], digest: bytes) -> ChunkRecord | None:
        """Return the base's record of a chunk if the hashes are equal, else ``None``."""
        assert self.manifest is not None
        rows, n = self.manifest.rows(array), array.grid.linear(index)
        if rows is None or rows.digest[n].tobytes() != digest:
            return None
        return ChunkRecord(int(rows.stored[n]), int(rows.crc[n]), digest, rows.running[n].tolist())

    def damage(self, array: ArrayMeta, index: tuple[int, ...], place: Location) -> str | None:
        """Verify a chunk that was linked or copied to a place. Return a description of its damage,
        ``None`` if it is intact."""
        size, problem = check_chunk(place, self.arrays[array.key], index, self.manifest)
        counters.add(bytes_read=size)
        return None if problem is None else problem.text

    def is_unchanged(self) -> bool:
        """Return whether the base is still the checkpoint that was read.

        Raises:
            StorageError: the store failed.
        """
        return self.location.read_range("zarr.json") == self.documents["zarr.json"]

    def warn(self) -> None:
        """Log one warning for all damaged chunks."""
        if self.damaged:
            logger.warning(
                "%d chunk(s) of the base %s are missing or damaged, and were written instead of "
                "reused, such as %s. Verify the base: it is damaged, or was replaced",
                len(self.damaged),
                self.location.url,
                "; ".join(sorted(self.damaged)[:3]),
            )


@dataclass
class ReusingMover:
    """Mover that links or copies the chunks that the base has, and writes the others.

    Attributes:
        mover: writes the other chunks.
        base: the base.
        attempt: the attempt of the save.
        manifest: receives the number of reused bytes.
        options: options of the save.
    """

    mover: Mover
    base: BaseChunks
    attempt: Attempt
    manifest: RankManifest
    options: SaveOptions

    def __post_init__(self) -> None:
        one, other = self.base.location, self.attempt.location
        self._is_far = not one.is_local
        self._refused = threading.Event()
        self._turn, self._checked = threading.Lock(), -1.0
        self._hashing = threading.Semaphore()
        if one.is_local != other.is_local or (
            self._is_far and not one.remote.is_same_store(other.remote)
        ):
            self._refused.set()
            logger.warning(
                "chunks of %s cannot be reused at %s, which is another store; all chunks are "
                "written",
                one.url,
                other.url,
            )

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone) -> None:
        """See :meth:`Mover.write`."""
        taken: dict[str, ChunkRecord] = {}
        # The budget limits the number of chunks in memory.
        largest = max((item.array.chunk_bytes for item in writes), default=1)
        self._hashing = threading.Semaphore(max(1, self.options.budget_bytes // largest))

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                if (record := self._taken_over(item)) is not None:
                    taken[item.name] = record

        far = self._is_far
        run_batched(
            writes,
            work,
            threads=COPY_THREADS if far else self.options.threads or default_threads(),
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=1 if far else 1 << 20,
        )
        if taken and not self.base.is_unchanged():
            logger.warning(
                "%s was replaced or deleted while its chunks were reused; all chunks are written",
                self.base.location.url,
            )
            for name in taken:
                self.attempt.location.delete(name)
            taken.clear()
        rest = []
        for item in writes:
            if (record := taken.get(item.name)) is None:
                rest.append(item)
                continue
            counters.add(bytes_reused=record.stored_bytes)
            self.manifest.reused_bytes += record.stored_bytes
            done(item, record)
        self.mover.write(rest, done)

    def _taken_over(self, item: ChunkWrite) -> ChunkRecord | None:
        """Link or copy a chunk if the base has the same one. Return its record, else ``None``."""
        array, hasher = item.array, xxhash.xxh3_128()
        if self._refused.is_set() or not self.base.knows(array):
            return None
        with self._hashing:
            for piece in pieces(item.data(), array.grid.chunk_shape):
                hasher.update(piece)
            record = self.base.record(array, item.index, hasher.digest())
        return record if record is not None and self.take(item, record) else None

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
        name, far = item.name, self._is_far
        if record.stored_bytes < (LEAST_COPIED if far else CRC_BYTES):
            return False
        taken = False
        try:
            taken = self._copy(name) if far else self._link(name)
            if not taken:
                return False
            wrong = self._damage(item, record)
            if wrong is None:
                return True
        except SupersededError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            wrong = "is missing"
        except OSError as error:
            wrong = None
            if not self._refused.is_set():
                self._refused.set()
                logger.warning(
                    "chunks of %s cannot be %s to %s (%s); they are written",
                    self.base.location.url,
                    "copied" if far else "linked",
                    self.attempt.location.url,
                    error.strerror or error,
                )
        if wrong is not None:
            self.base.damaged.append(f"{name}, which {wrong}")
        if taken:
            # No write may go through a link into the base.
            self.attempt.location.delete(name)
        return False

    def _damage(self, item: ChunkWrite, record: ChunkRecord) -> str | None:
        """Describe the damage of a linked or copied chunk: by the bytes at its expected end, and by
        all its bytes if the options ask for it; ``None`` if it is intact."""
        array, size, location = item.array, record.stored_bytes, self.attempt.location
        end = location.read_range(item.name, size - CRC_BYTES, size + 1) or b""
        if len(end) != CRC_BYTES:
            more = "more" if len(end) > CRC_BYTES else "fewer"
            return f"has {more} than its {size} bytes"
        if array.has_crc and array.is_plain and end != CRC.pack(record.crc):
            return "ends in another checksum than when it was written"
        if not self.options.verify_base:
            return None
        with self._hashing:
            return self.base.damage(array, item.index, location)

    def _link(self, name: str) -> bool:
        """Make a hard link, unless the new checkpoint has a file of this name. Return whether it
        was made. Symbolic links are not reused: they may lead out of the base."""
        place = self.attempt.location
        source, target = f"{self.base.location.url}/{name}", f"{place.url}/{name}"
        with suppress(FileExistsError):  # another thread or rank created it first
            os.mkdir(os.path.dirname(target))
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return False
        if stat.S_ISREG(os.lstat(target).st_mode):
            return True
        place.delete(name)
        return False

    def _copy(self, name: str) -> bool:
        """Let the store copy an object, unless the new checkpoint has an object of this name.
        Return whether it was copied."""
        asked = time.monotonic()
        # Threads share a check: one that began after a thread came here is valid for that thread.
        with self._turn:
            if self._checked < asked:
                begun = time.monotonic()
                self.attempt.check()
                self._checked = begun
        return self.attempt.location.remote.copy_from(self.base.location.remote, name)
