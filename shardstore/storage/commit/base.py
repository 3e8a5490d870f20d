"""Chunks that an earlier checkpoint has already: linked, not sent again.

A chunk is the earlier one where both lie at the same place of the same grid, are encoded alike, and
have the same 128-bit hash (xxh3, kept in the manifest; a 32-bit checksum would be no proof). On one
file system it becomes a hard link, in one object store a copy that the store makes: each checkpoint
is whole by itself, and any may be deleted. What the base says it has need not be there any more:
size and stored checksum are looked at always, the bytes where that is asked for. It knows two
locations and a mover; not who saves.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import xxhash

from shardstore.errors import NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.commit.server_copy import (
    COPY_THREADS,
    ServerCopies,
    same_store,
    warn_of_damage,
)
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import MANIFEST_NAME, ChunkRecord
from shardstore.storage.movers.chunk_bytes import free_scratch, pieces
from shardstore.storage.movers.chunks import ChunkWrite, told
from shardstore.storage.movers.codecs import CRC, CRC_BYTES
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import ByteLimit, default_threads, run_batched
from shardstore.storage.movers.verify import ChunkChecker
from shardstore.storage.options import DEFAULT_BUDGET_BYTES
from shardstore.storage.stores.location import Location

__all__ = ["BASE_DOCUMENTS", "BaseChunks", "ReusingMover", "Writer", "adopter", "read_base"]

logger = logging.getLogger(__name__)

BASE_DOCUMENTS = ("zarr.json", MANIFEST_NAME)
"""What must be known of a base."""

Adopt = Callable[[str, int, bytes | None], bool]
"""``(name below the checkpoint, bytes, the last four bytes if known)`` -> whether the base's object
is at the new place now."""


def read_base(location: Location) -> dict[str, bytes]:
    """The documents of a checkpoint that another one shall be based on. Called by one rank.

    Raises:
        NotACheckpointError, DamagedCheckpointError: there is no checkpoint with a manifest, or it
            can not be read.
    """
    found = {}
    for name in BASE_DOCUMENTS:
        try:
            found[name] = location.read(name)
        except FileNotFoundError:
            raise NotACheckpointError(
                f"base={location.url} has no {name}: it is not a committed checkpoint of backend "
                "('zarr', 2); leave base out",
                url=location.url,
            ) from None
    BaseChunks(location, found)
    return found


class Writer(Protocol):
    """What writes chunks: to files, or to an object store."""

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """Write chunks; ``done`` is called with each chunk and its record, from any thread."""


class BaseChunks:
    """What is known of the chunks of a base.

    Args:
        location: the base.
        texts: its documents, see :func:`read_base`.
    """

    def __init__(self, location: Location, texts: Mapping[str, bytes]) -> None:
        self.location = location
        self._stored = StoredCheckpoint(location, documents=texts)
        self._manifest = self._stored.manifest
        self._arrays = self._stored.arrays
        self._checker = ChunkChecker(self._stored, self._manifest)

    def knows(self, array: ArrayMeta) -> bool:
        """Whether the base has the same array: grid, data type and codecs."""
        theirs = self._arrays.get(array.key)
        return theirs is not None and _place(theirs) == _place(array)

    def record(self, array: ArrayMeta, index: Sequence[int], digest: bytes) -> ChunkRecord | None:
        """The base's record of a chunk, if it is the same by its hash."""
        assert self._manifest is not None
        row = self._manifest.row(array, index)
        if row is None or self._manifest.digest[row].tobytes() != digest:
            return None
        running = self._manifest.running_of(array, index)
        inner = [] if running is None else [int(n) for n in running[:-1]]
        stored, crc = int(self._manifest.stored[row]), int(self._manifest.crc[row])
        return ChunkRecord(stored, crc, digest, inner)

    def is_whole(self, array: ArrayMeta, index: tuple[int, ...]) -> bool:
        """Read a chunk: whether it is what was written. Warns of one that is not."""
        size, problem = self._checker.check(self._arrays[array.key], index)
        counters.add(bytes_read=size)
        if problem is not None:
            name = f"{array.node}/{array.chunk_key(index)}"
            warn_of_damage(f"{self.location.url}/{name}", problem.text)
        return problem is None


def _place(array: ArrayMeta) -> tuple[object, ...]:
    return (array.node, array.grid, array.dtype, array.codecs, array.separator, array.zarr_format)


