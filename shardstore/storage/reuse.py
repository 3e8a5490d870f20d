"""Chunks that an earlier checkpoint has already: linked, not sent again.

A chunk is the earlier one where both lie at the same place of the same grid, are encoded alike, and
have the same 128-bit hash (xxh3, kept in the manifest; a 32-bit checksum would be no proof). On one
file system it becomes a hard link: each checkpoint is whole by itself, and any may be deleted. It
knows two locations and a mover; not who saves.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import xxhash

from shardstore.errors import NotACheckpointError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.chunk_bytes import free_scratch, pieces
from shardstore.storage.chunks import ChunkWrite
from shardstore.storage.counters import counters
from shardstore.storage.documents import ArrayMeta
from shardstore.storage.location import Location
from shardstore.storage.manifest import MANIFEST_NAME, ChunkRecord
from shardstore.storage.parallel import default_threads, run_batched

__all__ = ["BASE_DOCUMENTS", "BaseChunks", "ReusingMover", "Writer", "read_base"]

logger = logging.getLogger(__name__)

BASE_DOCUMENTS = ("zarr.json", MANIFEST_NAME)
"""What must be known of a base."""

Adopt = Callable[[str, int], bool]
"""``(name below the checkpoint, bytes)`` -> whether the base's object is at the new place now."""


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
    """The writing half of a :class:`Mover`."""

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""


class BaseChunks:
    """What is known of the chunks of a base.

    Args:
        location: the base.
        texts: its documents, see :func:`read_base`.
    """

    def __init__(self, location: Location, texts: Mapping[str, bytes]) -> None:
        self.location = location
        self._stored = StoredCheckpoint(location, read_document=lambda _, name: texts[name])
        self._manifest = self._stored.manifest
        self._arrays = self._stored.arrays

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


def _place(array: ArrayMeta) -> tuple[object, ...]:
    return (array.node, array.grid, array.dtype, array.codecs, array.separator, array.zarr_format)


class ReusingMover:
    """A mover that writes only what a base has not.

    Args:
        mover: writes the rest.
        base: what is there already.
        location: root of the new checkpoint.
        reused: called with the bytes of each chunk that was not sent, one call at a time.
        threads: threads that hash and write.
    """

    def __init__(
        self,
        mover: Writer,
        base: BaseChunks,
        location: Location,
        reused: Callable[[int], None],
        *,
        threads: int | None = None,
    ) -> None:
        self._mover = mover
        self._base = base
        self._location = location
        self._reused = reused
        self._threads = threads or default_threads()
        self._lock = threading.Lock()
        self._adopt = adopter(base.location, location)

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Mover.write`."""
        known = {array: self._base.knows(array) for array in {item.array for item in writes}}

        def locked(item: ChunkWrite, record: ChunkRecord) -> None:
            with self._lock:
                done(item, record)

        def work(batch: Sequence[ChunkWrite]) -> None:
            try:
                for item in batch:
                    if not (known[item.array] and self._reuse(item, locked)):
                        # One at a time: what a staged source waits for may be what others hold.
                        self._mover.write([item], locked)
            finally:
                free_scratch()

        run_batched(
            writes,
            work,
            threads=self._threads,
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=1 << 20,
        )

    def _reuse(self, item: ChunkWrite, done: Callable[[ChunkWrite, ChunkRecord], None]) -> bool:
        adopt, array = self._adopt, item.array
        if adopt is None:
            return False
        hasher = xxhash.xxh3_128()
        for piece in pieces(item.data(), array.grid.chunk_shape):
            hasher.update(piece)
        record = self._base.record(array, item.index, hasher.digest())
        if record is None:
            return False
        if not adopt(f"{array.node}/{array.chunk_key(item.index)}", record.stored_bytes):
            return False
        counters.add(bytes_reused=record.stored_bytes)
        with self._lock:
            self._reused(record.stored_bytes)
        done(item, record)
        return True


def adopter(base: Location, location: Location) -> Adopt | None:
    """How objects of one location become another's without being sent; ``None``: they can not.

    A hard link between local folders. A store that copies on its own side would be the other way.
    """
    if not (base.is_local and location.is_local):
        logger.warning(
            "chunks of %s can not be reused at %s: everything is sent", base.url, location.url
        )
        return None
    refused = threading.Event()

    def link(name: str, stored_bytes: int) -> bool:
        if refused.is_set():
            return False
        source, target = f"{base.url}/{name}", f"{location.url}/{name}"
        try:
            if os.stat(source).st_size != stored_bytes:
                return False  # the base is damaged there; the new checkpoint shall not be
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


def _retry(source: str, target: str) -> bool:
    """After somebody else made the folder first."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True
