"""Chunks that an earlier checkpoint has already: linked or copied by the store, not sent again.

A chunk is the earlier one where both lie at the same place of the same grid, are encoded alike, and
have the same 128-bit hash (xxh3, kept in the manifest; a 32-bit checksum would be no proof). On one
file system it becomes a hard link, in one object store a copy that the store makes: each checkpoint
is whole by itself, and any may be deleted. The base may be damaged, and may be replaced or deleted
while this save goes on, so it is the link or copy that is checked: its size and stored checksum
always, its bytes where that is asked for. Afterwards the root of the base must still be the one
that was read.

A copy must not replace what a newer attempt wrote, just as a PUT must not. Few stores copy on
condition, so the claims are looked at before each copy.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import xxhash

from shardstore.errors import NotACheckpointError
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

logger = logging.getLogger(__name__)

COPY_THREADS = 32
"""Requests for copies under way: each waits for the store, and holds no data."""


def read_base(location: Location) -> dict[str, bytes]:
    """Return the documents of a checkpoint that another one shall be based on. Called by one rank.

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
        self.location, self._texts = location, texts
        self.damaged: list[str] = []
        stored = StoredCheckpoint(location, documents=texts)
        self._arrays, self._manifest = stored.arrays, stored.manifest

    def knows(self, array: ArrayMeta) -> bool:
        """Return whether the base has the same array: grid, data type and codecs."""
        theirs = self._arrays.get(array.key)
        return theirs is not None and _place(theirs) == _place(array)

    def record(self, array: ArrayMeta, index: Sequence[int], digest: bytes) -> ChunkRecord | None:
        """Return the base's record of a chunk, if it is the same by its hash."""
        manifest = self._manifest
        assert manifest is not None
        row, running = manifest.row(array, index), manifest.running_of(array, index)
        if row is None or running is None or manifest.digest[row].tobytes() != digest:
            return None
        stored, crc = int(manifest.stored[row]), int(manifest.crc[row])
        return ChunkRecord(stored, crc, digest, running[:-1].tolist())

    def damage(self, array: ArrayMeta, index: tuple[int, ...], place: Location) -> str | None:
        """Read a chunk that was taken over to a place: what is wrong with it, if anything."""
        checker = ChunkChecker(StoredCheckpoint(place, documents=self._texts), self._manifest)
        size, problem = checker.check(self._arrays[array.key], index)
        counters.add(bytes_read=size)
        return None if problem is None else problem.text

    def is_unchanged(self) -> bool:
        """Return whether the checkpoint that was read is still there.

        Raises:
            StorageError: the store failed.
        """
        try:
            return self.location.read("zarr.json") == self._texts["zarr.json"]
        except FileNotFoundError:
            return False

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


def _place(array: ArrayMeta) -> tuple[object, ...]:
    return (array.node, array.grid, array.dtype, array.codecs, array.separator, array.zarr_format)


def _name(array: ArrayMeta, index: tuple[int, ...]) -> str:
    return f"{array.node}/{array.chunk_key(index)}"


def reusing(
    mover: Writer,
    base: BaseChunks,
    attempt: Attempt,
    manifest: RankManifest,
    options: SaveOptions,
) -> Writer:
    """Return a mover that writes only what a base has not; ``mover`` itself where nothing can be
    reused.

    Args:
        mover: writes the rest.
        base: what is there already.
        attempt: what is written.
        manifest: gets the bytes that were not sent.
        options: of the save.
    """
    one, other = base.location, attempt.location
    if one.is_local and other.is_local:
        return ReusingMover(mover, base, Links(one, other, base.damaged), manifest, options)
    if not one.is_local and not other.is_local:
        # Not their own "==", which is about the thread that made them too.
        first, second = one.remote.fs, other.remote.fs
        if type(first) is type(second) and first.storage_options == second.storage_options:
            adopter = Copies(one, other, attempt, base.damaged)
            return ReusingMover(mover, base, adopter, manifest, options)
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

    def write(
        self, writes: Sequence[ChunkWrite], done: Callable[[ChunkWrite, ChunkRecord], None]
    ) -> None:
        """See :meth:`Writer.write`."""
        rest: list[ChunkWrite] = []
        taken: list[tuple[ChunkWrite, ChunkRecord]] = []
        # As many chunks are in memory at a time as the budget has room for.
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
                "%s was replaced or deleted while its chunks were taken over: all are written anew",
                self.base.location.url,
            )
            for item, _ in taken:
                self.adopter.drop(_name(item.array, item.index))
                rest.append(item)
            taken.clear()
        for item, record in taken:
            counters.add(bytes_reused=record.stored_bytes)
            self.manifest.reused_bytes += record.stored_bytes
            done(item, record)
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
        tail = CRC.pack(record.crc) if array.has_crc and array.is_plain else None

        def damage() -> str | None:
            if not self.options.verify_base:
                return None
            with self._hashing:
                return self.base.damage(array, item.index, self.adopter.location)

        taken = self.adopter.take(_name(array, item.index), record.stored_bytes, tail, damage)
        return record if taken else None