class ReusingMover:
    """A mover that writes only what a base has not.

    Args:
        mover: writes the rest.
        base: what is there already.
        adopt: brings an object of the base to its new place, see :func:`adopter`.
        reused: called with the bytes of each chunk that was not sent, one call at a time.
        threads: threads that hash, and write files.
        budget_bytes: memory for chunks that are on their way to an object store, or from it.
        verify: read what is going to be taken over.
    """

    def __init__(
        self,
        mover: Writer,
        base: BaseChunks,
        adopt: Adopt,
        reused: Callable[[int], None],
        *,
        threads: int | None = None,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        verify: bool = False,
    ) -> None:
        self._verify = verify
        self._mover = mover
        self._base = base
        self._adopt = adopt
        self._reused = reused
        self._threads = threads or default_threads()
        self._limit = ByteLimit(budget_bytes)
        self._is_far = isinstance(adopt, ServerCopies)
        self._lock = threading.Lock()

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Writer.write`."""
        known = {array: self._base.knows(array) for array in {item.array for item in writes}}

        def locked(item: ChunkWrite, record: ChunkRecord) -> None:
            with self._lock:
                done(item, record)

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                with told(item):
                    record = self._same(item) if known[item.array] else None
                    if self._taken_over(item, record, locked):
                        continue
                    # Ours, and the copy of who sends it. One at a time: what a staged source waits
                    # for may be what others hold.
                    with self._held(2 * item.array.chunk_bytes):
                        self._mover.write([item], locked)

        run_batched(
            writes,
            work,
            threads=COPY_THREADS if self._is_far else self._threads,
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=1 if self._is_far else 1 << 20,
        )

    def _held(self, size: int) -> AbstractContextManager[None]:
        """Wait for room for the bytes of a chunk. Many requests to a store are under way at a
        time."""
        return self._limit.taken(size) if self._is_far else nullcontext()

    def _taken_over(
        self,
        item: ChunkWrite,
        record: ChunkRecord | None,
        done: Callable[[ChunkWrite, ChunkRecord], None],
    ) -> bool:
        """Take a chunk over from the base, if it has the same and gives it."""
        if record is None:
            return False
        array, stored = item.array, record.stored_bytes
        if self._verify:
            # A store's object is in memory as a whole while it is looked at.
            with self._held(array.chunk_bytes):
                if not self._base.is_whole(array, item.index):
                    return False
        tail = CRC.pack(record.crc) if array.has_crc and array.is_plain else None
        if not self._adopt(f"{array.node}/{array.chunk_key(item.index)}", stored, tail):
            return False
        counters.add(bytes_reused=stored)
        with self._lock:
            self._reused(stored)
        done(item, record)
        return True

    def _same(self, item: ChunkWrite) -> ChunkRecord | None:
        """The base's record of a chunk, if it has the same."""
        hasher = xxhash.xxh3_128()
        with self._held(item.array.chunk_bytes):
            for piece in pieces(item.data(), item.array.grid.chunk_shape):
                hasher.update(piece)
            free_scratch()
        return self._base.record(item.array, item.index, hasher.digest())


def adopter(base: Location, location: Location, attempt: Attempt | None = None) -> Adopt | None:
    """How objects of one place become another's without being sent; ``None``: they can not.

    A hard link between local folders, a copy within an object store.

    Args:
        base: where they are.
        location: where they shall be.
        attempt: what is written at ``location``.
    """
    if same_store(base, location):
        return ServerCopies(base, location, attempt)
    if not (base.is_local and location.is_local):
        logger.warning(
            "chunks of %s can not be reused at %s, which is another store: everything is sent",
            base.url,
            location.url,
        )
        return None
    refused = threading.Event()

    def link(name: str, stored_bytes: int, tail: bytes | None) -> bool:
        if refused.is_set():
            return False
        source, target = f"{base.url}/{name}", f"{location.url}/{name}"
        try:
            damage = _seen_at_once(source, stored_bytes, tail)
            if damage is not None:
                warn_of_damage(source, damage)
                return False
            try:
                os.link(source, target)
            except FileNotFoundError:
                os.mkdir(os.path.dirname(target))
                os.link(source, target)
        except FileExistsError:
            return _retry(source, target)
        except OSError as error:
            if not refused.is_set():
                refused.set()
                logger.warning(
                    "chunks of %s can not be linked to %s (%s): they are sent",
                    base.url,
                    location.url,
                    error.strerror,
                )
            return False
        return True

    return link


def _seen_at_once(path: str, size: int, tail: bytes | None) -> str | None:
    """What is wrong with a file as far as its size and its last bytes tell."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    try:
        found = os.fstat(fd).st_size
        if found != size:
            return f"has {found} bytes instead of {size}"
        if tail is not None and os.pread(fd, CRC_BYTES, size - CRC_BYTES) != tail:
            return "ends in another checksum than when it was written"
        return None
    finally:
        os.close(fd)


def _retry(source: str, target: str) -> bool:
    """After somebody else made the folder first."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
