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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
            raise NotACheckpointError(
                f"base={location.url} has no {name}: it is not a committed checkpoint of backend "
                "('zarr', 2); leave base out",
                url=location.url,
            )
        found[name] = text
    BaseChunks(location, found)
    return found


class BaseChunks:
    """The chunks of a base.

    Args:
        location: the base.
        texts: its documents, as :func:`read_base` returns them.

    Attributes:
        damaged: texts about damaged chunks.
    """

    def __init__(self, location: Location, texts: Mapping[str, bytes]) -> None:
        self.location, self._texts = location, texts
        self.damaged: list[str] = []
        stored = StoredCheckpoint(location, documents=texts)
        self._arrays, self._manifest = stored.arrays, stored.manifest

    def knows(self, array: ArrayMeta) -> bool:
        """Return whether the base has the same array: grid, data type and codecs."""
        theirs = self._arrays.get(array.key)
        return theirs is not None and replace(theirs, shard_shape=array.shard_shape) == array

    def record(self, array: ArrayMeta, index: Sequence[int], digest: bytes) -> ChunkRecord | None:
        """Return the base's record of a chunk if the hashes are equal, else ``None``."""
        assert self._manifest is not None
        rows, n = self._manifest.rows(array), array.grid.linear(index)
        if rows is None or rows.digest[n].tobytes() != digest:
            return None
        return ChunkRecord(int(rows.stored[n]), int(rows.crc[n]), digest, rows.running[n].tolist())

    def damage(self, array: ArrayMeta, index: tuple[int, ...], place: Location) -> str | None:
        """Verify a chunk that was linked or copied to a place. Return a description of its damage,
        ``None`` if it is intact."""
        size, problem = check_chunk(place, self._arrays[array.key], index, self._manifest)
        counters.add(bytes_read=size)
        return None if problem is None else problem.text

    def is_unchanged(self) -> bool:
        """Return whether the base is still the checkpoint that was read.

        Raises:
            StorageError: the store failed.
        """
        return self.location.read_range("zarr.json") == self._texts["zarr.json"]

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


def reusing(
    mover: Mover,
    base: BaseChunks,
    attempt: Attempt,
    manifest: RankManifest,
    options: SaveOptions,
) -> Mover | ReusingMover:
    """Return a mover that writes only chunks that the base lacks; ``mover`` if none can be reused.

    Args:
        mover: writes the other chunks.
        base: the base.
        attempt: the attempt of the save.
        manifest: receives the number of reused bytes.
        options: options of the save.
    """
    one, other = base.location, attempt.location
    if one.is_local == other.is_local and (one.is_local or one.remote.is_same_store(other.remote)):
        adopter = Adopter(one, attempt, base.damaged)
        return ReusingMover(mover, base, adopter, manifest, options)
    logger.warning(
        "chunks of %s cannot be reused at %s, which is another store; all chunks are written",
        one.url,
        other.url,
    )
    return mover


