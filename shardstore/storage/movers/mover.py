"""Moves chunks of any location and of any codecs, and verifies single chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardstore.errors import DamagedCheckpointError
from shardstore.storage.commit.attempt import Attempt
from shardstore.storage.format import dtypes
from shardstore.storage.format.documents import ArrayMeta
from shardstore.storage.format.manifest import Manifest
from shardstore.storage.movers.chunk_bytes import as_bytes, whole_chunk
from shardstore.storage.movers.chunks import (
    ChunkWrite,
    GetManifest,
    ReadDone,
    RegionRead,
    WriteDone,
    chunk_parts,
)
from shardstore.storage.movers.codecs import BadChunkError, most_stored_bytes
from shardstore.storage.movers.files import read_at_once, read_file, read_files, write_files
from shardstore.storage.movers.object_mover import read_objects, write_objects
from shardstore.storage.movers.verify import ChunkVerifier
from shardstore.storage.options import SaveOptions
from shardstore.storage.stores.location import Location


@dataclass(frozen=True)
class Mover:
    """Moves chunks between memory and one location.

    Attributes:
        location: root of the checkpoint or of an attempt.
        options: threads, durability and memory budget.
        attempt: the save attempt that written chunks belong to. In an object store it checks that
            the attempt still owns its target.
    """

    location: Location
    options: SaveOptions = SaveOptions()  # noqa: RUF009 (frozen)
    attempt: Attempt | None = None

    def write(self, writes: Sequence[ChunkWrite], done: WriteDone) -> None:
        """Write whole chunks. Call ``done`` for each chunk, from any thread, one call at a time.

        Raises:
            StorageError: the store refused. The mover starts no further write and waits for the
                running ones.
        """
        write = write_files if self.location.is_local else write_objects
        write(self, writes, done)

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
        own = [region for region in reads if region.array.codecs is not None]
        other = [region for region in reads if region.array.codecs is None]
        parts = [part for region in own for part in chunk_parts(region)]
        read = read_files if self.location.is_local else read_objects
        read(self, parts, manifest, done)
        if other:
            # Imported here: few loads need TensorStore, whose import takes long.
            from shardstore.storage.movers.tensorstore_reader import read_decoded

            read_decoded(self.location, other, manifest, done)


def check_chunk(
    location: Location,
    array: ArrayMeta,
    index: Sequence[int],
    manifest: Manifest | None,
    *,
    hashes: bool = False,
) -> tuple[int, BadChunkError | None]:
    """Verify one chunk and discard its data. Several threads may call it.

    Args:
        location: root of the checkpoint.
        array: the chunk's array.
        index: index of the chunk.
        manifest: the checkpoint's manifest, if it has one.
        hashes: whether to compare the 128-bit hash too, which takes a second pass over the bytes.

    Returns:
        Number of bytes read, and the problem; ``None`` if the chunk is intact.
    """
    number, name = array.grid.linear(index), array.chunk_name(index)
    rows = None if manifest is None else manifest.rows(array)
    crc = None if rows is None else int(rows.crc[number])
    digest = None if rows is None or not hashes else rows.digest[number].tobytes()
    verifier = ChunkVerifier(array, number, 0, array.chunk_bytes, crc=crc, digest=digest)
    try:
        if location.is_local and array.codecs is not None:
            path = f"{location.url}/{name}"
            size = 0 if hashes else read_at_once([(path, array, crc, None)])[0]
            return size or read_file(path, verifier), None
        if array.codecs is None:
            box = array.grid.box(index)
            out = np.empty(box.shape, dtypes.numpy_dtype(array.dtype))
            Mover(location).read([RegionRead(array, box, out)], lambda: manifest)
            verifier.update(as_bytes(whole_chunk(out, array.grid.chunk_shape)).data)
        else:
            data = location.read_range(name, 0, most_stored_bytes(array, number) + 1)
            if data is None:
                raise FileNotFoundError(name)
            verifier.update(memoryview(data))
        verifier.finish()
        return verifier.count, None
    except BadChunkError as problem:
        return verifier.count, problem
    except FileNotFoundError:
        return 0, BadChunkError("missing", "is missing")
    except DamagedCheckpointError as error:
        return 0, BadChunkError("crc", f"cannot be decoded: {_first_line(error)}")
    except OSError as error:
        if not location.is_local:  # the store failed, or refused: that is no damage
            raise
        return 0, BadChunkError("unreadable", f"cannot be read: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