class Adopter(ABC):
    """Makes objects of a base those of another place, without sending them. Safe from any thread.

    Args:
        base: the base.
        location: the new checkpoint.
        damaged: receives a text for each damaged object.
    """

    verb: str
    is_far = False
    least_bytes = CRC_BYTES

    def __init__(self, base: Location, location: Location, damaged: list[str]) -> None:
        self._base, self.location, self._damaged = base, location, damaged
        self._refused = threading.Event()

    def take(
        self,
        name: str,
        stored_bytes: int,
        tail: bytes | None,
        damage: Callable[[], str | None] = lambda: None,
    ) -> bool:
        """Take an object over, and check what was taken: the base may change at any time.

        Args:
            name: its name below both places.
            stored_bytes: its size.
            tail: its last four bytes; ``None``: not known.
            damage: says what else is wrong with it.

        Returns:
            Whether it is at its new place. ``False``: it has to be sent.

        Raises:
            SupersededError: a newer attempt took the target over.
            StorageError: what is of no use could not be removed.
        """
        if self._refused.is_set() or stored_bytes < self.least_bytes:
            return False
        taken = False
        try:
            taken = self._adopt(name)
            if not taken:
                return False
            wrong = _damage(self._end(name, stored_bytes - CRC_BYTES), stored_bytes, tail)
            wrong = wrong or damage()
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
                    "chunks of %s cannot be %s to %s (%s): they are sent",
                    self._base.url,
                    self.verb,
                    self.location.url,
                    error.strerror or error,
                )
        if wrong is not None:
            self._damaged.append(f"{name}, which {wrong}")
        if taken:
            self.drop(name)
        return False

    def drop(self, name: str) -> None:
        """Remove an object that was taken over: a link is never written into."""
        self.location.delete(name)

    @abstractmethod
    def _end(self, name: str, start: int) -> bytes:
        """Return a few bytes of an object that was taken over, from ``start`` on."""

    @abstractmethod
    def _adopt(self, name: str) -> bool:
        """Make it the other place's, unless there is one of its name."""


def _damage(found: bytes, stored_bytes: int, tail: bytes | None) -> str | None:
    """What is wrong with an object, by what is there of its last bytes and after them."""
    if len(found) != CRC_BYTES:
        more = "more" if len(found) > CRC_BYTES else "fewer"
        return f"has {more} than its {stored_bytes} bytes"
    return (
        "ends in another checksum than when it was written" if tail not in (None, found) else None
    )


class Links(Adopter):
    """Hard links from one local folder to another. A symbolic link in the base is not taken over:
    what it leads to is not the base's."""

    verb = "linked"

    def _end(self, name: str, start: int) -> bytes:
        with open(f"{self.location.url}/{name}", "rb", buffering=0) as file:
            return os.pread(file.fileno(), CRC_BYTES + 1, start)

    def _adopt(self, name: str) -> bool:
        source, target = f"{self._base.url}/{name}", f"{self.location.url}/{name}"
        try:
            try:
                os.link(source, target, follow_symlinks=False)
            except FileNotFoundError:
                with suppress(FileExistsError):  # somebody else made it first
                    os.mkdir(os.path.dirname(target))
                os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return False
        if stat.S_ISREG(os.lstat(target).st_mode):
            return True
        self.drop(name)
        return False


class Copies(Adopter):
    """Copies that an object store makes of its own objects.

    Args:
        base: the base.
        location: the new checkpoint, in the same store.
        attempt: the attempt at ``location``, which must still own it.
        damaged: receives a text for each damaged object.
    """

    verb = "copied"
    is_far = True
    least_bytes = 4096
    """Smaller chunks are sent: two requests for a copy are larger than they are."""

    def __init__(
        self, base: Location, location: Location, attempt: Attempt, damaged: list[str]
    ) -> None:
        super().__init__(base, location, damaged)
        self._attempt = attempt
        self._turn = threading.Lock()
        self._checked = -1.0

    def _end(self, name: str, start: int) -> bytes:
        return self.location.remote.read_range(name, start, None) or b""

    def _adopt(self, name: str) -> bool:
        self._check()
        return self.location.remote.copy_from(self._base.remote, name, name, create=True)

    def _check(self) -> None:
        """Ask for the claims. What threads ask at the same time is asked once: a question that was
        put after a thread came here counts for it."""
        asked = time.monotonic()
        with self._turn:
            if self._checked < asked:
                begun = time.monotonic()
                self._attempt.check()
                self._checked = begun
