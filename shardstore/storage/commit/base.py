"""Chunks that an earlier checkpoint has already: linked or copied by the store, not sent again.

A chunk is the earlier one where both lie at the same place of the same grid, are encoded alike, and
have the same 128-bit hash (xxh3, kept in the manifest; a 32-bit checksum would be no proof). On one
file system it becomes a hard link, in one object store a copy that the store makes: each checkpoint
is whole by itself, and any may be deleted. What the base says it has need not be there any more:
size and stored checksum are looked at always, the bytes where that is asked for.

A copy must not replace what a newer attempt wrote, just as a PUT must not. Few stores copy on
condition, so the claims are looked at before each copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import xxhash

from shardstore.errors import NotACheckpointError, StorageError
from shardstore.storage.checkpoint import StoredCheckpoint
from shardstore.storage.commit.attempt import Attempt, SupersededError
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import MANIFEST_NAME, ChunkRecord, RankManifest
from shardstore.storage.movers.chunk_bytes import pieces
from shardstore.storage.movers.chunks import ChunkWrite
from shardstore.storage.movers.codecs import CRC, CRC_BYTES
from shardstore.storage.movers.counters import counters
from shardstore.storage.movers.parallel import default_threads, run_batched
from shardstore.storage.movers.verify import ChunkChecker
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location

__all__ = ["COPY_THREADS", "BaseChunks", "ReusingMover", "Writer", "read_base", "reusing"]

logger = logging.getLogger(__name__)

COPY_THREADS = 32
"""Requests for copies under way: each waits for the store, and holds no data."""

_ENDS_BEFORE = "InvalidRange"
"""What S3 says where an object ends before the range begins (Amazon S3 API, "Error responses")."""


def read_base(location: Location) -> dict[str, bytes]:
    """The documents of a checkpoint that another one shall be based on. Called by one rank.

    Raises:
        NotACheckpointError, DamagedCheckpointError: there is no checkpoint with a manifest, or it
            cannot be read.
    """
    found = {}
    for name in ("zarr.json", MANIFEST_NAME):
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
        stored = StoredCheckpoint(location, documents=texts)
        self._arrays, self._manifest = stored.arrays, stored.manifest
        self._checker = ChunkChecker(stored, self._manifest)

    def knows(self, array: ArrayMeta) -> bool:
        """Whether the base has the same array: grid, data type and codecs."""
        theirs = self._arrays.get(array.key)
        return theirs is not None and _place(theirs) == _place(array)

    def record(self, array: ArrayMeta, index: Sequence[int], digest: bytes) -> ChunkRecord | None:
        """The base's record of a chunk, if it is the same by its hash."""
        manifest = self._manifest
        assert manifest is not None
        row, running = manifest.row(array, index), manifest.running_of(array, index)
        if row is None or running is None or manifest.digest[row].tobytes() != digest:
            return None
        stored, crc = int(manifest.stored[row]), int(manifest.crc[row])
        return ChunkRecord(stored, crc, digest, running[:-1].tolist())

    def is_whole(self, array: ArrayMeta, index: tuple[int, ...]) -> bool:
        """Read a chunk: whether it is what was written. Warns of one that is not."""
        size, problem = self._checker.check(self._arrays[array.key], index)
        counters.add(bytes_read=size)
        if problem is not None:
            _warn_of_damage(f"{self.location.url}/{_name(array, index)}", problem.text)
        return problem is None


def _place(array: ArrayMeta) -> tuple[object, ...]:
    return (array.node, array.grid, array.dtype, array.codecs, array.separator, array.zarr_format)


def _name(array: ArrayMeta, index: tuple[int, ...]) -> str:
    return f"{array.node}/{array.chunk_key(index)}"


def _warn_of_damage(url: str, what: str) -> None:
    logger.warning(
        "%s, which is to be taken over, %s: it is written anew here, and the checkpoint that it is "
        "part of is damaged",
        url,
        what,
    )


def reusing(
    mover: Writer,
    base: BaseChunks,
    attempt: Attempt,
    manifest: RankManifest,
    options: SaveOptions,
) -> Writer:
    """A mover that writes only what a base has not; ``mover`` itself where nothing can be reused.

    Args:
        mover: writes the rest.
        base: what is there already.
        attempt: what is written.
        manifest: gets the bytes that were not sent.
        options: of the save.
    """
    one, other = base.location, attempt.location
    if one.is_local and other.is_local:
        return ReusingMover(mover, base, Links(one, other), manifest, options)
    if not one.is_local and not other.is_local:
        # Not their own "==", which is about the thread that made them too.
        first, second = one.remote.fs, other.remote.fs
        if type(first) is type(second) and first.storage_options == second.storage_options:
            return ReusingMover(mover, base, Copies(one, other, attempt), manifest, options)
    logger.warning(
        "chunks of %s cannot be reused at %s, which is another store: everything is sent",
        one.url,
        other.url,
    )
    return mover


