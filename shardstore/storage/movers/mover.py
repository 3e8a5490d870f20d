"""The protocol of movers, which move chunks between memory and one location.

:class:`~.files.FolderMover` implements it for folders, :class:`~.object_mover.ObjectMover` for
object stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import numpy as np

from shardstore.errors import DamagedCheckpointError
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.chunk_bytes import as_bytes, slabs, whole_chunk
from shardstore.storage.movers.chunks import (
    BadChunkError,
    ChunkPart,
    ChunkWrite,
    GetManifest,
    ReadDone,
    RegionRead,
    SmallFiles,
    WriteDone,
    chunk_parts,
    constant_record,
    constant_value,
)
from shardstore.storage.movers.ranges import FilePosition, Slab, read_packed
from shardstore.storage.movers.verify import ChunkVerifier, chunk_error
from shardstore.storage.options import DEFAULTS, SaveOptions
from shardstore.storage.runtime.counters import counters
from shardstore.storage.stores.location import Location


@dataclass(frozen=True)
class Mover(ABC):
    """Moves chunks between memory and one location.

    Attributes:
        location: root of the checkpoint or of an attempt.
        options: threads, durability and memory budget.
        check: called before an object with other content is replaced; raises if it must stay,
            because the attempt that writes no longer owns its target. A folder belongs to one
            attempt.
    """

    location: Location
    options: SaveOptions = DEFAULTS
    check: Callable[[], None] = lambda: None

    kinds: ClassVar[Mapping[type[Location], type[Mover]]]
    """Class of the location -> class of its mover; set by the package."""

    @staticmethod
    def of(
        location: Location,
        options: SaveOptions = DEFAULTS,
        check: Callable[[], None] = lambda: None,
    ) -> Mover:
        """Return the mover for a location."""
        if not hasattr(Mover, "kinds"):  # another thread imports the package: wait for it
            import_module(__package__)
        return Mover.kinds[type(location)](location, options, check)

    @abstractmethod
    def write(self, writes: Sequence[ChunkWrite], done: WriteDone, files: SmallFiles = ()) -> None:
        """Write whole chunks and other files, in the better order. Call ``done`` for each chunk,
        from any thread, one call at a time.

        Raises:
            StorageError: the store refused. The mover starts no further write and waits for the
                running ones.
        """

    def read(
        self,
        reads: Sequence[RegionRead],
        manifest: GetManifest = lambda: None,
        done: ReadDone = lambda *_: None,
    ) -> None:
        """Read regions into their destinations and verify every byte that has a checksum. Call
        ``done`` as parts arrive, from any thread.

        Raises:
            ChunkMissingError, ChunkCorruptError: a chunk is missing or damaged. The error names
                key, chunk and, if the manifest has it, the rank that wrote the chunk.
        """
        own, packed, other = list[RegionRead](), list[RegionRead](), list[RegionRead]()
        for region in reads:
            if region.array.constant is not None:
                self._read_constant(region, manifest, done)
            elif region.array.places is not None:
                packed.append(region)
            else:
                (other if region.array.codecs is None else own).append(region)
        parts = [part for region in own for part in chunk_parts(region)]
        self.read_parts(parts, manifest, done)
        if packed:
            parts = [part for region in packed for part in chunk_parts(region)]
            read_packed(self.location, parts, manifest, done, self.options.budget_bytes)
        if other:
            # Imported here: few loads need TensorStore, whose import takes long.
            from shardstore.storage.movers.tensorstore_reader import read_decoded

            read_decoded(self.location, other, manifest, done)

    def _read_constant(self, region: RegionRead, manifest: GetManifest, done: ReadDone) -> None:
        array, count = region.array, 0
        for count, index in enumerate(array.grid.overlapping(region.box), 1):
            known = array.expected_crc(array.grid.linear(index))
            if count == 1 and known not in (None, constant_record(array, index).crc):
                problem = BadChunkError("manifest", "is not stored, and its constant was changed")
                url = f"{self.location.url}/zarr.json"
                raise chunk_error(array, index, url, problem, manifest)
        region.out[...] = constant_value(array)
        done(region.out.nbytes, count)

    @abstractmethod
    def read_parts(self, parts: Sequence[ChunkPart], manifest: GetManifest, done: ReadDone) -> None:
        """Read parts of chunks whose codecs this package decodes, see :meth:`read`."""

    def verify(
        self,
        array: ArrayMeta,
        index: Sequence[int],
        manifest: Manifest | None,
        *,
        hashes: bool = False,
        stored: memoryview | None = None,
    ) -> tuple[int, BadChunkError | None]:
        """Verify one chunk and discard its data. Several threads may call it.

        Args:
            array: the chunk's array.
            index: index of the chunk.
            manifest: the checkpoint's manifest, if it has one.
            hashes: whether to compare the 128-bit hash too, which takes a second pass over the
                bytes.
            stored: the stored bytes of a packed chunk; ``None`` if its pack is missing.

        Returns:
            Number of bytes read, and the problem; ``None`` if the chunk is intact.
        """
        number, name = array.grid.linear(index), array.chunk_name(index)
        if array.constant is not None:
            return 0, self._verify_constant(array, number, manifest)
        rows = None if manifest is None else manifest.rows(array)
        crc = None if rows is None else int(rows.crc[number])
        digest = None if rows is None or not hashes else rows.digest[number].tobytes()
        verifier = ChunkVerifier(array, number, 0, array.chunk_bytes, crc=crc, digest=digest)
        try:
            if array.places is not None:
                if stored is None:
                    raise FileNotFoundError(name)
                verifier.update(stored)
                verifier.finish()
                return verifier.count, None
            if array.codecs is not None:
                return self.read_discarding(name, verifier), None
            box = array.grid.box(index)
            out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
            self.read([RegionRead(array, box, out)], lambda: manifest)
            verifier.update(as_bytes(whole_chunk(out, array.grid.chunk_shape)).data)
            verifier.finish()
            return verifier.count, None
        except BadChunkError as problem:
            return verifier.count, problem
        except FileNotFoundError:
            return 0, BadChunkError("missing", "is missing")
        except DamagedCheckpointError as error:
            return 0, BadChunkError("crc", f"cannot be decoded: {_first_line(error)}")
        except OSError as error:
            if not self.location.is_damage(error):
                raise
            return 0, BadChunkError("unreadable", f"cannot be read: {_first_line(error)}")

    @staticmethod
    def _verify_constant(
        array: ArrayMeta, number: int, manifest: Manifest | None
    ) -> BadChunkError | None:
        rows = None if manifest is None else manifest.rows(array)
        record = constant_record(array, array.grid.index_at(number))
        if rows is None or rows.digest[number].tobytes() == record.digest:
            return None
        return BadChunkError("manifest", "is not stored, and its constant is not what was saved")

    @abstractmethod
    def read_discarding(self, name: str, verifier: ChunkVerifier) -> int:
        """Read a whole chunk through its verifier, and return the number of bytes read."""

    def read_boxes(self, reads: Sequence[tuple[FilePosition, RegionRead]], done: ReadDone) -> None:
        """Read regions of arrays in several files of another format, from several threads.

        Args:
            reads: the regions, each with the position of its array.
            done: called as the destinations fill.

        Raises:
            FileNotFoundError: a file does not exist.
            EOFError: a file ends before a region does.
            StorageError: the store failed.
        """
        found = list[Slab]()
        for (name, start), read in reads:
            if read.out.size:
                shape, gap_bytes = read.array.shape, self.gap_bytes(read)
                cut = slabs(read.out, read.box, shape, start, gap_bytes)
                found += [Slab(name, first, last, out, shape) for first, last, out in cut]
        self.read_slabs(found, done)

    def read_range(self, name: str, first: int, last: int) -> bytes | memoryview:
        """Return bytes ``first:last`` of a file of another format.

        Raises:
            FileNotFoundError: the file does not exist.
            EOFError: the file ends before ``last``.
            StorageError: the store failed.
        """
        if (data := self.fetch_range(name, first, last)) is None:
            raise FileNotFoundError(f"{self.location.url}/{name}")
        if len(data) < last - first:
            raise EOFError(f"{name} ends at byte {first + len(data)}")
        counters.add(bytes_read=len(data))
        return data

    def fetch_range(self, name: str, first: int, last: int) -> bytes | memoryview | None:
        """Return bytes ``first:last`` of a file, fewer if it ends before ``last``; ``None`` if
        there is no such file. Meant for ranges that the file has: for others, an object store may
        get a second request."""
        return self.location.read_range(name, first, last)

    @abstractmethod
    def gap_bytes(self, read: RegionRead) -> int:
        """Return the largest gap inside of a slab of a region of a file."""

    @abstractmethod
    def read_slabs(self, slabs: Sequence[Slab], done: ReadDone) -> None:
        """Read slabs of files, see :meth:`read_boxes`."""


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