@dataclass
class ReusingMover:
    """Mover that reuses chunks, see :func:`reusing`. ``adopter`` links or copies base objects."""

    mover: Mover
    base: BaseChunks
    adopter: Adopter
    manifest: RankManifest
    options: SaveOptions
    _hashing: threading.Semaphore = field(init=False)

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone) -> None:
        """See :meth:`Mover.write`."""
        rest: list[ChunkWrite] = []
        taken: list[tuple[ChunkWrite, ChunkRecord]] = []
        # The budget limits the number of chunks in memory.
        largest = max((item.array.chunk_bytes for item in writes), default=1)
        self._hashing = threading.Semaphore(max(1, self.options.budget_bytes // largest))

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                record = self._taken_over(item)
                if record is None:
                    rest.append(item)
                else:
                    taken.append((item, record))

        far = self.adopter.is_far
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
            for item, _ in taken:
                self.adopter.drop(item.name)
                rest.append(item)
            taken.clear()
        for item, record in taken:
            counters.add(bytes_reused=record.stored_bytes)
            self.manifest.reused_bytes += record.stored_bytes
            done(item, record)
        self.mover.write(rest, done)

    def _taken_over(self, item: ChunkWrite) -> ChunkRecord | None:
        """Link or copy a chunk if the base has the same one. Return its record, else ``None``."""
        array, hasher = item.array, xxhash.xxh3_128()
        if not self.base.knows(array):
            return None
        with self._hashing:
            for piece in pieces(item.data(), array.grid.chunk_shape):
                hasher.update(piece)
            record = self.base.record(array, item.index, hasher.digest())
        if record is None:
            return None
        tail = CRC.pack(record.crc) if array.has_crc and array.is_plain else None

        def damage() -> str | None:
            if not self.options.verify_base:
                return None
            with self._hashing:
                return self.base.damage(array, item.index, self.adopter.location)

        taken = self.adopter.take(item.name, record.stored_bytes, tail, damage)
        return record if taken else None


class Adopter:
    """Links or copies objects of a base to a new checkpoint. It is thread-safe.

    Args:
        base: the base.
        attempt: the attempt that writes the new checkpoint, in the same store.
        damaged: receives a description of each damaged object.
    """

    def __init__(self, base: Location, attempt: Attempt, damaged: list[str]) -> None:
        self.location, self.is_far = attempt.location, not base.is_local
        self._base, self._attempt, self._damaged = base, attempt, damaged
        self._refused = threading.Event()
        self._turn = threading.Lock()
        self._checked = -1.0

    def take(
        self,
        name: str,
        stored_bytes: int,
        tail: bytes | None,
        damage: Callable[[], str | None] = lambda: None,
    ) -> bool:
        """Link or copy an object, and check the result, because the base may change at any time.

        Args:
            name: name of the object below both places.
            stored_bytes: its size.
            tail: its last four bytes; ``None`` if they are unknown.
            damage: verifies the object and returns a description of its damage, else ``None``.

        Returns:
            Whether the object was reused. If not, the caller must write it.

        Raises:
            SupersededError: a newer attempt owns the target.
            StorageError: a damaged copy could not be removed.
        """
        if self._refused.is_set() or stored_bytes < (LEAST_COPIED if self.is_far else CRC_BYTES):
            return False
        taken = False
        try:
            taken = self._copy(name) if self.is_far else self._link(name)
            if not taken:
                return False
            end = self.location.read_range(name, stored_bytes - CRC_BYTES, stored_bytes + 1)
            wrong = _damage(end or b"", stored_bytes, tail) or damage()
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
                    self._base.url,
                    "copied" if self.is_far else "linked",
                    self.location.url,
                    error.strerror or error,
                )
        if wrong is not None:
            self._damaged.append(f"{name}, which {wrong}")
        if taken:
            self.drop(name)
        return False

    def drop(self, name: str) -> None:
        """Remove a linked or copied object, so that no write goes through a link into the base."""
        self.location.delete(name)

    def _link(self, name: str) -> bool:
        """Make a hard link, unless the new checkpoint has a file of this name. Return whether it
        was made. Symbolic links are not reused: they may lead out of the base."""
        source, target = f"{self._base.url}/{name}", f"{self.location.url}/{name}"
        try:
            try:
                os.link(source, target, follow_symlinks=False)
            except FileNotFoundError:
                with suppress(FileExistsError):  # another thread or rank created it first
                    os.mkdir(os.path.dirname(target))
                os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return False
        if stat.S_ISREG(os.lstat(target).st_mode):
            return True
        self.drop(name)
        return False

    def _copy(self, name: str) -> bool:
        """Let the store copy an object, unless the new checkpoint has an object of this name.
        Return whether it was copied."""
        asked = time.monotonic()
        # Threads share a check: one that began after a thread came here is valid for that thread.
        with self._turn:
            if self._checked < asked:
                begun = time.monotonic()
                self._attempt.check()
                self._checked = begun
        return self.location.remote.copy_from(self._base.remote, name, name, create=True)


def _damage(found: bytes, stored_bytes: int, tail: bytes | None) -> str | None:
    """Describe an object's damage by the bytes at its expected end; ``None`` if it is intact."""
    if len(found) != CRC_BYTES:
        more = "more" if len(found) > CRC_BYTES else "fewer"
        return f"has {more} than its {stored_bytes} bytes"
    return (
        "ends in another checksum than when it was written" if tail not in (None, found) else None
    )