@dataclass
class ReusingMover:
    """See :func:`reusing`; ``adopter`` brings an object of the base to its new place."""

    mover: Writer
    base: BaseChunks
    adopter: Adopter
    manifest: RankManifest
    options: SaveOptions

    def __post_init__(self) -> None:
        self._hashing = threading.Semaphore()
        self._lock = threading.Lock()

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Writer.write`."""
        rest: list[ChunkWrite] = []
        # As many chunks are in memory at a time as the budget has room for.
        largest = max((item.array.chunk_bytes for item in writes), default=1)
        self._hashing = threading.Semaphore(max(1, self.options.budget_bytes // largest))

        def work(batch: Sequence[ChunkWrite]) -> None:
            for item in batch:
                record = self._taken_over(item)
                if record is None:
                    rest.append(item)
                    continue
                counters.add(bytes_reused=record.stored_bytes)
                with self._lock:
                    self.manifest.reused_bytes += record.stored_bytes
                    done(item, record)

        far = self.adopter.is_far
        run_batched(
            writes,
            work,
            threads=COPY_THREADS if far else self.options.threads or default_threads(),
            weight=lambda item: item.array.chunk_bytes,
            batch_weight=1 if far else 1 << 20,
        )
        self.mover.write(rest, done)

    def _taken_over(self, item: ChunkWrite) -> ChunkRecord | None:
        """Take a chunk over from the base, if it has the same and gives it."""
        array, hasher = item.array, xxhash.xxh3_128()
        if not self.base.knows(array):
            return None
        with self._hashing:
            for piece in pieces(item.data(), array.grid.chunk_shape):
                hasher.update(piece)
            record = self.base.record(array, item.index, hasher.digest())
            if record is None:
                return None
            if self.options.verify_base and not self.base.is_whole(array, item.index):
                return None
        tail = CRC.pack(record.crc) if array.has_crc and array.is_plain else None
        taken = self.adopter.take(_name(array, item.index), record.stored_bytes, tail)
        return record if taken else None


class Adopter(ABC):
    """Makes objects of a base those of another place, without sending them. Safe from any thread.

    Args:
        base: where they are.
        location: where they shall be.
    """

    verb: str
    is_far = False
    least_bytes = CRC_BYTES

    def __init__(self, base: Location, location: Location) -> None:
        self._base, self._location = base, location
        self._refused = threading.Event()

    def take(self, name: str, stored_bytes: int, tail: bytes | None) -> bool:
        """Take an object over.

        Args:
            name: its name below both places.
            stored_bytes: its size.
            tail: its last four bytes; ``None``: not known.

        Returns:
            Whether it is at its new place. ``False``: it has to be sent.

        Raises:
            SupersededError: a newer attempt took the target over.
        """
        if self._refused.is_set() or stored_bytes < self.least_bytes:
            return False
        try:
            found = self._end(name, stored_bytes - CRC_BYTES)
            damage = _damage(found, stored_bytes, tail)
            if damage is None:
                return self._adopt(name)
            _warn_of_damage(f"{self._base.url}/{name}", damage)
        except SupersededError:
            raise
        except OSError as error:
            if not self._refused.is_set():
                self._refused.set()
                logger.warning(
                    "chunks of %s cannot be %s to %s (%s): they are sent",
                    self._base.url,
                    self.verb,
                    self._location.url,
                    error.strerror or error,
                )
        return False

    @abstractmethod
    def _end(self, name: str, start: int) -> bytes | None:
        """A few bytes of the base's object, from ``start`` on; ``None``: there is none."""

    @abstractmethod
    def _adopt(self, name: str) -> bool:
        """Make it the other place's, unless there is one of its name."""


def _damage(found: bytes | None, stored_bytes: int, tail: bytes | None) -> str | None:
    """What is wrong with an object, by what is there of its last bytes and after them."""
    if found is None:
        return "is missing"
    if len(found) != CRC_BYTES:
        more = "more" if len(found) > CRC_BYTES else "fewer"
        return f"has {more} than its {stored_bytes} bytes"
    return (
        "ends in another checksum than when it was written" if tail not in (None, found) else None
    )


class Links(Adopter):
    """Hard links from one local folder to another."""

    verb = "linked"

    def _end(self, name: str, start: int) -> bytes | None:
        try:
            with open(f"{self._base.url}/{name}", "rb", buffering=0) as file:
                return os.pread(file.fileno(), CRC_BYTES + 1, start)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _adopt(self, name: str) -> bool:
        source, target = f"{self._base.url}/{name}", f"{self._location.url}/{name}"
        try:
            try:
                os.link(source, target)
            except FileNotFoundError:
                with suppress(FileExistsError):  # somebody else made it first
                    os.mkdir(os.path.dirname(target))
                os.link(source, target)
        except FileExistsError:
            return False
        return True


class Copies(Adopter):
    """Copies that an object store makes of its own objects.

    Args:
        base: where they are.
        location: where they shall be, in the same store.
        attempt: says whether it still owns ``location``.
    """

    verb = "copied"
    is_far = True
    least_bytes = 4096
    """Smaller chunks are sent: two requests for a copy are larger than they are."""

    def __init__(self, base: Location, location: Location, attempt: Attempt) -> None:
        super().__init__(base, location)
        self._attempt = attempt
        self._turn = threading.Lock()
        self._checked = -1.0

    def _end(self, name: str, start: int) -> bytes | None:
        try:
            return self._base.remote.read_range(name, start, None)
        except StorageError as error:
            if _ENDS_BEFORE in str(error):
                return b""
            raise

    def _adopt(self, name: str) -> bool:
        self._check()
        try:
            return self._location.remote.copy_from(self._base.remote, name, name, create=True)
        except FileNotFoundError:
            return False

    def _check(self) -> None:
        """Ask for the claims. What threads ask at the same time is asked once: a question that was
        put after a thread came here counts for it."""
        asked = time.monotonic()
        with self._turn:
            if self._checked < asked:
                begun = time.monotonic()
                self._attempt.check()
                self._checked = begun
